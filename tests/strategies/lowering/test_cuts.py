"""How passes are cut is known of steps that differ in microbatches alone, and passes of a kind have the same parts."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings

from meshwise.simulator.engine import step_time
from meshwise.simulator.program import Program
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.lower import _LoweredPasses, _StepLowering, lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.variants import FORWARD_PASS, JOINED_OFFSET
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ..plans import Case, any_cases
from ..problems import problem


def same(one: Program, other: Program) -> None:
    """Assert that two programs are equal in every column."""
    for field in fields(Program):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name == "work":  # compared by identity
            left, right = ([(w.kind, w.stage, w.duration, list(w.pieces)) for w in works] for works in (left, right))
        assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right, field.name


@settings(max_examples=40, deadline=None)
@given(any_cases(8))
def test_how_passes_are_cut_does_not_depend_on_how_many_microbatches_run_them(case: Case) -> None:
    small, plan = case.build()
    costs = StageCosts(small)
    counted = _LoweredPasses(Cuts(costs, plan, costs.machine(plan), Granularity.CHAIN))
    if not plan.asynchronous:
        same(lower(small, plan, costs=costs), _StepLowering(counted, plan).build_program())


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_forward_that_gathers_has_the_parts_of_one_that_finds_all_gathered(tensor: int) -> None:
    # Of an embedding, two layers and a head that stay gathered, all but the head compute beneath the gather of the next
    # one, in the first forward alone.
    small = problem(devices=2 * tensor, layers=2, batch=4)
    small = replace(small, cluster=replace(small.cluster, overlap_slowdown=1.5))
    plan = complete(small, Layout(data=2, tensor=tensor, zero=3, reshard_after_forward=False))
    costs = StageCosts(small)
    cuts = Cuts(costs, plan, costs.machine(plan), Granularity.OPERATOR)
    first, later = (cuts.list_parts(0, variant, 0) for variant in (FORWARD_PASS + JOINED_OFFSET, FORWARD_PASS))
    assert [part.name for part in first] == [part.name for part in later]
    first_slowed, later_slowed = (
        [part.work.duration for part in parts if part.name.endswith("slowed by communication")]
        for parts in (first, later)
    )
    assert len(first_slowed) == 3 and min(first_slowed) > 0 and later_slowed == [0, 0, 0]
    assert len({step_time(lower(small, plan, granularity)) for granularity in Granularity}) == 1
