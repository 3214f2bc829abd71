"""Redistributions move the data that they say: every rank ends with its own part."""

from itertools import product
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwise.simulator.collective import Collective
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS
from meshwise.strategies.plan.sharding import Redistribution, ShardingSpec, redistribute

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
