"""Orders as columns say what the schedule says."""

from itertools import pairwise

from hypothesis import given

from meshwise.strategies.schedules.orders import list_orders
from meshwise.strategies.schedules.schedule import Action, ActionKind, Schedule

from .test_schedule import schedules


@given(schedules())
def test_columns_are_the_actions_of_the_schedule(value: Schedule) -> None:
    chunks = value.num_stages // value.num_ranks
    columns = list_orders(value.name, value.num_ranks, value.num_microbatches, chunks)
    kinds = tuple(ActionKind)
    rows = zip(columns.passes.tolist(), columns.microbatch.tolist(), strict=True)
    actions = [Action(passes // 2, kinds[passes % 2], microbatch) for passes, microbatch in rows]
    start = columns.start.tolist()
    assert [tuple(actions[a:b]) for a, b in pairwise(start)] == list(value.orders)
