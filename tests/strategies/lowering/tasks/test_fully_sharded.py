"""ZeRO 2 and 3 and hybrid sharding: the bytes of the papers, memory to the byte, and time by hand."""

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.simulator.program import Category, Program, StreamKind, TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import to_ticks
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.optimizer import Parameters
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.residents import count_residents
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, REPLICA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import CORE, Space, layouts

from ...plan.test_parallelism import mixture
from ...problems import problem

SHARDED = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def with_cluster(small: Problem, **changes: Any) -> Problem:
    return replace(small, cluster=replace(small.cluster, **changes))


def ringed(small: Problem) -> Problem:
    """Return the problem with all collectives as rings: each moves (n - 1) / n of its bytes from every rank."""
    return with_cluster(small, algorithms=tuple((collective, Algorithm.RING) for collective in SHARDED))


def curved(small: Problem, seconds: float, ranks: int) -> Problem:
    """Return the problem with collectives of ``seconds`` for the first byte and 1 ns more for each 1,000."""
    points = ((1.0, seconds), (1e12, seconds + 1.0))
    return with_cluster(
        small, collectives=tuple(CollectiveCurve(each, ranks, points) for each in (*SHARDED, Collective.SEND))
    )


def ticks(program: Program) -> int:
    return int(finish_times(program)[1].max())


def sent(timeline: Timeline, ranks: int) -> float:
    """Return the bytes that one rank sends in a step; every byte crosses one link out and one in."""
    return sum(link.bytes * link.count for link in timeline.links) / 2 / ranks


# what the framework takes


@pytest.mark.parametrize(
    ("zero", "times", "messages"), [(1, 0, 0), (2, 2 * 10 + 10, 2 * 9 + 9), (3, 2 * (10 + 9 + 10), 0)]
)
def test_every_gather_and_reduction_of_a_unit_takes_the_framework_time_where_nothing_is_hidden(
    zero: int, times: int, messages: int
) -> None:
    # 8 layers and two ends are 10 units, in 2 microbatches. ZeRO 2 reduces all in each and gathers all once; ZeRO 3
    # gathers them for forward, for backward all but the head, which is kept, and reduces them. Units that are reduced
    # or gathered together are a message each then: with ZeRO 2 ten in the place of one, of 5 ms for the first byte
    small = curved(problem(devices=2, batch=4), 5e-3, 2)
    ((node, _),) = small.cluster.nodes
    device = replace(node.accelerator, computes_collectives=True)
    took = []
    for launch in (0.0, 1e-3, 3e-3):
        there = replace(node, accelerator=replace(device, unit_launch=launch))
        machine = with_cluster(small, nodes=((there, 1),))
        plan = complete(machine, Layout(data=2, zero=zero, microbatch=1))
        took += [step_time(lower(machine, plan))]
    assert took[1] - took[0] == pytest.approx(times * 1e-3 + messages * 5e-3)
    assert took[2] - took[1] == pytest.approx(times * 2e-3)


# bytes


BYTES: dict[str, tuple[dict[str, Any], Any]] = {
    # Rajbhandari et al. 2020, section 7: a reduce-scatter or an all-gather of P bytes moves P, an all-reduce 2 P
    "0": ({}, lambda m, p, last: 2 * p),
    "1": ({"zero": 1}, lambda m, p, last: p + p),
    "2": ({"zero": 2}, lambda m, p, last: m * p + p),
    # 3 P a microbatch; the last unit of a forward, the head, is kept for the backward that follows at once
    "3": ({"zero": 3}, lambda m, p, last: m * (p + (p - last) + p)),
    "3 kept": ({"zero": 3, "reshard_after_forward": False}, lambda m, p, last: p + m * p),
}


@pytest.mark.parametrize("stage", list(BYTES))
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_moves_the_bytes_of_the_zero_paper(stage: str, overlap: bool, microbatches: int) -> None:
    choices, expected = BYTES[stage]
    small = ringed(problem(devices=4, batch=4 * microbatches, layers=3))
    plan = complete(small, Layout(data=4, overlap_gradients=overlap, **choices))
    cost = StageCosts(small).plan_costs(plan)
    whole, last = 4 * cost.parameters[0], 4 * cost.stages[0].blocks[-1].parameters  # fp32: 4 bytes an element
    assert 0 < last < whole
    moved = sent(simulate(lower(small, plan)), 4)
    assert moved == pytest.approx(expected(microbatches, whole, last) * 3 / 4, rel=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_gathers_inside_groups_and_sums_shards_over_replicas_once(zero: int) -> None:
    # 8 ranks in 4 groups of 2: collectives of a group move 1/2 of their bytes from a rank, the
    # sum over replicas 2 * 3/4 of the rank's shard, once a step (Zhang et al. 2022)
    m = 3
    small = ringed(problem(devices=8, batch=8 * m, layers=3))
    plan = complete(small, Layout(data=8, zero=zero, zero_shards=2))
    cost = StageCosts(small).plan_costs(plan)
    parameters = [block.parameters for block in cost.stages[0].blocks]
    whole, last = 4 * sum(parameters), 4 * parameters[-1]
    inside = {1: whole + whole, 2: m * whole + whole, 3: m * (3 * whole - last)}[zero]
    assert all(count % 2 == 0 for count in parameters)  # else shards are rounded up
    moved = sent(simulate(lower(small, plan)), 8)
    assert moved == pytest.approx(inside / 2 + 2 * 3 / 4 * whole / 2, rel=1e-12)


def experts_of(small: Problem, plan: Plan) -> tuple[int, int, int]:
    """Return the bytes of all parameters that are no experts, of those of the last unit, and of experts."""
    blocks = StageCosts(small).plan_costs(plan).stages[0].blocks
    dense = [4 * (block.parameters - block.expert_parameters) for block in blocks]
    assert blocks[-1].expert_parameters == 0
    return sum(dense), dense[-1], sum(4 * block.expert_parameters for block in blocks)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("zero", "dense", "experts"),
    [
        (1, lambda m, p, last: 2 * p, lambda m, e: 2 * e),
        (2, lambda m, p, last: m * p + p, lambda m, e: m * e + e),
        (3, lambda m, p, last: m * (3 * p - last), lambda m, e: 3 * m * e),
    ],
)
def test_experts_are_shared_by_those_that_hold_the_same_ones(
    zero: int, dense: Any, experts: Any, overlap: bool
) -> None:
    # collectives of a group of n move (n - 1) / n of their bytes from a rank: n = 8 for what all hold, 4 for experts
    # on 2 ranks each; an all-reduce twice that; the exchange of tokens is the same in both
    m = 3
    small = ringed(mixture(batch=8 * m))
    plans = [complete(small, Layout(data=8, expert=2, zero=z, overlap_gradients=overlap)) for z in (0, zero)]
    p, last, e = experts_of(small, plans[0])
    assert e > 0 and p % 8 == e % 4 == 0
    plain, moved = (sent(simulate(lower(small, plan)), 8) for plan in plans)
    assert plain > 2 * p * 7 / 8 + 2 * e * 3 / 4
    more = (dense(m, p, last) - 2 * p) * 7 / 8 + (experts(m, e) - 2 * e) * 3 / 4
    assert moved == pytest.approx(plain + more, rel=1e-9)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_experts_that_no_other_rank_of_a_group_holds_are_summed_over_replicas_alone(zero: int, overlap: bool) -> None:
    # 8 ranks in 4 groups of 2, each with all experts once: what is no expert moves 1/2 inside and 2 * 3/4 of the half
    # that is a rank's share over replicas, experts 2 * 3/4 of the whole; without ZeRO 2 * 7/8, experts 2 * 3/4
    m = 3
    small = ringed(mixture(batch=8 * m))
    plans = [
        complete(small, Layout(data=8, expert=2, zero=z, zero_shards=shards, overlap_gradients=overlap))
        for z, shards in ((0, 0), (zero, 2))
    ]
    assert (plans[1].replica, plans[1].shards, plans[1].expert_shards) == (4, 2, 1)
    p, last, e = experts_of(small, plans[1])
    plain, moved = (sent(simulate(lower(small, plan)), 8) for plan in plans)
    inside = {1: 2 * p, 2: m * p + p, 3: m * (3 * p - last)}[zero]
    more = inside / 2 + 2 * 3 / 4 * p / 2 - 2 * 7 / 8 * p
    assert moved == pytest.approx(plain + more, rel=1e-9)
    assert e > 0


def test_experts_lie_in_the_memory_of_those_that_hold_them() -> None:
    # 8 data ranks, experts on 4 of them each: parameters, gradients and states of fp32 Adam are 4, 4 and 8 bytes
    small = mixture(batch=8)
    plan = complete(small, Layout(data=8, expert=4, zero=3))
    costs = StageCosts(small).plan_costs(plan)
    parameters = costs.plan_parameters.positions[0]
    share = ceil((parameters.elements - parameters.expert_elements) / 8) + ceil(parameters.expert_elements / 2)
    held = count_residents(small.training, plan, parameters).device
    assert held[Category.PARAMETERS] == held[Category.GRADIENTS] == 4 * share
    assert held[Category.OPTIMIZER] == 8 * share


def test_context_ranks_share_states_too() -> None:
    small = problem(devices=8)
    plan = complete(small, Layout(data=4, context=2, zero=3, zero_shards=2))
    assert (plan.data, plan.context, plan.shards, plan.replica, plan.replicas) == (4, 2, 4, 2, 8)
    assert plan.mesh.rows(REPLICA).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_replicas_lie_where_the_order_says() -> None:
    small = problem(devices=8)
    inner = complete(
        small, Layout(data=4, pipeline=2, zero=3, zero_shards=2, order=("replica", "pipeline", "data", "tensor"))
    )
    assert inner.mesh.rows(REPLICA).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    left_out = complete(small, Layout(data=4, pipeline=2, zero=3, zero_shards=2, order=("data", "pipeline", "tensor")))
    assert [axis.name for axis in left_out.mesh.axes] == ["replica", "data", "pipeline", "tensor"]


def test_ranks_that_share_experts_share_states() -> None:
    layout = Layout(data=8, expert=4, zero=3, zero_shards=2)
    expected = "expert(4) divides zero_shards(2): ranks that share experts share states; nearest: 4"
    assert list(violations(mixture(), layout)) == [("zero_shards", expected)]
    assert not list(violations(mixture(), replace(layout, zero_shards=4)))


def test_groups_that_share_states_are_neighbours() -> None:
    small = problem(devices=8)
    plan = complete(small, Layout(data=4, pipeline=2, zero=3, zero_shards=2))
    assert (plan.data, plan.shards, plan.replica, plan.replicas) == (4, 2, 2, 4)
    assert plan.mesh.rows(DATA).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.mesh.rows(REPLICA).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert "ZeRO-3 over 2" in plan.describe()
    whole = complete(small, Layout(data=4, pipeline=2, zero=3))
    assert complete(small, Layout(data=4, pipeline=2, zero=3, zero_shards=4)) == whole


# memory


@given(st.integers(1, 1024), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_states_are_shared_as_the_zero_paper_says(ranks: int, zero: int) -> None:
    # section 5, table 1, with gradients accumulated in 4 bytes: 2 P + 4 P + 12 P, each shared from its stage on
    small = problem(devices=ranks, batch=ranks, precision="bf16")
    plan = complete(small, Layout(data=ranks, zero=zero))
    count = 123_457
    parameters = Parameters(elements=count, tensors=1)
    held = count_residents(small.training, plan, parameters).device
    share = ceil(count / ranks)
    assert held[Category.PARAMETERS] == 2 * (share if zero >= 3 else count)
    assert held[Category.GRADIENTS] == 4 * (share if zero >= 2 else count)
    assert held[Category.OPTIMIZER] == 12 * (share if zero >= 1 else count)


class Pair(NamedTuple):
    """Two units of one matrix product on two ranks, and what each costs."""

    small: Problem
    plan: Plan
    forward: tuple[int, int]
    backward: tuple[int, int]
    optimizer: int
    weights: tuple[int, int]

    @classmethod
    def of(cls, seconds: float, microbatches: int = 1, tokens: int = 32, **choices: Any) -> "Pair":
        """Return the pair where every collective takes about ``seconds``."""
        small = curved(problem(devices=2, batch=2 * microbatches), seconds, 2)
        blocks = []
        for index, size in enumerate((64, 32)):
            rows, dims = (("batch", 1), ("sequence", tokens)), (("wide", size), ("narrow", size // 2))
            wide = Tensor("in", ("batch", "sequence", "wide"), (1, tokens, size), "fp32")
            narrow = Tensor("out", ("batch", "sequence", "narrow"), (1, tokens, size // 2), "fp32")
            weight = Tensor("weight", ("wide", "narrow"), (size, size // 2), "fp32")
            what = ("matmul", OperatorKind.MATMUL, rows + dims, ("in",), ("out",), ("weight",), ("wide",))
            blocks.append(Block(f"block{index}", (Operator(*what),), (wide, narrow, weight), ("in",), ("out",)))
        small = replace(small, graph=OperatorGraph("pair", tuple(blocks), 32))
        plan = complete(small, Layout(data=2, zero=3, **choices))
        program = lower(small, plan)
        (optimizer,) = {work.duration for work in program.work if work.kind is TaskKind.OPTIMIZER}
        first, second = StageCosts(small).plan_costs(plan).stages[0].blocks
        return cls(
            small, plan, (first.forward_ticks, second.forward_ticks), (first.backward_ticks, second.backward_ticks),
            optimizer, (64 * 32, 32 * 16),
        )  # fmt: skip

    def collective(self, unit: int) -> int:
        """Return the ticks of a gather of a unit, and of its reduction: of as many bytes."""
        curve = self.small.cluster.collectives[0]
        return to_ticks(curve.time(4.0 * self.weights[unit]))


def test_the_fullest_moment_of_two_units_by_hand() -> None:
    pair = Pair.of(1e-9)
    costs = SimulatedCost(pair.small)
    (first, second), (w0, w1) = (
        StageCosts(pair.small).plan_costs(pair.plan).stages[0].blocks,
        (4 * n for n in pair.weights),
    )
    a, b = first.memory, second.memory
    assert a.recomputed_bytes == b.recomputed_bytes == 0
    moments = (
        a.kept_bytes + a.forward + w0 + w1,  # forward of the first unit, the second is gathered
        a.kept_bytes + b.kept_bytes + b.forward + w1,
        a.kept_bytes + b.kept_bytes + b.backward + w1 + w1 + w0,  # its own gradients, the first is gathered
        a.kept_bytes + a.backward + w0 + w0 + w1,  # its own gradients, and those of the second on their way
    )
    count = ceil(sum(pair.weights) / 2)
    (buffers,) = StageCosts(pair.small).buffers(pair.plan)
    assert costs.peak_memory(pair.plan) == max(moments) + count * (4 + 4 + 8) + buffers  # fp32 Adam: two moments
    timeline = simulate(lower(pair.small, pair.plan))
    assert timeline.peak_memory == costs.peak_memory(pair.plan)


# time


LAYOUTS = (
    {"data": 4, "pipeline": 2},
    {"data": 4, "tensor": 2},
    {"data": 4, "pipeline": 2, "schedule": "gpipe"},
    {"data": 4, "pipeline": 2, "schedule": "interleaved", "chunks": 2},
    {"data": 4, "pipeline": 2, "schedule": "zb2p"},
    {"data": 2, "tensor": 2, "pipeline": 2, "schedule": "dualpipev", "chunks": 2},
)
STAGES = (
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "reshard_after_forward": False},
    {"zero": 3, "overlap_gradients": False},
)


@pytest.mark.parametrize("degrees", LAYOUTS)
@pytest.mark.parametrize("sharing", STAGES)
def test_events_take_the_longest_path_where_nothing_is_shared(degrees: dict[str, Any], sharing: dict[str, Any]) -> None:
    small = problem(devices=8)
    for ranks in (2, 4):
        extra = curved(small, 1e-5, ranks).cluster.collectives
        small = with_cluster(small, collectives=(*small.cluster.collectives, *extra))
    plan = complete(small, Layout(**degrees, **sharing))
    programs = [lower(small, plan, granularity) for granularity in Granularity]
    longest = {ticks(program) for program in programs}
    assert len(longest) == 1
    assert {round(step_time(program) * 1e12) for program in programs} == longest


@pytest.mark.parametrize("microbatches", [1, 3])
def test_only_the_first_gather_and_the_last_reduction_show_where_they_are_short(microbatches: int) -> None:
    pair = Pair.of(1e-9, microbatches)
    (f0, f1), (b0, b1), g0, g1 = pair.forward, pair.backward, pair.collective(0), pair.collective(1)
    assert max(g0, g1) < min(f0, f1, b0, b1)
    # the next microbatch's first gather runs beside the last reduction: each of as many bytes
    expected = g0 + microbatches * (f0 + f1 + b1 + b0 + g0) + pair.optimizer
    assert ticks(lower(pair.small, pair.plan)) == expected


def test_gathers_longer_than_computing_show_one_after_another() -> None:
    pair = Pair.of(1e-3)
    (f0, f1), (b0, b1), g0, g1 = pair.forward, pair.backward, pair.collective(0), pair.collective(1)
    assert min(g0, g1) > max(f0, f1, b0, b1)
    # forward: both gathers, the second unit; backward: the first unit is gathered beneath the second's
    # backward, whose reduction ends last but one
    forward = g0 + g1 + f1
    backward = max(g0 + b0, b1 + g1) + g0
    assert ticks(lower(pair.small, pair.plan)) == forward + backward + pair.optimizer


def test_without_overlap_everything_comes_after_another() -> None:
    pair = Pair.of(1e-6, overlap_gradients=False)
    computing = sum(pair.forward) + sum(pair.backward) + pair.optimizer
    g0, g1 = pair.collective(0), pair.collective(1)
    # gathers of both, again of the first (the second is kept), reductions of both
    assert ticks(lower(pair.small, pair.plan)) == computing + (g0 + g1) + g0 + (g1 + g0)


def test_kept_parameters_are_gathered_once_and_held_to_the_last_backward() -> None:
    pair = Pair.of(1e-9, 3, reshard_after_forward=False)
    (f0, f1), (b0, b1), g0 = pair.forward, pair.backward, pair.collective(0)
    assert ticks(lower(pair.small, pair.plan)) == g0 + 3 * (f0 + f1 + b1 + b0 + g0) + pair.optimizer
    timeline = simulate(lower(pair.small, pair.plan))
    names = [span.operators for span in timeline.spans if span.stream is StreamKind.GATHER]
    assert sorted(names) == ["all_gather parameters of block0", "all_gather parameters of block1"]
    whole, first = 4 * sum(pair.weights), 4 * pair.weights[0]
    shard = whole // 2
    (profile,) = timeline.memory
    held = [usage[list(Category).index(Category.PARAMETERS)] for usage in profile.usage]
    changes = [size for before, size in pairwise([-1.0, *held]) if size != before]
    assert changes == [shard, shard + whole, shard + first, shard]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_holds_no_more_than_two_buckets_of_gradients(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # a bucket's backward begins when the reduction of the one before the last has ended, and a pass when all have
    monkeypatch.setattr("meshwise.strategies.lowering.tasks.data_parallel.BUCKET_BYTES", 0)
    small = curved(problem(devices=2, batch=4, layers=4), 1e-3, 2)
    layout = Layout(data=2, zero=zero, reshard_after_forward=zero < 3)  # kept: no gather holds backward up
    timeline = simulate(lower(small, complete(small, layout), Granularity.OPERATOR))
    began: dict[tuple[int, str], float] = {}
    ended: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        if span.kind is TaskKind.BACKWARD:
            began.setdefault((span.microbatch, span.operators.split(":")[0]), span.start)
        if span.stream is StreamKind.DATA and "gradients" in span.operators:
            ended[span.microbatch, span.operators.split()[-1]] = span.end
    for microbatch in (0, 1):
        order = [name for number, name in began if number == microbatch]
        assert len(order) == 6  # embedding, four layers and the head
        waits = [
            began[microbatch, third] - ended[microbatch, first]
            for first, third in zip(order[:-2], order[2:], strict=True)
        ]
        assert waits == pytest.approx([0.0] * 4, abs=1e-9)  # reductions are long: all that computing waits for
    forwards = [s.start for s in timeline.spans if s.kind is TaskKind.FORWARD and s.microbatch == 1]
    assert min(forwards) >= max(end for (number, _), end in ended.items() if number == 0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_backward_gathers_nothing_before_its_loss_has_ended(
    schedule: str, overlap: bool, granularity: Granularity
) -> None:
    small = curved(problem(devices=4, batch=8), 1e-6, 2)
    layout = Layout(data=2, pipeline=2, zero=3, schedule=schedule, overlap_gradients=overlap)
    timeline = simulate(lower(small, complete(small, layout), granularity))
    gathers: dict[int, list[float]] = {}
    ended: dict[int, float] = {}
    began: dict[int, float] = {}
    for span in timeline.spans:
        if span.stream is StreamKind.GATHER and span.stage == 1:
            gathers.setdefault(span.microbatch, []).append(span.start)
        if span.kind is TaskKind.BACKWARD and span.operators == "head: loss":
            began[span.microbatch] = span.start
        if span.kind is TaskKind.BACKWARD and span.operators == "head: cross_entropy":
            ended[span.microbatch] = span.end
    assert len(ended) == 4
    for microbatch, starts in gathers.items():
        later = [start for start in starts if start >= began[microbatch]]
        assert later and min(later) >= ended[microbatch]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [2, 3])
def test_torch_copies_a_bucket_when_the_reduction_before_it_has_ended(
    zero: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.strategies.lowering.tasks.data_parallel.BUCKET_BYTES", 0)
    small = curved(problem(devices=2, batch=4), 1e-3, 2)
    small = replace(small, training=replace(small.training, framework="torch"))
    plan = complete(small, Layout(data=2, zero=zero, overlap_gradients=overlap))
    timeline = simulate(lower(small, plan))
    copies = [span for span in timeline.spans if span.operators.endswith("copy of gradients")]
    sums = [span for span in timeline.spans if span.stream is StreamKind.DATA and span.microbatch >= 0]
    bandwidth = small.cluster.accelerator.bandwidth("elementwise")
    each = {
        block.name: 4 * block.num_parameters for block in small.graph.blocks
    }  # fp32 gradients: each is read and written
    assert len(copies) == len(sums) == 2 * len(plan.stages[0].blocks)
    for copy in copies:
        size = each[copy.operators.split(":")[0].split(".")[0]]
        assert copy.end - copy.start == pytest.approx(2 * size / bandwidth, abs=1e-12)
    for number, (copy, reduction) in enumerate(zip(copies, sums, strict=True)):
        assert copy.end <= reduction.start
        assert number == 0 or sums[number - 1].end <= copy.start
    plain = replace(small, training=replace(small.training, framework="megatron"))
    others = simulate(lower(plain, plan)).spans
    assert not [span for span in others if span.operators.endswith("copy of gradients")]


@pytest.mark.parametrize("framework", ["torch", "megatron"])
def test_the_copy_of_the_larger_of_two_buckets_is_the_fullest_moment_by_hand(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.strategies.lowering.tasks.data_parallel.BUCKET_BYTES", 0)
    pair = Pair.of(1e-9, tokens=1)
    small = replace(pair.small, training=replace(pair.small.training, framework=framework))
    plan = complete(small, Layout(data=2, zero=2))
    (first, second), (w0, w1) = StageCosts(small).plan_costs(plan).stages[0].blocks, (4 * n for n in pair.weights)
    a, b = first.memory, second.memory
    copies = framework == "torch"
    moments = (
        a.kept_bytes + b.kept_bytes + b.backward + w1,
        a.kept_bytes + w1 + w1 * copies,
        a.kept_bytes + a.backward + w0 + w1,  # the reduction of the second's runs
        w0 + w0 * copies + w1 // 2 * copies,  # and has ended: of one microbatch, a share of its gradients begins then
    )
    assert plan.num_microbatches == 1
    assert max(moments) == moments[3 if copies else 2]
    (buffers,) = StageCosts(small).buffers(plan)
    # whole parameters, and shards of two moments, and a third of gradients that have a buffer, or of torch's parameters
    resident_bytes = w0 + w1 + 3 * (w0 + w1) // 2 + buffers
    assert SimulatedCost(small).peak_memory(plan) == resident_bytes + max(moments)
    assert simulate(lower(small, plan)).peak_memory == resident_bytes + max(moments)


@pytest.mark.parametrize("degrees", [{"data": 8}, *LAYOUTS])
@pytest.mark.parametrize("sharing", STAGES)
def test_an_endless_network_takes_no_time(degrees: dict[str, Any], sharing: dict[str, Any]) -> None:
    small = problem(devices=8)
    ((node, count),) = small.cluster.nodes
    link = replace(node.network.link, latency=0.0, bandwidth=1e30)  # type: ignore[union-attr]
    fast = replace(node, network=replace(node.network, link=link), nic=replace(node.nic, latency=0.0, bandwidth=1e30))  # type: ignore[call-arg]
    small = with_cluster(small, nodes=((fast, count),))
    programs = [lower(small, complete(small, Layout(**degrees, **more))) for more in ({}, sharing)]
    found = [ticks(without_optimizer(program)) for program in programs]
    # a transfer of any bytes takes a tick at least, and a step has fewer of them than tasks
    assert found[0] <= found[1] + programs[0].num_tasks
    assert found[1] <= found[0] + programs[1].num_tasks


def without_optimizer(program: Program) -> Program:
    work = tuple(replace(w, duration=0) if w.kind is TaskKind.OPTIMIZER else w for w in program.work)
    return replace(program, work=work)


@pytest.mark.parametrize("zero", [2, 3])
def test_one_data_rank_shares_nothing(zero: int) -> None:
    small = problem(devices=4)
    plans = [complete(small, Layout(pipeline=4, zero=each)) for each in (0, zero)]
    costs = SimulatedCost(small)
    assert len({costs.evaluate(plan) for plan in plans}) == 1
    assert len({costs.plan_bound(plan) for plan in plans}) == 1


# the search


def test_a_search_has_zero_2_and_3_where_its_space_names_them() -> None:
    small = problem(devices=4, batch=8)
    assert {layout.zero for layout in layouts(small, CORE)} == {0, 1}
    found = list(layouts(small, Space(core=True, zero=(3, 2))))
    assert {layout.zero for layout in found if layout.data > 1} == {2, 3}
    costs = SimulatedCost(small)
    for layout in found[::5]:
        plan = complete(small, layout)
        assert costs.plan_bound(plan) <= costs.longest_paths([plan])[0] <= costs.evaluate(plan).step_time
