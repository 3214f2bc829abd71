"""Tensors on the ranks of a mesh as NumPy arrays, and what collectives do to them: an oracle for layouts."""

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.collective import Collective
from meshwise.strategies.plan.sharding import Redistribution, ShardingSpec

Array = NDArray[np.int64]
Rank = tuple[int, ...]


class Ranks:
    """A tensor with named ``dims`` on every rank of a mesh whose ``axes`` have sizes."""

    def __init__(self, axes: Mapping[str, int], dims: tuple[str, ...], whole: Array, spec: ShardingSpec) -> None:
        self.axes, self.dims = axes, dims
        self.names = list(axes)
        self.local = {rank: self._share(whole, spec, rank) for rank in product(*(range(n) for n in axes.values()))}
        for axis in spec.partial:  # parts that sum to the whole: 1, 2, ... times it, and the first what is left
            index, size = self.names.index(axis), axes[axis]
            factors = [1 - (size - 1) * size // 2, *range(1, size)]
            self.local = {rank: part * factors[rank[index]] for rank, part in self.local.items()}

    def _share(self, whole: Array, spec: ShardingSpec, rank: Rank) -> Array:
        for dim, axes in spec.cuts:
            for axis in axes:
                whole = self._part(whole, dim, axis, rank)
        return whole

    def _part(self, array: Array, dim: str, axis: str, rank: Rank) -> Array:
        return np.split(array, self.axes[axis], self.dims.index(dim))[rank[self.names.index(axis)]]

    def holds(self, whole: Array, spec: ShardingSpec) -> bool:
        """Return whether every rank has what ``spec`` says of ``whole``."""
        return all(np.array_equal(part, self._share(whole, spec, rank)) for rank, part in self.local.items())

    def slice(self, dim: str, axis: str) -> None:
        """Every rank keeps its part."""
        self.local = {rank: self._part(part, dim, axis, rank) for rank, part in self.local.items()}

    def run(self, move: Redistribution, before: ShardingSpec) -> None:
        """Run a collective."""
        for dim, axis in move.free_cuts:
            self.slice(dim, axis)
        found = next((dim for dim, axes in before.cuts if move.axis in axes), "")
        of_group: Callable[[list[Array], Rank], Array] = {
            Collective.ALL_REDUCE: lambda parts, rank: np.sum(parts, axis=0),
            Collective.REDUCE_SCATTER: lambda parts, rank: self._part(np.sum(parts, axis=0), move.dim, move.axis, rank),
            Collective.ALL_GATHER: lambda parts, rank: np.concatenate(parts, self.dims.index(found)),
            Collective.ALL_TO_ALL: lambda parts, rank: np.concatenate(
                [self._part(part, move.dim, move.axis, rank) for part in parts], self.dims.index(found)
            ),
        }[move.collective]
        index = self.names.index(move.axis)
        group = range(self.axes[move.axis])
        self.local = {
            rank: of_group([self.local[(*rank[:index], other, *rank[index + 1 :])] for other in group], rank)
            for rank in self.local
        }
