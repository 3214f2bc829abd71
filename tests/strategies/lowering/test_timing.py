"""Ticks of segments by hand: portions of kernels, bytes that stream, and what runs beside something else."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import TICKS_PER_SECOND, to_ticks
from meshwise.strategies.lowering.costs.segments import (
    Checkpoints,
    Kernels,
    Portion,
    Segment,
    Share,
    Streaming,
    build_communication,
)
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.timing import RankClock, TimedSegment, chain_ticks, copy_ticks, time_kernels
from meshwise.strategies.plan.mesh import CONTEXT

SLOW = Accelerator("slow", (("fp32", 1024.0),), 1e9, 1e30, launch=0.0, sharded_launch=0.25)
"""A device that takes a second for 1024 FLOP, and reads memory in no time."""


def kernels(direction: Pass, *, is_frozen: bool = False, is_distributed: bool = False) -> Kernels:
    """Return the kernels of a product of 4 tokens with a weight of 8 x 16: 2 * 4 * 8 * 16 = 1024 FLOP."""
    builder = BlockBuilder("fp32", {"sequence": 4, "hidden": 8, "ffn": 16})
    x, wide = builder.add_tensor("x", "batch sequence hidden"), builder.add_tensor("wide", "batch sequence ffn")
    linear(builder, "up", x, (wide,), "ffn", bias=False)
    block = builder.build_block("block", (x,), (wide,), layer=True)
    operator = block.operators[0]
    return Kernels(block, operator, dict(operator.dims), direction, is_frozen=is_frozen, is_distributed=is_distributed)


def clock(device: Accelerator = SLOW) -> RankClock:
    return RankClock(RankProfile(device, 0.0, {}))


def test_a_chain_waits_for_what_runs_beside_it() -> None:
    # 2, then 3 beside 5, then 4 beside 1: 2 + 5 + 4 = 11
    def compute(ticks: int) -> TimedSegment:
        return TimedSegment(Segment(TaskKind.FORWARD, "compute"), ticks)

    def shift(ticks: int) -> TimedSegment:
        return TimedSegment(Segment(TaskKind.CONTEXT_COMMUNICATION, "shift", overlaps_next=True), ticks)

    assert chain_ticks([compute(2), shift(5), compute(3), shift(1), compute(4)]) == 11
    assert chain_ticks([]) == 0


def slowed_clock(slowdown: float) -> RankClock:
    return RankClock(RankProfile(SLOW, 0.0, {}, slowdown=slowdown))


@pytest.mark.parametrize(
    ("compute_ticks", "collective_ticks", "extra_ticks"),
    [
        (100, 50, 10),  # 50 ticks at 4 / 5 of the rate do 40, and 60 more follow: 110
        (100, 1000, 25),  # all at 4 / 5 of the rate: 125
        (100, 125, 25),  # both ends meet
        (100, 0, 0),
    ],
)
def test_computing_is_slowed_while_the_collective_beside_it_runs(
    compute_ticks: int, collective_ticks: int, extra_ticks: int
) -> None:
    assert slowed_clock(1.25).count_slowed_ticks(compute_ticks, collective_ticks) == extra_ticks
    assert slowed_clock(1.0).count_slowed_ticks(compute_ticks, collective_ticks) == 0


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(1, 2))
def test_overlap_that_costs_ends_between_overlap_that_does_not_and_no_overlap(
    compute_ticks: int, collective_ticks: int, slowdown: float
) -> None:
    extra_ticks = slowed_clock(slowdown).count_slowed_ticks(compute_ticks, collective_ticks)
    ideal_ticks = max(compute_ticks, collective_ticks)
    assert ideal_ticks <= max(compute_ticks + extra_ticks, collective_ticks) <= compute_ticks + collective_ticks


def test_only_what_computes_beside_a_collective_of_its_pass_is_slowed() -> None:
    # a product of one second, 2 of them beside collectives of 0.5 s: 1 + 2 * (0.25 / 1.25 * 0.5) + 2 = 3.2 s
    class Shifts:
        def ticks(self, collective: Collective, size: float) -> int:
            return to_ticks(size)

    rank = RankProfile(SLOW, 0.0, {CONTEXT: Shifts()}, slowdown=1.25)  # type: ignore[dict-item]
    product = Segment(TaskKind.FORWARD, "up", kernels(Pass.FORWARD))
    shift = build_communication(CONTEXT, Collective.SHIFT, 0.5, "keys", overlaps_next=True)
    timed_segments = RankClock(rank).time_segments([product, shift, product, shift, product])
    assert chain_ticks(timed_segments) == pytest.approx(to_ticks(3.2), abs=2)
    assert timed_segments[0].ticks == to_ticks(1.0)
    alone = build_communication(CONTEXT, Collective.SHIFT, 0.5, "keys")
    assert chain_ticks(RankClock(rank).time_segments([alone, product])) == to_ticks(1.5)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 64), st.sampled_from(Share))
def test_a_portion_and_its_rest_are_all_kernels(first: int, second: int, num_chunks: int, share: Share) -> None:
    ticks, weight_ticks = max(first, second), min(first, second)
    portion = Portion(share, num_chunks)
    if share is Share.WHOLE:
        assert portion.count_ticks(ticks, weight_ticks) == ticks
    else:
        parts = [each.count_ticks(ticks, weight_ticks) for each in (portion, portion.rest)]
        assert sum(parts) == ticks
        assert min(parts) >= 0
    assert portion.rest.rest == portion


def test_a_chunk_is_one_of_as_many_with_all_gradients_of_weights() -> None:
    assert Portion(Share.CHUNK, 4).count_ticks(103, 0) == 25
    assert Portion(Share.CHUNK, 4).count_ticks(103, 60) == 43 // 4 + 60
    assert Portion(Share.WEIGHTS).count_ticks(103, 60) == 60


def test_a_backward_is_two_products_of_which_one_is_for_the_weight() -> None:
    second = TICKS_PER_SECOND
    assert time_kernels(SLOW, kernels(Pass.FORWARD)) == (second, 0)
    assert time_kernels(SLOW, kernels(Pass.BACKWARD)) == (2 * second, second)
    assert time_kernels(SLOW, kernels(Pass.BACKWARD, is_frozen=True)) == (second, 0)
    # distributed tensors cost a dispatch for each of its kernels
    assert time_kernels(SLOW, kernels(Pass.FORWARD, is_distributed=True)).ticks == 1.25 * second
    assert time_kernels(SLOW, kernels(Pass.BACKWARD, is_distributed=True)) == (2.5 * second, second)


def test_a_segment_takes_its_portion() -> None:
    whole = Segment(TaskKind.BACKWARD, "up", kernels(Pass.BACKWARD))
    weights = whole._replace(portion=Portion(Share.WEIGHTS))
    chunk = whole._replace(portion=Portion(Share.CHUNK, 4).rest)
    rows = clock().time_segments([whole, weights, chunk])
    assert [ticks / TICKS_PER_SECOND for _, ticks in rows] == [2, 1, 0.75]
    assert [segment for segment, _ in rows] == [whole, weights, chunk]


def test_only_what_is_optional_and_takes_no_time_is_left_out() -> None:
    nothing = Segment(TaskKind.BACKWARD, "nothing")
    frozen = Segment(TaskKind.BACKWARD, "up", kernels(Pass.BACKWARD, is_frozen=True), portion=Portion(Share.WEIGHTS))
    rest = frozen._replace(portion=frozen.portion.rest)
    row = [each._replace(is_optional=optional) for each in (nothing, frozen, rest) for optional in (False, True)]
    assert [segment for segment, _ in clock().time_segments(row)] == [row[0], row[2], row[4], row[5]]
    assert clock().count_ticks(nothing) == 0


@pytest.mark.parametrize("num_kernels", [1, 3])
def test_bytes_stream_at_the_bandwidth_of_their_kind_after_a_launch_each(num_kernels: int) -> None:
    device = Accelerator("d", (("fp32", 1e12),), 1e9, 64.0, launch=0.5)
    work = Streaming(128.0, OperatorKind.ELEMENTWISE, num_kernels)
    ticks = clock(device).count_ticks(Segment(TaskKind.BACKWARD, "added", work))
    assert ticks / TICKS_PER_SECOND == 2 + 0.5 * num_kernels


def test_kept_inputs_take_time_only_where_a_framework_needs_some() -> None:
    device = Accelerator("d", (("fp32", 1e12),), 1e9, 64.0, launch=0.5)
    kept = Segment(TaskKind.RECOMPUTE, "kept inputs", Checkpoints(2, 3))
    assert clock(device).count_ticks(kept) == 0
    slow = Accelerator("d", (("fp32", 1e12),), 1e9, 64.0, launch=0.5, recompute_launch=4.0)
    assert clock(slow).count_ticks(kept) == to_ticks(2 * 4.0 + 3 * 2 * 0.5)


def test_gradients_are_copied_by_one_read_and_one_write() -> None:
    device = Accelerator("d", (("fp32", 1e12),), 1e9, 64.0, launch=0.5)
    assert copy_ticks(device, 32) == ceil((0.5 + 2 * 32 / 64) * TICKS_PER_SECOND)
    assert copy_ticks(device, 0) == 0
    assert copy_ticks(Accelerator("fast", (("fp32", 1e12),), 1e9, 1e30), 1) == 1
