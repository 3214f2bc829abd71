"""Keys of plans: one object where costs are the same, and another wherever a decision changes them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from meshwise.strategies.lowering.costs.keys import KeyMaker, PlanKeys
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute

from ...plans import Case, any_cases
from ...problems import problem

SMALL = problem(layers=4, batch=16)
BASE = Layout(data=2, tensor=2, pipeline=2, sequence_parallel=True)
LEVELS: dict[str, Callable[[PlanKeys], object]] = {
    "cut": lambda keys: keys.cut,
    "run": lambda keys: keys.run,
    "passes": lambda keys: keys.passes,
    "stages": lambda keys: keys.stages,
    "states": lambda keys: keys.states,
}


def changed(small: Problem, first: Layout, second: Layout) -> set[str]:
    """Return the keys in which the plans of two layouts differ."""
    keys = KeyMaker(small)
    one, other = (keys.find_keys(complete(small, layout)) for layout in (first, second))
    return {name for name, find in LEVELS.items() if find(one) != find(other)}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, set()),
        # what decides when passes run and where ranks lie changes no cost of a block
        ({"schedule": "gpipe"}, set()),
        ({"scatter_gather": True}, set()),
        ({"order": ("data", "pipeline", "tensor")}, set()),
        ({"recompute": Recompute.FULL}, {"passes"}),
        ({"microbatch": 2}, {"run", "passes"}),
        ({"overlap_tensor": True}, {"run", "passes"}),
        ({"schedule": "zb1p"}, {"run", "passes", "states"}),
        ({"stages": (1, 3)}, {"stages"}),
        ({"overlap_gradients": False}, {"states"}),
        ({"zero": 1}, {"states"}),
        ({"zero": 2}, {"run", "passes", "states"}),
        ({"sequence_parallel": False}, {"cut", "run", "passes", "stages"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_decision_changes_the_keys_of_what_depends_on_it(change: dict[str, object], names: set[str]) -> None:
    assert changed(SMALL, BASE, replace(BASE, **change)) == names  # type: ignore[arg-type]


def test_data_ranks_cut_no_operators() -> None:
    # twice the ranks that share states, on a machine with twice the devices
    rows = [
        KeyMaker(small).find_keys(complete(small, Layout(data=devices // 4, tensor=2, pipeline=2)))
        for devices in (4, 8)
        for small in [problem(devices=devices, layers=4, batch=16)]
    ]
    assert [keys.states.shards for keys in rows] == [1, 2]
    assert rows[0].cut.mesh == rows[1].cut.mesh
    assert rows[0].cut.shardings == rows[1].cut.shardings
    assert rows[0].run.flags == rows[1].run.flags


@given(any_cases())
@settings(max_examples=40, deadline=None)
def test_keys_do_not_depend_on_what_was_asked_before(case: Case) -> None:
    small, plan = case.build()
    keys = KeyMaker(small)
    first = keys.find_keys(plan)
    keys.find_keys(replace(plan, recompute=Recompute.FULL, num_microbatches=plan.num_microbatches + 1))
    again = keys.find_keys(replace(plan))  # an equal plan that is another object
    assert all(find(first) is find(again) for find in LEVELS.values())
    assert first == again
    assert first.states == KeyMaker(small).find_keys(plan).states


def test_another_size_of_microbatches_is_the_key_of_a_plan_of_that_size() -> None:
    costs = StageCosts(SMALL)
    keys = [costs.find_keys(complete(SMALL, replace(BASE, microbatch=size))) for size in (1, 2)]
    assert costs.find_batch_run(keys[0].run, 2) is keys[1].run
    assert costs.find_batch_run(keys[0].run, 0) is costs.find_batch_run(keys[0].run, 1) is keys[0].run
    assert keys[1].run.sequences == keys[1].run.least_sequences == 2


def test_where_data_ranks_differ_there_is_no_one_size() -> None:
    run = KeyMaker(SMALL).find_keys(complete(SMALL, BASE)).run
    uneven = KeyMaker(SMALL).with_microbatch(run, (3, 1))
    assert uneven.least_sequences == 1
    with pytest.raises(ValueError, match=r"one size of microbatches, met \[3, 1\]"):
        _ = uneven.sequences
