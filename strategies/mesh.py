"""The mesh: ranks arranged along named axes, the last axis varying fastest."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PIPELINE, DATA, TENSOR = "pipeline", "data", "tensor"


class Axis(NamedTuple):
    """One axis of a mesh: its name and how many ranks lie along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes from the outermost to the innermost; rank order is row-major over them."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or any(axis.size < 1 for axis in self.axes):
            raise ValueError(f"mesh axes have distinct names and sizes of at least 1, met {self.axes}")

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return prod(axis.size for axis in self.axes)

    def size(self, name: str) -> int:
        """Return the size of an axis; 1 where the mesh has none of that name."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    def stride(self, name: str) -> int:
        """Return the distance in ranks of two neighbours along an axis."""
        result = 1
        for axis in reversed(self.axes):
            if axis.name == name:
                return result
            result *= axis.size
        raise ValueError(f"mesh has the axes {', '.join(a.name for a in self.axes)}, met {name}")

    def coordinate(self, rank: int, name: str) -> int:
        """Return where ``rank`` lies along an axis.

        >>> Mesh((Axis("pipeline", 2), Axis("data", 3), Axis("tensor", 4))).coordinate(17, "data")
        1
        """
        return rank // self.stride(name) % self.size(name) if self.size(name) > 1 else 0

    def rows(self, name: str) -> NDArray[np.int64]:
        """Return every group along an axis as a row of ranks, by first rank; none where groups have one member.

        >>> Mesh((Axis("data", 2), Axis("tensor", 2))).rows("data").tolist()
        [[0, 2], [1, 3]]
        """
        size = self.size(name)
        if size == 1:
            return np.empty((0, 1), dtype=np.int64)
        stride = self.stride(name)
        ranks = np.arange(self.num_ranks).reshape(-1, size, stride)
        return np.ascontiguousarray(ranks.transpose(0, 2, 1).reshape(-1, size))

    def coordinates(self, name: str) -> NDArray[np.int64]:
        """Return where every rank lies along an axis."""
        if self.size(name) == 1:
            return np.zeros(self.num_ranks, dtype=np.int64)
        return np.arange(self.num_ranks) // self.stride(name) % self.size(name)
