"""How passes are cut is known of steps that differ in microbatches alone."""

from dataclasses import fields

import numpy as np
from hypothesis import given, settings

from meshwise.simulator.program import Program
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.lower import _LoweredPasses, _StepLowering, lower
from meshwise.strategies.lowering.stage_costs import StageCosts

from ..plans import Case, any_cases


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
