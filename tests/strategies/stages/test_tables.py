"""Bounds of divisions: below the simulated step of every one of them that fits, and as near as it is to the best."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import step_time
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.stage_search import divide_layout, recompute_layers
from meshwise.strategies.stages.integer_programs import DivisionProgram
from meshwise.strategies.stages.tables import build_division_problem, compute_work_bound

from ..problems import problem

TICKS = 1e12


def small(layers: int, room: float, pipeline: int) -> Problem:
    """Return a problem whose devices have a part of the memory that a plan without recomputation takes."""
    found = problem(devices=pipeline, batch=6, layers=layers)
    plan = complete(found, Layout(pipeline=pipeline, stages="balanced"))
    needs = PlanMemory(StageCosts(found)).peak(plan)
    nodes = tuple(
        (replace(node, accelerator=replace(node.accelerator, memory=room * needs)), count)
        for node, count in found.cluster.nodes
    )
    return replace(found, cluster=replace(found.cluster, nodes=nodes))


def divisions(found: Problem, layout: Layout, layers: int) -> list[tuple[tuple[int, ...], tuple[int, ...], Plan]]:
    """Return every division with whole recomputation of the first layers of stages, and its plan."""
    stages = layout.pipeline * layout.chunks
    result = []
    for counts in product(range(1, layers + 1), repeat=stages):
        if sum(counts) != layers:
            continue
        for again in product(*(range(count + 1) for count in counts)):
            pairs = zip(again, counts, strict=True)
            hows = [recompute_layers(Recompute.FULL, n, count) for n, count in pairs]
            result.append((counts, again, complete(found, divide_layout(layout, counts, hows))))
    return result


CASES = st.tuples(
    st.sampled_from([("1f1b", 2, 1, 4), ("gpipe", 2, 1, 3), ("1f1b", 3, 1, 4), ("interleaved", 2, 2, 5)]),
    st.sampled_from([0.7, 0.85, 1.0, 2.0]),
)


@given(CASES)
@settings(max_examples=12, deadline=None)
def test_no_division_that_fits_is_simulated_faster_than_the_bound(
    case: tuple[tuple[str, int, int, int], float],
) -> None:
    (schedule, pipeline, chunks, layers), room = case
    found = small(layers, room, pipeline)
    layout = Layout(pipeline=pipeline, schedule=schedule, chunks=chunks, stages="balanced")
    costs = StageCosts(found)
    needs, plain = costs.get_shared(PlanMemory), complete(found, layout)
    given_ = build_division_problem(costs, plain, (Recompute.FULL,), layers)
    program = DivisionProgram(given_)
    relaxed, between = program.solve_relaxed(), program.bound
    whole = program.solve_integer(1000)
    times = []
    for counts, again, plan in divisions(found, layout, layers):
        if needs.fits(plan):
            assert given_.fits(counts, [again])
            time = step_time(lower(found, plan, costs=costs)) * TICKS
            assert given_.compute_step_ticks(counts, [again]) <= time * (1 + 1e-9)
            times.append(time)
    if times:
        assert relaxed is not None and whole is not None
        assert compute_work_bound(costs, plain, layers) <= min(times) * (1 + 1e-9)
        assert between <= program.bound <= min(times) * (1 + 1e-9)


def test_every_division_of_the_plan_itself_is_among_those_that_are_bounded() -> None:
    # a head of many classes: balanced stages have 4, 4 and 1 of 9 layers, two fewer than even ones
    found = problem(devices=3, batch=6, layers=9, vocab=128 * 24)
    plan = complete(found, Layout(pipeline=3, stages="balanced"))
    counts = [sum(name.startswith("layers") for name in stage.blocks) for stage in plan.stages]
    given_ = build_division_problem(StageCosts(found), plan, (), 0)
    assert (given_.min_layers, given_.max_layers) == (min(counts), max(counts))
    assert min(counts) < 3 < max(counts)
