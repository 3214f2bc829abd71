"""Layouts and the collectives between them: Megatron's are found, not written down, and move the data that they say."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS
from meshwise.strategies.plan.sharding import REPLICATED, Redistribution, ShardingSpec, apply_move, redistribute

from ..problems import find_block_cost, problem
from .redistributed import Ranks

CUT_HIDDEN, CUT_SEQUENCE = ShardingSpec((("hidden", (TENSOR,)),)), ShardingSpec((("sequence", (TENSOR,)),))
PARTIAL = ShardingSpec(partial=(TENSOR,))


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        (REPLICATED, REPLICATED, []),
        (REPLICATED, CUT_HIDDEN, []),
        (PARTIAL, REPLICATED, [Collective.ALL_REDUCE]),
        (PARTIAL, CUT_SEQUENCE, [Collective.REDUCE_SCATTER]),
        (CUT_SEQUENCE, REPLICATED, [Collective.ALL_GATHER]),
        (CUT_SEQUENCE, CUT_HIDDEN, [Collective.ALL_TO_ALL]),
    ],
)
def test_redistribution(source: ShardingSpec, target: ShardingSpec, collectives: list[Collective]) -> None:
    assert [move.collective for move in redistribute(source, target)] == collectives


def test_nothing_is_made_partial() -> None:
    with pytest.raises(ValueError, match="not made partial"):
        redistribute(REPLICATED, PARTIAL)


AXES = {"depth": 2, "rows": 3, "columns": 2}
DIMS = ("sequence", "hidden")


@st.composite
def layouts(draw: st.DrawFn, *, partial: bool) -> ShardingSpec:
    """Return any layout of a tensor of two dims over three axes, each axis at one place, in any order."""
    places = ("whole", *DIMS, "partial") if partial else ("whole", *DIMS)
    spec = ShardingSpec()
    for axis in draw(st.permutations(list(AXES))):
        place = draw(st.sampled_from(places))
        if place in DIMS:
            spec = spec.with_cut(place, axis)
        elif place == "partial":
            spec = ShardingSpec(spec.cuts, (*spec.partial, axis))
    return spec


@given(layouts(partial=True), layouts(partial=False))
@settings(max_examples=400, deadline=None)
def test_every_rank_has_what_the_target_says(source: ShardingSpec, target: ShardingSpec) -> None:
    whole = np.arange(144).reshape(12, 12)
    ranks, layout = Ranks(AXES, DIMS, whole, source), source
    for move in redistribute(source, target):
        ranks.run(move, move.apply_free_cuts(layout))
        layout = apply_move(layout, move)
    assert not layout.partial
    for dim in DIMS:  # what is left is free
        assert target.axes(dim)[: len(layout.axes(dim))] == layout.axes(dim)
        for axis in target.axes(dim)[len(layout.axes(dim)) :]:
            ranks.slice(dim, axis)
    assert ranks.holds(whole, target)


def test_an_outer_axis_leaves_after_the_inner_one() -> None:
    # with the outer axis gathered alone a rank would have strips from all over the dim, no part of it
    both, inner = ShardingSpec((("hidden", ("depth", "rows")),)), ShardingSpec((("hidden", ("rows",)),))
    assert [(move.collective, move.axis) for move in redistribute(both, inner)] == [
        (Collective.ALL_GATHER, "rows"),
        (Collective.ALL_GATHER, "depth"),
    ]


def collectives(sequence_parallel: bool, block: int, direction: str) -> list[str]:
    small = problem()
    plan = complete(small, Layout(tensor=8, sequence_parallel=sequence_parallel))
    costs = StageCosts(small)
    steps = getattr(find_block_cost(costs, plan, small.graph.blocks[block].name).work.segments, direction)
    return [step.label for step in steps if step.kind is TaskKind.TENSOR_COMMUNICATION]


def test_a_layer_has_two_all_reduces_each_way() -> None:
    # Shoeybi et al. 2019, figure 4: g after each row-parallel matmul, f before each column-parallel one
    assert collectives(False, 1, "forward") == ["all_reduce projected", "all_reduce narrow"]
    assert collectives(False, 1, "backward") == [
        "all_reduce gradient of feed_forward_norm_out",
        "all_reduce gradient of input_norm_out",
    ]


def test_sequence_parallel_turns_each_into_gather_and_scatter() -> None:
    # Korthikanti et al. 2022, figure 5; section 4.2.2: of what was gathered forward only the shard is kept, and
    # gathered again for the gradient of the weight
    assert collectives(True, 1, "forward") == [
        "all_gather input_norm_out",
        "reduce_scatter projected",
        "all_gather feed_forward_norm_out",
        "reduce_scatter narrow",
    ]
    assert collectives(True, 1, "backward") == [
        "all_gather gradient of narrow",
        "all_gather feed_forward_norm_out",
        "reduce_scatter gradient of feed_forward_norm_out",
        "all_gather gradient of projected",
        "all_gather input_norm_out",
        "reduce_scatter gradient of input_norm_out",
    ]


def test_embedding_and_loss_are_vocabulary_parallel() -> None:
    assert collectives(False, 0, "forward") == ["all_reduce embedded"]
    # the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3)
    parts = ["largest_logit", "sum_of_exponentials", "target_logit"]
    assert collectives(False, 2, "forward") == [f"all_reduce {part}" for part in parts]
    assert collectives(False, 2, "backward") == ["all_reduce gradient of final_norm_out"]


def test_a_microbatch_has_four_all_reduces_a_layer_and_five() -> None:
    # the executor counts the same on torch (tests/executor/launch/test_run.py): 4 * layers, the embedding, the
    # three parts of the loss, and the gradient that leaves the output layer
    small = problem()
    layers = small.graph.blocks[1].repeat
    each = [len(collectives(False, block, way)) for block in range(3) for way in ("forward", "backward")]
    assert sum(each[:2]) + layers * sum(each[2:4]) + sum(each[4:]) == 4 * layers + 5


SIZES = {TENSOR_DEPTH: 2, TENSOR_ROWS: 3, TENSOR: 2}
SHAPE = {"rows": 12, "columns": 12}
Rank = dict[str, int]
Cells = NDArray[np.bool_]
"""Which cells of a matrix a rank has."""


def spec(random: Random) -> ShardingSpec:
    """Return a layout of a matrix: each axis cuts one dim, or none; the outer axis outside."""
    chosen = {axis: random.choice(("rows", "columns", None)) for axis in SIZES}
    cuts = ((dim, tuple(axis for axis in SIZES if chosen[axis] == dim)) for dim in SHAPE)
    return ShardingSpec(tuple((dim, axes) for dim, axes in cuts if axes))


def part(rank: Rank, layout: ShardingSpec) -> Cells:
    """Return the cells of a rank: of each dim its part of its part, the outer axis first."""
    held = np.ones(tuple(SHAPE.values()), dtype=bool)
    for index, dim in enumerate(SHAPE):
        numbers = np.arange(SHAPE[dim])
        for axis in layout.axes(dim):
            numbers = np.split(numbers, SIZES[axis])[rank[axis]]
        along = np.isin(np.arange(SHAPE[dim]), numbers)
        held &= along[:, None] if index == 0 else along[None, :]
    return held


def run(moves: tuple[Redistribution, ...], ranks: list[Rank], held: list[Cells], target: ShardingSpec) -> list[Cells]:
    """Return what ranks have when each collective has gathered what its group has, of which a scatter leaves a part."""
    for move in moves:
        result = []
        for rank in ranks:
            group = [n for n, other in enumerate(ranks) if all(other[a] == rank[a] for a in SIZES if a != move.axis)]
            if move.collective is Collective.ALL_TO_ALL:
                united = np.logical_or.reduce([held[n] for n in group])
                result.append(united & along(rank, target, move))
            elif move.collective is Collective.ALL_GATHER:
                result.append(np.logical_or.reduce([held[n] for n in group]))
            else:  # a sum of what all ranks of the group have of
                common = np.logical_and.reduce([held[n] for n in group])
                scattered = move.collective is Collective.REDUCE_SCATTER
                result.append(common & along(rank, target, move) if scattered else common)
        held = result
    return held


def along(rank: Rank, target: ShardingSpec, move: Redistribution) -> Cells:
    """Return the cells that are at a rank's place along the axis of a move, where the target's axes cut its dim.

    What is inside of axes that are still to come lies in strides; each rank keeps of every stride its part.
    """
    numbers = np.arange(SHAPE[move.dim])
    inside = SHAPE[move.dim]
    for axis in target.axes(move.dim):
        inside //= SIZES[axis]
        if axis == move.axis:
            break
    mine = numbers // inside % SIZES[move.axis] == rank[move.axis]
    rows = np.broadcast_to(mine[:, None] if move.dim == "rows" else mine[None, :], tuple(SHAPE.values()))
    return rows


@pytest.mark.parametrize("seed", range(300))
def test_every_rank_ends_with_its_part(seed: int) -> None:
    random = Random(seed)
    source, target = spec(random), spec(random)
    cutting = {axis for _, axes in source.cuts for axis in axes}
    source = ShardingSpec(source.cuts, tuple(a for a in SIZES if a not in cutting and random.random() < 0.7))
    ranks = [dict(zip(SIZES, place, strict=True)) for place in product(*map(range, SIZES.values()))]
    moves = redistribute(source, target)
    held = run(moves, ranks, [part(rank, source) for rank in ranks], target)
    for rank, cells in zip(ranks, held, strict=True):
        wanted = part(rank, target)
        assert not (wanted & ~cells).any(), f"{source} to {target} by {moves}"
    assert {move.axis for move in moves} >= set(source.partial)
