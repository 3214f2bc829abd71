"""Orders that are written out: a schedule is the same by text and by name, and any order that can finish runs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.rule import Placement, WrittenRule
from meshwise.strategies.schedules.schedule import SCHEDULES, Action, ActionKind, build_schedule, find_rule

from ..problems import problem

FLUSHED = [name for name, rule in SCHEDULES.items() if not rule.is_asynchronous]


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize("fields", [{"data": 4}, {"tensor": 2, "data": 2, "zero": 1}])
def test_a_schedule_by_its_text_is_the_schedule_by_its_name(name: str, fields: dict[str, int]) -> None:
    chunks = SCHEDULES[name].chunks[1] or 2
    small = problem(layers=8, batch=8 * fields["data"])
    layout = Layout(pipeline=2, schedule=name, chunks=chunks, **fields)
    named = complete(small, layout)
    text = str(named.actions)
    for stated in (1, chunks):  # what is left out is what the text says
        written = complete(small, replace(layout, schedule=text, chunks=stated))
        assert written == replace(named, schedule=text)
    rows = [(SimulatedCost(small), plan) for plan in (named, written)]
    assert len({(costs.evaluate(plan).step_time, costs.peak_memory(plan)) for costs, plan in rows}) == 1
    bounds = [costs.plan_bound(plan) for costs, plan in rows]
    # a text says neither which stage ends last nor that microbatches come one after another
    assert bounds[0] == bounds[1] or (bounds[1] < bounds[0] and (named.splits_backward or name == "naive"))
    both = SimulatedCost(small).list_path_ticks([named, written])
    assert both[0] == both[1]
    assert written.actions.orders == named.actions.orders
    assert written.positions == named.positions


@st.composite
def orders(draw: st.DrawFn) -> str:
    """Return the text of an order that can finish: stages anywhere, actions as they become ready, in any order."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    stage_ranks = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=8 - ranks))]))
    while 8 % len(stage_ranks):
        stage_ranks = [*stage_ranks, draw(st.integers(0, ranks - 1))]
    last, splits = len(stage_ranks) - 1, draw(st.booleans())
    ready = [Action(0, ActionKind.FORWARD, number) for number in range(microbatches)]
    rows: list[list[str]] = [[] for _ in range(ranks)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        stage, kind, number = action
        rows[stage_ranks[stage]].append(str(action))
        whole = ActionKind.INPUT if splits and draw(st.booleans()) else ActionKind.BACKWARD
        if kind is ActionKind.FORWARD:
            ready.append(Action(stage + 1, kind, number) if stage < last else Action(stage, whole, number))
        elif kind is not ActionKind.WEIGHT:
            ready += [Action(stage - 1, whole, number)] if stage else []
            ready += [Action(stage, ActionKind.WEIGHT, number)] if kind is ActionKind.INPUT else []
    return "\n".join(map(" ".join, rows))


def plan_of(text: str, data: int = 1, **fields: object) -> tuple[SimulatedCost, Plan]:
    """Return a plan of an order on a node of its own, and what evaluates it."""
    rule = find_rule(text)
    assert isinstance(rule, WrittenRule)
    ranks = rule.num_ranks
    count = build_schedule(text, ranks, rule.num_microbatches, rule.chunks[0]).num_microbatches
    small = problem(devices=ranks * data, nics=ranks * data, layers=8, batch=count * data, **fields)  # type: ignore[arg-type]
    return SimulatedCost(small), complete(small, Layout(pipeline=ranks, data=data, schedule=text))


@given(orders(), st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_every_way_to_the_step_time_of_any_order_agrees(text: str, data: int) -> None:
    costs, plan = plan_of(text, data)
    program = lower(costs.problem, plan)
    path, simulated = (step_time(program, engine) for engine in ("longest_path", "discrete_event"))
    assert costs.plan_bound(plan) <= path <= simulated
    assert costs.longest_paths([plan]) == [path]
    assert step_time(lower(costs.problem, plan, folded=False)) == pytest.approx(simulated, rel=1e-6)
    assert PlanMemory(StageCosts(costs.problem)).peak(plan) == simulate(program).peak_memory
    assert str(plan.actions) == text


@given(orders())
@settings(max_examples=60, deadline=None)
def test_any_order_takes_its_longest_path_where_transfers_take_no_bytes(text: str) -> None:
    costs, plan = plan_of(text, bandwidth=1e30)
    program = lower(costs.problem, plan)
    assert step_time(program) == step_time(program, "longest_path")


def test_stages_may_be_anywhere() -> None:
    # rank 0 holds the first and the last of 4 stages, rank 2 those between, rank 1 none of their neighbours
    text = "0F0 3F0 3B0 0B0\n4F0 4B0\n1F0 2F0 2B0 1B0"
    rule = find_rule(text)
    assert rule.placement is Placement.WRITTEN
    with pytest.raises(ValueError, match=r"chunks\(3\) = 2 does not hold; nearest: 2"):
        complete(problem(devices=3, layers=5, batch=1), Layout(pipeline=3, chunks=3, schedule=text))
    small = problem(devices=3, layers=5, batch=1)
    plan = complete(small, Layout(pipeline=3, schedule=text))
    assert (plan.positions, plan.chunks, len(plan.stages)) == ((0, 2, 2, 0, 1), 2, 5)
    assert plan.hops == ((0, 2), (2, 0))
    program = lower(small, plan)
    sends = [n for n, work in enumerate(program.work) if work.kind is TaskKind.PIPELINE_COMMUNICATION]
    pairs = [
        {program.streams[s].rank_class for s in program.streams_of(t)}
        for t in range(program.num_tasks)
        if program.work_of[t] in sends
    ]
    assert pairs.count({0, 2}) == 4 and pairs.count({0, 1}) == 2  # stages 0 to 1 and 2 to 3 and back, and 3 to 4
    timeline = simulate(program)
    order = [(kind.value[0].upper(), stage) for kind, stage, _ in timeline.order(0)]
    assert order == [("F", 0), ("F", 3), ("B", 3), ("B", 0)]


def test_parameters_are_gathered_before_the_first_forward_whichever_microbatch_it_takes() -> None:
    # ZeRO 3 that keeps them: one gather a block and step, and the first forward waits for that of its first block
    small = problem(devices=2, layers=2, batch=4)
    layout = Layout(data=2, zero=3, reshard_after_forward=False, schedule="0F1 0F0 0B0 0B1")
    program = lower(small, complete(small, layout))
    starts, ends = finish_times(program)
    kinds = [program.work[index].kind for index in program.work_of]
    gathers = [
        t
        for t in range(program.num_tasks)
        if StreamKind.GATHER in {program.streams[s].kind for s in program.streams_of(t)}
    ]
    forwards = [t for t, kind in enumerate(kinds) if kind is TaskKind.FORWARD]
    assert len(gathers) == len(small.graph.occurrences)
    assert starts[forwards].min() == ends[gathers].min() > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            r"rank 0 at 0B0 \(backward of microbatch 0 through stage 0\) waits for 1B0 of rank 1; "
            r"rank 1 at 1F1 \(forward of microbatch 1 through stage 1\) waits for 0F1 of rank 0$",
        ),
        ("0B0 0F0", "rank 0 at 0B0 .* waits for 0F0 of its own order, further on"),
        ("0F0 0B0\n1B0 1F0\n2F0 2B0", "cannot finish: rank 1 at 1B0 .* waits for 2B0 of rank 2; rank 2 at 2F0"),
    ],
)
def test_an_order_that_waits_for_itself_is_named(text: str, named: str) -> None:
    ranks = text.count("\n") + 1
    small = problem(devices=ranks, layers=6, batch=1 + text.count("0F1"))
    (found,) = violations(small, Layout(pipeline=ranks, schedule=text))
    assert found.field.startswith("schedule.")
    with pytest.raises(ValueError, match=named):
        complete(small, Layout(pipeline=ranks, schedule=text))


def test_the_equation_of_the_microbatches_is_stated() -> None:
    text = str(build_schedule("1f1b", 2, 4))
    named = r"global_batch\(32\) / \(data\(4\) \* microbatch\(1\)\) = 8 microbatches, the order has 4; nearest .*: 2"
    with pytest.raises(ValueError, match=named):
        complete(problem(batch=32), Layout(data=4, pipeline=2, schedule=text))
    with pytest.raises(ValueError, match=r"custom: pipeline\(4\) = 2 does not hold; nearest: 2"):
        complete(problem(batch=8), Layout(data=2, pipeline=4, schedule=text))


def test_a_plan_document_carries_its_order() -> None:
    small = problem(batch=32)
    text = str(build_schedule("interleaved", 2, 8, 2))
    plan = complete(small, Layout(data=4, pipeline=2, schedule=text))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "custom (2 chunks), 8 microbatches" in plan.describe()
