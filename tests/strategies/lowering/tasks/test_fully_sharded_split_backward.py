"""ZeRO 2 and 3 where backward is split or passes run in pairs: bytes, time and memory by hand."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate
from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.simulator.program import Category, StreamKind, TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.rule import WrittenRule
from meshwise.strategies.schedules.schedule import SCHEDULES, ActionKind, find_rule

from ...problems import problem
from ...schedules.test_schedule_written import orders as any_orders
from .test_fully_sharded import Pair, curved, ringed, sent, ticks, with_cluster

SPLIT = [name for name, rule in SCHEDULES.items() if rule.splits_backward]
FP32 = 4
H = 64  # hidden size of `problem`


def equal(name: str, data: int = 2, ranks: int = 2, **choices: Any) -> tuple[Problem, Plan]:
    """Return a pipeline of two equal layers a stage."""
    chunks = SCHEDULES[name].chunks[0]
    stages = ranks * chunks
    small = problem(devices=data * ranks * choices.get("tensor", 1), layers=2 * stages, batch=8 * data)
    plan = complete(small, Layout(data=data, pipeline=ranks, schedule=name, chunks=chunks, **choices))
    layers = (Stage((f"layers.{2 * n}", f"layers.{2 * n + 1}")) for n in range(stages))
    return small, replace(plan, stages=tuple(layers))


def used(timeline: Timeline, category: Category, position: int = 0) -> list[float]:
    """Return the bytes of a category on a device, without those that stay, one after another."""
    found = timeline.memory[position].usage
    held = [float(usage[list(Category).index(category)]) for usage in found]
    return [now - held[-1] for before, now in pairwise([-1.0, *held]) if now != before]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_shared_gradients_and_parameters_go_with_any_schedule(zero: int, name: str) -> None:
    layout = Layout(data=2, pipeline=2, schedule=name, chunks=SCHEDULES[name].chunks[1] or 2, zero=zero)
    assert not list(violations(problem(devices=4, batch=32), layout))


# bytes


BYTES: dict[str, tuple[dict[str, Any], Any]] = {
    # Rajbhandari et al. 2020, section 7, as where backward is whole: gradients of weights need no parameters
    "2": ({"zero": 2}, lambda m, p, last: m * p + p),
    "3": ({"zero": 3}, lambda m, p, last: m * (p + (p - last) + p)),
    "3 kept": ({"zero": 3, "reshard_after_forward": False}, lambda m, p, last: p + m * p),
}


@pytest.mark.parametrize("stage", list(BYTES))
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_moves_the_bytes_of_the_zero_paper(stage: str, overlap: bool, microbatches: int) -> None:
    choices, expected = BYTES[stage]
    small = ringed(problem(devices=4, batch=4 * microbatches, layers=3))
    plan = complete(small, Layout(data=4, schedule="zb1p", overlap_gradients=overlap, **choices))
    cost = StageCosts(small).plan_costs(plan)
    whole, last = FP32 * cost.parameters[0], FP32 * cost.stages[0].blocks[-1].parameters
    moved = sent(simulate(lower(small, plan)), 4)
    assert moved == pytest.approx(expected(microbatches, whole, last) * 3 / 4, rel=1e-12)


@pytest.mark.parametrize("name", SPLIT)
def test_a_pass_gathers_the_units_that_it_reads_and_reduces_those_whose_gradients_it_makes(name: str) -> None:
    small, plan = equal(name, zero=3)
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    gathers = Counter(span.stage for span in timeline.spans if span.stream is StreamKind.GATHER)
    reductions = Counter(
        span.stage for span in timeline.spans if span.stream is StreamKind.DATA and "gradients" in span.operators
    )
    for stage in range(len(plan.stages)):
        order = plan.actions.orders[plan.positions[stage]]
        kept = sum(
            one.stage == two.stage == stage and one.kind is ActionKind.FORWARD and two.kind in "BI"
            for one, two in pairwise(order)
        )
        m = plan.num_microbatches
        assert gathers[stage] == 2 * (2 * m) - kept  # two units, forward and back
        assert reductions[stage] == 2 * m


# time


@pytest.mark.parametrize("microbatches", [1, 3])
def test_only_the_first_gather_and_the_last_reduction_show_where_they_are_short(microbatches: int) -> None:
    pair = Pair.of(1e-9, microbatches, schedule="zb1p")
    (i0, i1), (w0, w1) = (ticks_of(pair, kind) for kind in (ActionKind.INPUT, ActionKind.WEIGHT))
    (f0, f1), g0, g1 = pair.forward, pair.collective(0), pair.collective(1)
    assert max(g0, g1) < min(f0, f1, i0, i1, w0, w1)
    # the next microbatch's first gather runs beside the last reduction: each of as many bytes
    expected = g0 + microbatches * (f0 + f1 + i1 + i0 + w1 + w0 + g0) + pair.optimizer
    assert ticks(lower(pair.small, pair.plan)) == expected


def test_gathers_longer_than_computing_show_one_after_another() -> None:
    pair = Pair.of(1e-3, schedule="zb1p")
    (i0, i1), (w0, w1) = (ticks_of(pair, kind) for kind in (ActionKind.INPUT, ActionKind.WEIGHT))
    (_, f1), g0, g1 = pair.forward, pair.collective(0), pair.collective(1)
    # forward: both gathers, the second unit; gradients of inputs: the first unit is gathered beneath the second's;
    # those of weights gather nothing: what they make is reduced, the second unit's beneath the first's
    expected = g0 + g1 + f1 + max(i1, g0) + i0 + w1 + max(w0, g1) + g0 + pair.optimizer
    assert ticks(lower(pair.small, pair.plan)) == expected


def test_without_overlap_everything_comes_after_another() -> None:
    pair = Pair.of(1e-6, overlap_gradients=False, schedule="zb1p")
    g0, g1 = pair.collective(0), pair.collective(1)
    computing = sum(pair.forward) + sum(pair.backward) + pair.optimizer
    assert ticks(lower(pair.small, pair.plan)) == computing + (g0 + g1) + g0 + (g1 + g0)


def ticks_of(pair: Pair, kind: ActionKind) -> tuple[int, int]:
    first, second = StageCosts(pair.small).plan_costs(pair.plan).stages[0].blocks
    return first.passes.select(kind).ticks, second.passes.select(kind).ticks


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_waits_where_it_would_hold_more_than_two_buckets(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # a bucket begins when the reduction of the one before the last has ended, and any pass when all have
    monkeypatch.setattr("meshwise.strategies.lowering.tasks.data_parallel.BUCKET_BYTES", 0)
    small = curved(problem(devices=2, batch=4, layers=4), 1e-3, 2)
    plan = complete(small, Layout(data=2, schedule="zb1p", zero=zero, reshard_after_forward=zero < 3))
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    began: dict[tuple[int, str], float] = {}
    ended: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        if span.kind is TaskKind.WEIGHT_GRADIENT:
            began.setdefault((span.microbatch, span.operators.split(":")[0]), span.start)
        if span.stream is StreamKind.DATA and "gradients" in span.operators:
            ended[span.microbatch, span.operators.split()[-1]] = span.end
    for microbatch in (0, 1):
        order = [name for number, name in began if number == microbatch]
        assert len(order) == 6  # embedding, four layers and the head
        waits = [began[microbatch, b] - ended[microbatch, a] for a, b in zip(order[:-2], order[2:], strict=True)]
        assert waits == pytest.approx([0.0] * 4, abs=1e-9)  # reductions are long: all that computing waits for
    forwards = [s.start for s in timeline.spans if s.kind is TaskKind.FORWARD and s.microbatch == 1]
    assert min(forwards) >= max(end for (number, _), end in ended.items() if number == 0)


# memory


def test_the_fullest_moment_of_two_units_by_hand() -> None:
    pair = Pair.of(1e-9, schedule="zb1p")
    (first, second), (w0, w1) = (
        StageCosts(pair.small).plan_costs(pair.plan).stages[0].blocks,
        (FP32 * n for n in pair.weights),
    )
    a, b = first.memory, second.memory
    assert a.recomputed_bytes == b.recomputed_bytes == 0
    moments = (
        a.kept_bytes + a.forward + w0 + w1,  # forward of the first unit, the second is gathered
        a.kept_bytes + b.kept_bytes + b.forward + w1,
        a.kept_bytes + b.kept_bytes + b.gradients + b.inputs + w1 + w0,  # no gradients of weights yet
        a.kept_bytes + a.gradients + a.inputs + b.deferred_bytes + w0,
        a.deferred_bytes + b.deferred_bytes + b.weights + w1,  # no parameters: the second unit's gradients alone
        a.deferred_bytes + a.weights + w0 + w1,  # its own gradients, and those of the second on their way
    )
    count = ceil(sum(pair.weights) / 2)
    (buffers,) = StageCosts(pair.small).buffers(pair.plan)
    costs = SimulatedCost(pair.small)
    assert costs.peak_memory(pair.plan) == max(moments) + count * (4 + 4 + 8) + buffers  # fp32 Adam: two moments
    assert simulate(lower(pair.small, pair.plan)).peak_memory == costs.peak_memory(pair.plan)


def test_gradients_of_norms_wait_for_those_of_weights() -> None:
    # a layer has two norms of a weight and a bias each: their gradients come with those of inputs, the last layer's
    # first, and leave with their layer's bucket
    small, plan = equal("zb1p", ranks=1, zero=3)
    held = used(simulate(lower(small, plan, Granularity.OPERATOR)), Category.GRADIENTS)
    norms, layer = FP32 * 4 * H, FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    once = [norms, 2 * norms, norms + layer, 2 * layer, 0.0]
    assert held == [0.0, *once * plan.num_microbatches]


def test_gradients_of_weights_hold_no_parameters() -> None:
    # F: both units, the second; I, which follows at once: both, the first; W: none
    small, plan = equal("zb1p", ranks=1, zero=3)
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    unit = FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    assert used(timeline, Category.PARAMETERS) == [0.0, *[2 * unit, unit, 2 * unit, unit, 0.0] * plan.num_microbatches]


@pytest.mark.parametrize("granularity", Granularity)
def test_a_block_without_products_makes_its_gradients_with_those_of_inputs(granularity: Granularity) -> None:
    # a norm alone: W has nothing to compute, but its gradient, 4 * 32 bytes, leaves then
    tokens = (("batch", 1), ("sequence", 32), ("wide", 32))
    ends = [Tensor(name, ("batch", "sequence", "wide"), (1, 32, 32), "fp32") for name in ("in", "out")]
    norm = Operator("norm", OperatorKind.NORM, tokens, ("in",), ("out",), ("weight",), saved=("in",))
    blocks = [
        Block(f"block{n}", (norm,), (*ends, Tensor("weight", ("wide",), (32,), "fp32")), ("in",), ("out",))
        for n in range(2)
    ]
    small = replace(ringed(problem(devices=2, batch=2)), graph=OperatorGraph("norms", tuple(blocks), 32))
    plan = complete(small, Layout(data=2, schedule="zb1p", zero=3))
    timeline, costs = simulate(lower(small, plan, granularity)), SimulatedCost(small)
    weight = FP32 * 32
    assert used(timeline, Category.GRADIENTS) == [0.0, weight, 2 * weight, 0.0]
    assert sent(timeline, 2) == (2 + 1 + 2) * weight / 2  # both gathered, the first again, both reduced
    assert timeline.peak_memory == costs.peak_memory(plan)


def test_kept_parameters_are_given_up_with_the_last_gradients_of_weights() -> None:
    # F0 F1 I0 W0 .. I7 W7 on the first of two ranks: units go as those of W7 are reduced (torch, FSDPParamGroup)
    small, plan = equal("zb1p", zero=3, reshard_after_forward=False)
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    unit = FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    assert used(timeline, Category.PARAMETERS) == [0.0, 2 * unit, unit, 0.0]
    last = plan.num_microbatches - 1
    times, usage = timeline.memory[0].times, timeline.memory[0].usage
    held = [row[list(Category).index(Category.PARAMETERS)] for row in usage]
    given_up = [time for time, (before, now) in zip(times[1:], pairwise(held), strict=True) if now < before]
    weights = [s for s in timeline.spans if s.kind is TaskKind.WEIGHT_GRADIENT and (s.stage, s.microbatch) == (0, last)]
    assert min(given_up) > min(span.start for span in weights)
    assert max(given_up) == max(span.end for span in weights)


@pytest.mark.parametrize(("name", "tensor", "units"), [("zb1p", 1, 2), ("zbv", 1, 2), ("dualpipev", 2, 4)])
def test_a_pass_holds_two_units_and_a_pair_two_of_each(name: str, tensor: int, units: int) -> None:
    small, plan = equal(name, zero=3, tensor=tensor)
    unit = FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    assert max(used(simulate(lower(small, plan)), Category.PARAMETERS)) == units * unit


def test_a_pair_that_exchanges_nothing_runs_one_pass_after_the_other() -> None:
    # so the second gathers when the first has computed all, and two units are all that is held
    small, plan = equal("dualpipev", zero=3)
    unit = FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    assert max(used(timeline, Category.PARAMETERS)) == 2 * unit
    for forward, backward in plan.actions.overlapped_pairs:
        computed = [
            s.end
            for s in timeline.spans
            if (s.kind, s.stage, s.microbatch) == (TaskKind.FORWARD, forward.stage, forward.microbatch)
        ]
        gathered = [
            s.start
            for s in timeline.spans
            if s.stream is StreamKind.GATHER and (s.stage, s.microbatch) == (backward.stage, backward.microbatch)
        ]
        assert min(sorted(gathered)[-2:]) >= max(computed)  # the two units, long after those of the same forward


# parameters on the host


@pytest.mark.parametrize("data", [1, 2])
def test_parameters_come_from_the_host_for_forwards_and_gradients_of_inputs_alone(data: int) -> None:
    # F0 I0 W0 F1 ..: of two units the second is kept for the I that follows at once; both units' gradients leave in W
    offload = Offloading(optimizer=(1.0,), parameters=(1.0,))
    small, plan = equal("zb1p", data=data, ranks=1, zero=3, offload=offload)
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    m = plan.num_microbatches
    copies = Counter(
        span.stream for span in timeline.spans if "of layers" in span.operators and span.kind is TaskKind.HOST_COPY
    )
    assert copies[StreamKind.FROM_HOST] == 3 * m
    assert copies[StreamKind.TO_HOST] == 2 * m
    unit = FP32 * StageCosts(small).plan_costs(plan).stages[0].blocks[0].parameters
    assert max(used(timeline, Category.PARAMETERS)) == 2 * unit
    assert timeline.peak_memory == SimulatedCost(small).peak_memory(plan)


def test_a_pass_is_slowed_by_what_the_other_in_turns_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    # a chain of operators that are slowed for a while is no one task: forwards are cut too, for they meet reductions
    monkeypatch.setattr("meshwise.strategies.lowering.tasks.data_parallel.BUCKET_BYTES", 0)
    small = with_cluster(problem(devices=8, batch=16), overlap_slowdown=1.5)
    layout = Layout(
        data=2, pipeline=2, context=2, attention=Attention.ALL_GATHER, schedule="dualpipev", chunks=2, zero=2
    )
    plan = complete(small, layout)
    assert len({simulate(lower(small, plan, granularity)).step_time for granularity in Granularity}) == 1


# orders that are written out


@given(any_orders(), st.sampled_from([{"zero": 2}, {"zero": 3}, {"zero": 3, "reshard_after_forward": False}]))
@settings(max_examples=25, deadline=None)
def test_every_way_to_the_step_time_and_memory_of_any_order_agrees(text: str, sharing: dict[str, Any]) -> None:
    rule = find_rule(text)
    assert isinstance(rule, WrittenRule)
    small = problem(devices=2 * rule.num_ranks, nics=2 * rule.num_ranks, layers=8, batch=2 * rule.num_microbatches)
    costs, plan = (
        SimulatedCost(small),
        complete(small, Layout(data=2, pipeline=rule.num_ranks, schedule=text, **sharing)),
    )
    programs = [lower(small, plan, granularity) for granularity in Granularity]
    timelines = [simulate(program) for program in programs]
    assert costs.plan_bound(plan) <= min(ticks(program) for program in programs) / 1e12
    assert len({ticks(program) for program in programs}) == len({each.step_time for each in timelines}) == 1
    assert {each.peak_memory for each in timelines} == {costs.peak_memory(plan)}


def test_a_pair_of_one_stage_gathers_for_each_of_its_passes() -> None:
    # F0, F1 and B0 in turns, F2 and B1 in turns, B2: no forward has ended when the backward beside it begins
    text = "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"
    small = problem(devices=4, layers=3, batch=6)
    plan = complete(small, Layout(data=2, tensor=2, zero=3, schedule=text))
    timeline = simulate(lower(small, plan, Granularity.OPERATOR))
    units = [span.operators for span in timeline.spans if span.stream is StreamKind.GATHER]
    assert set(Counter(units).values()) == {2 * 3}
    assert timeline.peak_memory == SimulatedCost(small).peak_memory(plan)
