"""The most that passes hold: their memory action by action, in the order of the schedule."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.bounds.pass_peaks import PassMemory, find_pass_peaks, peak_activations
from meshwise.strategies.lowering.costs.memory import StageMemory
from meshwise.strategies.lowering.tasks.fully_sharded import Sharing
from meshwise.strategies.lowering.tasks.variants import FIRST_OFFSET, JOINED_OFFSET, WHOLE_VARIANTS, kind_of
from meshwise.strategies.schedules.orders import list_actions
from meshwise.strategies.schedules.schedule import ActionKind, Schedule

from ..schedules.test_schedule import schedules

BYTES = st.integers(0, 9)


def fullest(value: Schedule, rank: int, stages: Sequence[StageMemory]) -> int:
    """Return the peak of one rank, action by action."""
    held = peak = 0
    for action in value.orders[rank]:
        stage = stages[action.stage]
        forward = action.kind is ActionKind.FORWARD
        held += stage.kept_bytes if forward else 0
        peak = max(peak, held + (stage.forward if forward else stage.backward))
        held -= 0 if forward else stage.kept_bytes
    return peak


def shape(value: Schedule) -> tuple[str, int, int, int]:
    """Return a schedule by name, with its ranks, microbatches and chunks."""
    return value.name, value.num_ranks, value.num_microbatches, value.num_stages // value.num_ranks


@given(schedules(), st.data())
def test_the_peak_is_that_of_all_actions_in_order(value: Schedule, data: st.DataObject) -> None:
    stages = [StageMemory(*data.draw(st.tuples(BYTES, BYTES, BYTES))) for _ in range(value.num_stages)]
    expected = [fullest(value, rank, stages) for rank in range(value.num_ranks)]
    assert peak_activations(list_actions(*shape(value)), stages).tolist() == expected


def test_the_peak_of_a_schedule_counts_the_microbatches_in_flight() -> None:
    # 1F1B on 2 stages: the first holds 2 microbatches as it runs a backward, the last one
    stages = [StageMemory(100, 30, 20), StageMemory(10, 1, 5)]
    assert peak_activations(list_actions("1f1b", 2, 32, 1), stages).tolist() == [2 * 100 + 30, 10 + 5]
    # GPipe holds all 32, and a backward of the last needs more than a forward
    assert peak_activations(list_actions("gpipe", 2, 32, 1), stages).tolist() == [3230, 320 + 5]


@given(schedules(), st.data())
def test_where_all_variants_of_a_pass_are_alike_the_peak_is_that_of_activations(
    value: Schedule, data: st.DataObject
) -> None:
    stages = [StageMemory(*data.draw(st.tuples(BYTES, BYTES, BYTES))) for _ in range(value.num_stages)]
    passes = [
        {
            base + offset: PassMemory(*_describe_pass(stage, kind_of(base)))
            for base in WHOLE_VARIANTS
            for offset in (0, JOINED_OFFSET, FIRST_OFFSET, FIRST_OFFSET + JOINED_OFFSET)
        }
        for stage in stages
    ]
    rows, expected = list_actions(*shape(value)), peak_activations(list_actions(*shape(value)), stages)
    for sharing in (Sharing(), Sharing(gradients=True), Sharing(gradients=True, parameters=True)):
        assert find_pass_peaks(rows, sharing, passes).tolist() == expected.tolist()


def _describe_pass(stage: StageMemory, kind: ActionKind) -> tuple[int, int]:
    """Return the lasting change of a pass, and its peak above the level before it."""
    if kind is ActionKind.FORWARD:
        return stage.kept_bytes, stage.kept_bytes + stage.forward
    return -stage.kept_bytes, stage.backward
