"""The mesh: ranks arranged along named axes, the last axis varying fastest."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

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
        return rank // self.stride(name) % self.size(name)

    def group(self, rank: int, name: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along one axis only, itself included."""
        stride = self.stride(name)
        base = rank - self.coordinate(rank, name) * stride
        return tuple(base + i * stride for i in range(self.size(name)))

    def groups(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield every group along an axis, by first rank."""
        for rank in range(self.num_ranks):
            if self.coordinate(rank, name) == 0:
                yield self.group(rank, name)
