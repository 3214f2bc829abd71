"""Tensor-parallel communication beside products: hand-computed steps, and what it never changes.

The machine here computes 1e12 FLOP/s and reads memory in no time; a collective over 4 ranks takes as long as a
test says. Ticks are picoseconds, so a FLOP is a tick.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.operator import build_block_segments
from meshwise.strategies.lowering.costs.rewrites import with_overlap
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import TimedSegment, chain_ticks
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS, MEGATRON
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators

from ...problems import find_block_layout, problem

RANKS, LAYERS, TOKENS, HIDDEN, FFN = 4, 3, 32, 64, 256
ARITHMETIC = Accelerator("arithmetic", (("fp32", 1e12),), memory=1e12, memory_bandwidth=1e21)
FAST = Accelerator("fast", (("fp32", 1e12), ("bf16", 2e12), ("fp8", 4e12)), memory=1e12, memory_bandwidth=1e12)
LAYOUT = Layout(tensor=RANKS, sequence_parallel=True)

# ticks of the products of a layer on one of 4 ranks, forward; each of the two of backward takes as long
QKV = 2 * TOKENS * HIDDEN * 3 * HIDDEN // RANKS  # 196,608
PROJECTION = 2 * TOKENS * HIDDEN * HIDDEN // RANKS  # 65,536
UP = DOWN = 2 * TOKENS * HIDDEN * FFN // RANKS  # 262,144
LOGITS = 2 * TOKENS * HIDDEN * 128 // RANKS  # 131,072


def machine(collective: float, framework: str = "megatron", microbatches: int = 2) -> Problem:
    """Return a step of ``LAYERS`` layers on 4 ranks, whose collectives of a microbatch take so many ticks."""
    small = problem(devices=RANKS, layers=LAYERS, batch=microbatches, accelerator=ARITHMETIC)
    size = TOKENS * HIDDEN * 4.0
    kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    curves = tuple(CollectiveCurve(kind, RANKS, ((1.0, 1e-12), (size, collective * 1e-12))) for kind in kinds)
    training = replace(small.training, framework=framework)
    return replace(small, cluster=replace(small.cluster, collectives=curves), training=training)


def unasked(small: Problem, layout: Layout) -> int:
    """Return the ticks that a step is shorter with Megatron-LM than were it to wait for sums of gradients of inputs."""
    waits = replace(MEGATRON, name="waits", hides_input_gradients=False)
    times = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FRAMEWORKS, waits.name, waits)
        for framework in (waits, MEGATRON):
            each = replace(small, training=replace(small.training, framework=framework.name))
            times.append(to_ticks(step_time(lower(each, complete(each, layout)))))
    return times[0] - times[1]


def saved(small: Problem) -> int:
    """Return the ticks that a step is shorter with the overlap."""
    times = [step_time(lower(small, complete(small, replace(LAYOUT, overlap_tensor=on)))) for on in (False, True)]
    return to_ticks(times[0]) - to_ticks(times[1])


def hidden(collective: int, product: int) -> int:
    """Return what of a collective goes beside a product of which a quarter comes before or after all of it."""
    return collective + product - max(product, collective + product // RANKS)


COLUMNS, ROWS = (QKV, UP), (PROJECTION, DOWN)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        # all hidden: 4 of forward and 2 gathers of gradients; the scatters of backward and the gather of what qkv and
        # up read are beneath a product without the overlap too
        (10_000, 6 * 10_000),
        # 3/4 of every product of forward, 786,432 together, and of those of projection and down for backward, 327,680
        (1_000_000, 3 * 786_432 // 4 + 3 * 327_680 // 4),
        # the projection alone is too short: it hides 3/4 of 65,536 ticks, 49,152, in each direction
        (60_000, 4 * 60_000 + 2 * 49_152),
    ],
    ids=["compute-bound", "communication-bound", "between"],
)
def test_a_step_is_shorter_by_what_products_hide(collective: int, expected: int) -> None:
    assert sum(hidden(collective, product) for product in (*COLUMNS, *ROWS, *ROWS)) == expected
    assert saved(machine(collective)) == 2 * LAYERS * expected


@pytest.mark.parametrize("collective", [10_000, 200_000, 230_000, 1_000_000])
def test_megatron_hides_sums_of_gradients_of_inputs_without_chunks(collective: int) -> None:
    # products p for both gradients, the gather again and the scatter c: max(c, 2 p) + c ticks become 2 max(c, p);
    # of a c of 200,000 ticks qkv (196,608) hides 193,216, up (262,144) all, the output layer (131,072) 62,144
    each = [max(collective, 2 * p) + collective - 2 * max(collective, p) for p in (*COLUMNS, LOGITS)]
    assert collective != 200_000 or each == [193_216, 200_000, 62_144]
    assert unasked(machine(collective), LAYOUT) == 2 * (LAYERS * sum(each[:2]) + each[2])


@pytest.mark.parametrize("collective", [10_000, 230_000, 1_000_000])
def test_megatron_hides_all_reduces_of_gradients_of_inputs(collective: int) -> None:
    # no sequence parallelism: of an all-reduce of c ticks the product for the gradient of the weight hides min(c, p)
    small, size = machine(10_000), TOKENS * HIDDEN * 4.0
    curve = CollectiveCurve(Collective.ALL_REDUCE, RANKS, ((1.0, 1e-12), (size, collective * 1e-12)))
    small = replace(small, cluster=replace(small.cluster, collectives=(curve,)))
    layers, logits = sum(min(collective, p) for p in COLUMNS), min(collective, LOGITS)
    assert unasked(small, Layout(tensor=RANKS)) == 2 * (LAYERS * layers + logits)


@pytest.mark.parametrize("collective", [10_000, 230_000, 1_000_000])
def test_a_timeline_shows_what_products_hide_and_no_wait_on_one_stage(collective: int) -> None:
    # of what qkv, up and the output layer read one product of backward hides the gather again and the other the scatter
    # of its gradient: min(c, p) ticks each, all tensor communication less what is exposed
    small = machine(collective)
    timeline = simulate(lower(small, complete(small, LAYOUT)))
    moved = sum(s.duration for s in timeline.spans if s.kind is TaskKind.TENSOR_COMMUNICATION)
    exposed = timeline.exposed_communication()[TaskKind.TENSOR_COMMUNICATION]
    layers, logits = sum(min(collective, p) for p in COLUMNS), min(collective, LOGITS)
    assert to_ticks(moved - exposed) == pytest.approx(2 * 2 * (LAYERS * layers + logits), abs=1)
    # at the end of the step tensor ranks sum the gradients of what each has whole: nothing else is idle time
    at_the_end = timeline.exposed_communication()[TaskKind.DATA_COMMUNICATION]
    assert timeline.bubble * timeline.step_time == pytest.approx(at_the_end, rel=1e-9)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (10_000, 8 * 10_000),
        # now the product of the weight's gradient of qkv and up hides the scatter: 2 p + c ticks become p + c
        (1_000_000, 3 * 786_432 // 4 + 3 * 327_680 // 4 + QKV + UP),
    ],
)
def test_what_keeps_gathered_inputs_hides_the_scatter_alone(collective: int, expected: int) -> None:
    assert saved(machine(collective, "torch")) == 2 * LAYERS * expected


def test_recomputed_products_hide_what_they_gather_again() -> None:
    # full recompute: the 2 gathers and 2 scatters of forward come once more, and are hidden once more
    small = machine(10_000)
    layouts = [replace(LAYOUT, recompute=Recompute.FULL, overlap_tensor=on) for on in (False, True)]
    first, second = (step_time(lower(small, complete(small, layout))) for layout in layouts)
    assert to_ticks(first) - to_ticks(second) == 2 * LAYERS * (6 + 2 + 2) * 10_000


def test_half_of_a_product_that_runs_again_is_not_cut() -> None:
    # beside collectives of 10 ticks, in each of 2 microbatches half of up saves half of its time
    small = machine(10)
    layouts = [replace(LAYOUT, recompute=SomeOperators(names)) for names in (("up/2",), ("up",))]
    for overlaps in (False, True):
        half, whole = (
            to_ticks(step_time(lower(small, complete(small, replace(layout, overlap_tensor=overlaps)))))
            for layout in layouts
        )
        assert whole - half == pytest.approx(2 * LAYERS * UP // 2, abs=100)


def test_the_output_layer_and_the_embedding_overlap_nothing() -> None:
    small = machine(10_000)
    plain, beside = (complete(small, replace(LAYOUT, overlap_tensor=on)) for on in (False, True))
    costs = StageCosts(small)
    rank = costs.machine(plain).ranks[0][0]
    first, second = (costs.stage_cost(plan, 0, rank).blocks for plan in (plain, beside))
    for block in (0, -1):
        assert first[block].work.segments == second[block].work.segments
        assert first[block].passes.forward == second[block].passes.forward
        assert first[block].passes.backward == second[block].passes.backward
    assert first[1].work.segments != second[1].work.segments


RECOMPUTATIONS: tuple[Recomputation, ...] = (
    *Recompute,
    FirstLayers(Recompute.FULL, 1),
    SomeOperators(("qkv", "projection")),
    SomeOperators(("attention_residual", "input_norm")),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Draw a plan with the overlap, on a machine on which nothing shares a link."""
    kind = draw(st.sampled_from(["gpt", "llama", "experts", "unfused"]))
    changes: dict[str, object] = {"attention": "unfused"} if kind == "unfused" else {}
    changes |= {"ffn_kind": "swiglu", "positions": "rotary"} if kind == "llama" else {}
    changes |= {"experts": Experts(4, 2, 32)} if kind == "experts" else {}
    tensor, context = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    small = problem(
        layers=4,
        batch=4,
        bandwidth=10 ** draw(st.floats(8, 13)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp8"])),
        accelerator=FAST,
        launch=draw(st.sampled_from([0.0, 1e-6])),
        **changes,
    )
    small = replace(small, training=replace(small.training, framework=draw(st.sampled_from(["megatron", "torch"]))))
    layout = Layout(
        tensor=tensor,
        context=context,
        pipeline=8 // (tensor * context),
        attention=Attention.RING if kind != "unfused" else Attention.ALL_GATHER,
        sequence_parallel=True,
        recompute=draw(st.sampled_from(RECOMPUTATIONS)),
        overlap_tensor=True,
    )
    return small, complete(small, layout)


def issued(row: Iterable[Segment]) -> Counter[tuple[object, ...]]:
    """Return the collectives among steps."""
    return Counter((step.collective, step.size, step.axis, step.tensor) for step in row if step.collective is not None)


def computed(row: Iterable[TimedSegment]) -> Counter[tuple[object, ...]]:
    """Return the ticks and launches of every operator among steps."""
    counts: Counter[tuple[object, ...]] = Counter()
    for step, ticks in row:
        if step.collective is None:
            counts[step.label, step.kind, "ticks"] += ticks
            counts[step.label, step.kind, "launches"] += step.num_launches
    return counts


def sum_either(row: Iterable[TimedSegment]) -> tuple[int, int]:
    """Return the ticks of all collectives among steps, and those of all else."""
    rows = [(step.collective is None, ticks) for step, ticks in row]
    return sum(ticks for computes, ticks in rows if not computes), sum(ticks for computes, ticks in rows if computes)


@given(steps())
@settings(max_examples=100, deadline=None)
def test_blocks_do_and_hold_the_same_in_no_more_time_and_no_less_than_either_alone(drawn: tuple[Problem, Plan]) -> None:
    small, plan = drawn
    costs, plain = StageCosts(small), replace(plan, overlap_tensor=False)
    rank = costs.machine(plan).ranks[0][0]
    for stage in range(len(plan.stages)):
        pairs = zip(
            costs.stage_cost(plain, stage, rank).blocks, costs.stage_cost(plan, stage, rank).blocks, strict=True
        )
        for before, after in pairs:
            assert after.memory == before.memory
            for first, second in (
                (before.passes.forward, after.passes.forward),
                (before.passes.backward, after.passes.backward),
            ):
                assert issued(step for step, _ in second.segments) == issued(step for step, _ in first.segments)
                assert computed(second.segments) == computed(first.segments)
                assert max(sum_either(first.segments)) <= second.ticks <= first.ticks


@given(steps(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_sums_of_gradients_of_inputs_move_the_same_beside_products_and_take_no_longer(
    drawn: tuple[Problem, Plan], by_sequence: bool
) -> None:
    small, plan = drawn
    layout = Layout(tensor=plan.tensor, pipeline=8 // plan.tensor, sequence_parallel=by_sequence)
    plan, costs = complete(small, layout), StageCosts(small)
    clock = costs.clock(costs.machine(plan).ranks[0][0])
    for block in small.graph.blocks:
        local = find_block_layout(costs, plan, block.name)
        before = build_block_segments(local, keeps_gathered=False)
        after = with_overlap(local, before, in_chunks=False)
        assert (after.forward, after.num_loss_segments) == (before.forward, before.num_loss_segments)
        assert issued(after.backward) == issued(before.backward)
        first, second = (clock.time_segments(segments.backward) for segments in (before, after))
        assert computed(second) == computed(first)
        assert max(sum_either(first)) <= chain_ticks(second) <= chain_ticks(first)
        for index, step in enumerate(after.backward):  # what is beside has a product of the same block to run with
            assert not step.overlaps_next or after.backward[index + 1].collective is None


@given(steps())
@settings(max_examples=50, deadline=None)
def test_a_step_is_never_slower_where_nothing_is_shared(drawn: tuple[Problem, Plan]) -> None:
    small, plan = drawn
    cost = SimulatedCost(small)
    times = cost.longest_paths([plan, replace(plan, overlap_tensor=False), plan])
    assert times[0] == times[2]
    # what runs beside a collective starts with it: where the host takes longer to launch that than the product before
    # runs, it waits, and the step may be slower
    assert times[0] <= times[1] or cost.costs.machine(plan).rank(0).launch
    assert cost.peak_memory(plan) == cost.peak_memory(replace(plan, overlap_tensor=False))
