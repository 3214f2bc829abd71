"""Pipelines without a flush: the steady state by hand, versions of the weights, and several ways to the same answer."""

import sys
from dataclasses import replace
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import longest_path, simulate, step_ticks, step_time
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category, Program, TaskKind
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import optimizer_ticks
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import layouts

from ...problems import problem
from ..test_lower import Case, cases

BOTH = ("pipedream", "pipedream_2bw")
MODULE = sys.modules["meshwise.strategies.lowering.lower"]


def pipeline(schedule: str, layers: tuple[int, ...], microbatches: int) -> tuple[Problem, Plan]:
    """Return a pipeline of stages of so many equal layers and nothing else."""
    small = problem(devices=len(layers), layers=sum(layers), batch=microbatches)
    names = iter(name for name, block in small.graph.occurrences if block.layer)
    stages = tuple(Stage(tuple(next(names) for _ in range(count))) for count in layers)
    layout = Layout(pipeline=len(layers), schedule=schedule, stages="balanced")
    return small, replace(complete(small, layout), stages=stages)


def passes_and_updates(small: Problem, plan: Plan) -> list[tuple[int, int]]:
    """Return the ticks of a forward and a backward together, and of an update, of every stage."""
    costs, device = StageCosts(small).plan_costs(plan), small.cluster.accelerator
    updates = [optimizer_ticks(device, small.training, plan, held) for held in costs.plan_parameters.positions]
    both = [stage.forward_ticks + stage.backward_ticks for stage in costs.stages]
    return list(zip(both, updates, strict=True))


def without_transfers(program: Program) -> Program:
    """Return a program whose sends take no time."""
    free = TaskKind.PIPELINE_COMMUNICATION
    work = tuple(replace(w, duration=0) if w.kind is free else w for w in program.work)
    sends = np.array([w.kind is free for w in program.work])[program.work_of]
    return replace(program, work=work, flow_of=np.where(sends, -1, program.flow_of))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 5, 8])
def test_equal_stages_are_never_idle(ranks: int, microbatches: int) -> None:
    # PipeDream (SOSP 2019, section 3.2): no bubble; m (f + b) and an update after each, or one a step with 2BW
    for name, updates in (("pipedream", microbatches), ("pipedream_2bw", 1)):
        small, plan = pipeline(name, (1,) * ranks, microbatches)
        ((both, update), *others) = passes_and_updates(small, plan)
        assert all(each == (both, update) for each in others)
        program = without_transfers(lower(small, plan))
        assert step_ticks(program) == microbatches * both + updates * update
        assert simulate(program).bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("layers", [(1, 2), (3, 1, 2), (1, 1, 4, 1)])
def test_the_slowest_stage_sets_the_step(layers: tuple[int, ...]) -> None:
    for name, updates in (("pipedream", 6), ("pipedream_2bw", 1)):
        small, plan = pipeline(name, layers, 6)
        program = without_transfers(lower(small, plan))
        assert step_ticks(program) == max(
            6 * both + updates * update for both, update in passes_and_updates(small, plan)
        )


@pytest.mark.parametrize("microbatches", [4, 6])
def test_one_more_step_adds_the_step_time(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # with sends the pipeline is as long as p microbatches in flight go round, so that p / gcd(p, m) steps repeat:
    # of 4 stages and 6 microbatches 2 steps, the ends of which are not evenly apart
    small, plan = pipeline("pipedream_2bw", (1, 1, 1, 1), microbatches)
    makespans = []
    for run in (64, 72, 80):
        monkeypatch.setattr(MODULE, "SETTLING_MICROBATCHES", run * microbatches)
        program = lower(small, plan)
        assert program.steps is not None and len(program.steps.tasks) == run
        makespans.append(int(longest_path.finish_times(program)[1].max()))
    assert simulate(program, "longest_path").steps == 4 // gcd(4, microbatches)
    added = [b - a for a, b in pairwise(makespans)]
    assert added == [8 * step_ticks(program, "longest_path")] * 2


def test_a_period_may_be_several_steps() -> None:
    small, plan = pipeline("pipedream", (1, 1, 1, 1), 3)
    timeline = simulate(lower(small, plan), "longest_path")
    assert timeline.steps == 4  # lcm(4, 3) = 12 microbatches


def test_synchronous_pipelines_take_longer_by_their_bubble() -> None:
    # Narayanan et al., SC 2021, section 2.2.1: (p - 1) (f + b)
    small, plan = pipeline("pipedream_2bw", (1, 1, 1, 1), 8)
    both, update = passes_and_updates(small, plan)[0]
    flushed = without_transfers(lower(small, replace(plan, schedule="1f1b")))
    assert step_ticks(flushed) - step_ticks(without_transfers(lower(small, plan))) == 3 * both
    assert step_ticks(flushed) == 11 * both + update


def held(small: Problem, plan: Plan, category: Category) -> list[float]:
    """Return what every pipeline rank holds of a category at the start of the window."""
    return [profile.usage[0][CATEGORIES.index(category)] for profile in simulate(lower(small, plan)).memory]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_versions_are_of_the_weights_that_passes_read(precision: str) -> None:
    # PipeDream, section 3.3: p - rank of them; 2BW, section 3.1: 2. Bytes: those of the weights in the precision of
    # passes; the optimizer's states, with the fp32 copy, and gradients are kept once.
    small = problem(devices=4, layers=8, precision=precision)
    flushed, stashed, double = (complete(small, Layout(pipeline=4, schedule=name)) for name in ("1f1b", *BOTH))
    each = [small.training.parameter_bytes * count for count in StageCosts(small).plan_parameters(flushed).elements]
    assert held(small, flushed, Category.PARAMETERS) == each
    assert held(small, stashed, Category.PARAMETERS) == [n * size for n, size in zip((4, 3, 2, 1), each, strict=True)]
    assert held(small, double, Category.PARAMETERS) == [2 * size for size in each]
    for plan in (stashed, double):
        for category in (Category.GRADIENTS, Category.OPTIMIZER):
            assert held(small, plan, category) == held(small, flushed, category)


def test_gradients_summed_beneath_the_next_step_have_a_second_buffer() -> None:
    small = problem(layers=8)
    for fields, buffers in (({}, 2), ({"overlap_gradients": False}, 1), ({"schedule": "pipedream"}, 1)):
        layout = Layout(pipeline=4, data=2, **{"schedule": "pipedream_2bw"} | fields)  # type: ignore[arg-type]
        usual = held(small, complete(small, replace(layout, schedule="1f1b")), Category.GRADIENTS)
        assert held(small, complete(small, layout), Category.GRADIENTS) == [buffers * size for size in usual]


@pytest.mark.parametrize("microbatches", [1, 8])
def test_activations_are_those_of_one_forward_one_backward(microbatches: int) -> None:
    # p - rank microbatches of 8 sequences are in flight, however few a step has: as with 1F1B and 8 of them
    small = problem(devices=4, layers=8, batch=8 * microbatches)
    plan = complete(small, Layout(pipeline=4, schedule="pipedream", microbatch=8))
    many = problem(devices=4, layers=8, batch=64)
    flushed = simulate(lower(many, complete(many, Layout(pipeline=4, microbatch=8)))).memory
    weights = [count * small.training.parameter_bytes for count in StageCosts(small).plan_parameters(plan).elements]
    expected = [profile.peak + (3 - rank) * weights[rank] for rank, profile in enumerate(flushed)]
    assert [profile.peak for profile in simulate(lower(small, plan)).memory] == expected
    assert PlanMemory(StageCosts(small)).peak(plan) == max(expected)


def test_gradients_are_summed_once_a_step_or_after_every_backward() -> None:
    small = problem(layers=4, batch=32)
    for name, updates in (("pipedream", 8), ("pipedream_2bw", 1), ("1f1b", 1)):
        plan = complete(small, Layout(pipeline=2, data=4, schedule=name))
        program = lower(small, plan)
        steps = 1 if program.steps is None else len(program.steps.tasks)
        kinds = [program.work[index].kind for index in program.work_of]
        # one bucket and one optimizer step on each of 2 stages; data ranks are one class
        assert kinds.count(TaskKind.OPTIMIZER) == 2 * updates * steps
        assert kinds.count(TaskKind.DATA_COMMUNICATION) % (2 * updates * steps) == 0


def test_reductions_run_beneath_the_next_step() -> None:
    # 2BW: gradients of a step are due a whole step later, so that a reduction shorter than that costs nothing;
    # PipeDream waits for each of them
    small, plan = pipeline("pipedream_2bw", (1, 1), 8)
    small = replace(problem(devices=4, layers=2, batch=16, bandwidth=4e9), graph=small.graph)
    layout = Layout(pipeline=2, data=2, schedule="pipedream_2bw", stages="balanced")
    once = replace(complete(small, layout), stages=plan.stages)
    every = replace(once, schedule="pipedream")
    both, update = passes_and_updates(small, once)[0]
    costs = StageCosts(small)
    size = float(small.training.gradient_bytes * costs.plan_parameters(once).elements[0])
    reduction = costs.machine(once).communicator(DATA, 0).ticks(Collective.ALL_REDUCE, size)
    assert both < reduction < 7 * both  # longer than what is left of any pass
    steps = [step_ticks(without_transfers(lower(small, plan)), "longest_path") for plan in (once, every)]
    assert steps == [8 * both + update, 8 * (both + reduction + update)]


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"zero": 1}, "all_gather parameters"),
        ({"offload": Offloading(optimizer=WHOLE_FRACTION)}, "parameters from host"),
    ],
)
def test_a_step_begins_with_the_weights_of_two_steps_before(fields: dict[str, object], last: str) -> None:
    # 2BW, section 3.1: W(t - 1), which the gradients of step t - 2 made, is what step t reads; and it is in no hurry:
    # steps between begin while the update is under way
    small = problem(devices=4, layers=8, batch=16, bandwidth=1e8)
    plan = complete(small, Layout(pipeline=2, data=2, schedule="pipedream_2bw", **fields))  # type: ignore[arg-type]
    program = lower(small, plan)
    starts, ends = longest_path.finish_times(program)
    assert program.steps is not None
    names = [work.pieces[0].operators for work in program.work]
    for rank in range(2):
        own = {index for index, stream in enumerate(program.streams) if stream.rank_class == rank}
        rows = [[task for task in row if own & set(program.streams_of(task))] for row in program.steps.tasks.tolist()]
        updated = [max(ends[task] for task in row if names[program.work_of[task]] == last) for row in rows]
        forwards = [
            [task for task in row if program.work[program.work_of[task]].kind is TaskKind.FORWARD] for row in rows
        ]
        begun = [min(starts[task] for task in row) for row in forwards]
        assert all(before <= start for before, start in zip(updated, begun[2:], strict=False))
        assert any(before > start for before, start in zip(updated, begun[1:], strict=False))


@pytest.mark.parametrize("launch", [1e-7, 1e-4])
def test_a_host_that_launches_ahead_does_not_hide_that_steps_repeat(launch: float) -> None:
    # with 100 us a kernel the host sets the step, with 0.1 us it is ever further ahead
    small = problem(devices=4, layers=8, batch=8, launch=launch)
    plan = complete(small, Layout(pipeline=4, schedule="pipedream_2bw"))
    timeline = simulate(lower(small, plan), "longest_path")
    assert timeline.repeats
    fast = step_time(lower(problem(devices=4, layers=8, batch=8), plan), "longest_path")
    assert (timeline.step_time > 10 * fast) == (launch == 1e-4)


def test_a_step_moves_the_bytes_of_a_step_with_a_flush() -> None:
    small = problem(layers=8, batch=32, tied=True)
    plan = complete(small, Layout(pipeline=2, data=2, tensor=2, schedule="pipedream_2bw"))
    flushed, unflushed = (simulate(lower(small, each)) for each in (replace(plan, schedule="1f1b"), plan))
    assert [link.bytes for link in flushed.links] == pytest.approx([link.bytes for link in unflushed.links])


@st.composite
def unflushed(draw: st.DrawFn) -> Case:
    case = draw(cases())._replace(clipping=False, schedule=draw(st.sampled_from(BOTH)))
    return case._replace(tied=False) if case.schedule == "pipedream" else case


@given(unflushed())
@settings(max_examples=10, deadline=None)
def test_every_way_to_the_longest_path_agrees(case: Case) -> None:
    small, plan = case.build()
    costs = StageCosts(small)
    operators, chains = (lower(small, plan, granularity) for granularity in Granularity)
    path = step_ticks(chains, "longest_path")
    assert step_ticks(operators, "longest_path") == path
    assert step_ticks(lower(small, plan, folded=False), "longest_path") <= path
    assert SimulatedCost(small).list_path_ticks([plan]) == [path]
    assert SimulatedCost(small).plan_bound(plan) <= step_time(chains, "longest_path")
    assert PlanMemory(costs).peak(plan) == simulate(chains, "longest_path").peak_memory


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "fields", [{}, {"zero": 1}, {"offload": Offloading(optimizer=WHOLE_FRACTION)}, {"overlap_gradients": False}]
)
@pytest.mark.parametrize("bandwidth", [1e9, 1e11])
def test_steps_that_repeat_are_the_same_folded_or_not(name: str, fields: dict[str, object], bandwidth: float) -> None:
    small = problem(layers=8, batch=8, bandwidth=bandwidth, tied=name == "pipedream_2bw")
    plan = complete(small, Layout(pipeline=2, data=2, tensor=2, schedule=name, **fields))  # type: ignore[arg-type]
    program = lower(small, plan)
    timeline, apart = simulate(program), simulate(lower(small, plan, folded=False))
    assert timeline.repeats
    assert timeline.step_time == pytest.approx(apart.step_time, rel=1e-6)
    assert step_time(program, "longest_path") <= timeline.step_time
    assert SimulatedCost(small).evaluate(plan).step_time == timeline.step_time
    assert sum(link.bytes * link.count for link in timeline.links) == pytest.approx(
        sum(link.bytes * link.count for link in apart.links), rel=1e-9
    )


@pytest.mark.parametrize(
    ("layout", "training", "tied", "message"),
    [
        (Layout(zero=2), {}, False, r"zero\(2\) <= 1 does not hold for pipedream_2bw.* whole gradients"),
        (Layout(zero=3), {}, False, r"zero\(3\) <= 1 does not hold for pipedream_2bw.* several versions"),
        (Layout(), {"gradient_clipping": True}, False, "pipedream_2bw has no flush.* the norm of all at once"),
        (
            Layout(schedule="pipedream"),
            {},
            True,
            "tied embeddings .* nearest: pipedream_2bw, or tied_embeddings: false",
        ),
        (Layout(microbatch=8), {}, False, r"microbatches\(1\) >= pipeline\(4\) does not hold"),
    ],
)
def test_what_cannot_go_without_a_flush_is_refused(
    layout: Layout, training: dict[str, bool], tied: bool, message: str
) -> None:
    small = problem(batch=16, tied=tied)
    small = replace(small, training=replace(small.training, **training))  # type: ignore[arg-type]
    name = layout.schedule if layout.schedule in BOTH else "pipedream_2bw"
    with pytest.raises(ValueError, match=message):
        complete(small, replace(layout, pipeline=4, data=2, schedule=name))


def test_tied_parameters_are_summed_once_a_step() -> None:
    # both ends have made theirs (m >= p) long before the sum is due: it costs a step nothing but its link
    small = problem(devices=4, batch=16, tied=True, bandwidth=1e12)
    plan = complete(small, Layout(pipeline=4, schedule="pipedream_2bw"))
    program = lower(small, plan)
    assert program.steps is not None
    sums = [program.work[index].kind for index in program.work_of].count(TaskKind.DATA_COMMUNICATION)
    assert sums % len(program.steps.tasks) == 0 and sums
    apart = replace(small, graph=replace(small.graph, tied=()))
    held_tied, held_apart = (held(each, plan, Category.GRADIENTS) for each in (small, apart))
    assert [a / b for a, b in zip(held_tied, held_apart, strict=True)] == [
        1,
        1,
        1,
        2,
    ]  # the last stage waits for the first


def test_the_search_proposes_no_stale_weights() -> None:
    assert not {layout.schedule for layout in layouts(problem(batch=8))} & set(BOTH)
    assert not list(violations(problem(), Layout(pipeline=8, schedule="pipedream")))
