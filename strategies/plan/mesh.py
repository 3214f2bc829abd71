"""The mesh of ranks, the sequences of a microbatch on each, and the sizes that divide evenly.

The mesh: ranks arranged along named axes, the last axis varying fastest. Divisors of whole numbers are what a message
names as the nearest degree that would do.

Local batches: the sequences of a microbatch on every data rank, where they are not all equal.

Devices of several types finish together where each has work for its speed. All data ranks run as many
microbatches, and those of faster ranks have more sequences. The gradients of all sequences are summed and
divided by the global batch, so that what is reduced, and its bytes, are those of equal microbatches.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (intra-TaskGraph load
balance: the batch of a replica in proportion to the FLOP/s of its device, as long as the memory holds it).
Zhang et al. 2024, "Poplar: efficient scaling of distributed DNN training on heterogeneous GPU clusters" (the same
with every stage of ZeRO, by measured speeds).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray, TaskKind

PIPELINE, DATA, EXPERT, CONTEXT, TENSOR = "pipeline", "data", "expert", "context", "tensor"
TENSOR_ROWS = "tensor_rows"
"""The second axis of tensor parallelism: with `TENSOR`, along which lie the columns, it makes a grid."""

TENSOR_DEPTH = "tensor_depth"
"""The third axis of operator parallelism, outside the other two: no layout has it, whole plans may."""

OPERATOR_AXES = (TENSOR_DEPTH, TENSOR_ROWS, TENSOR)
"""The axes by which a plan may cut any dim of any operator, from the outermost to the innermost."""

REPLICA = "replica"
"""The outer of two data-parallel axes: ranks along `DATA` share states, those along this keep the same ones."""

AXES = (PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, TENSOR_ROWS, TENSOR)
"""The axes of a layout's mesh, in their usual order from the outermost."""

EXPERT_DATA = "expert data"
"""Kind of the groups of ranks that hold the same experts."""

GROUPS = {
    TENSOR: (TENSOR,),
    TENSOR_ROWS: (TENSOR_ROWS,),
    TENSOR_DEPTH: (TENSOR_DEPTH,),
    CONTEXT: (CONTEXT,),
    EXPERT: (EXPERT,),
    DATA: (DATA, EXPERT, CONTEXT),
    EXPERT_DATA: (DATA, CONTEXT),
    REPLICA: (REPLICA,),
}
"""Kinds of groups, by the axes that they span: along ``data`` lie all ranks of a replica that hold the same part of
what is no expert, for experts and context are further ways to divide a batch (Megatron-LM's data and expert data
groups)."""

COMMUNICATION = {
    TENSOR: TaskKind.TENSOR_COMMUNICATION,
    TENSOR_ROWS: TaskKind.TENSOR_COMMUNICATION,
    TENSOR_DEPTH: TaskKind.TENSOR_COMMUNICATION,
    EXPERT: TaskKind.EXPERT_COMMUNICATION,
    CONTEXT: TaskKind.CONTEXT_COMMUNICATION,
}
"""What collectives inside passes are, by the axis along which they run."""


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
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        return 1

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

    def group_size(self, kind: str) -> int:
        """Return the ranks of a group of a kind of `GROUPS`."""
        return prod(self.size(name) for name in GROUPS[kind])

    def rows(self, *names: str) -> NDArray[np.int64]:
        """Return every group along some axes as a row of ranks, by first rank; none where groups have one member.

        >>> mesh = Mesh((Axis("data", 2), Axis("context", 2), Axis("tensor", 2)))
        >>> mesh.rows("context").tolist()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> mesh.rows("data", "context").tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        """
        size = prod(self.size(name) for name in names)
        if size == 1:
            return np.empty((0, 1), dtype=np.int64)
        ranks = np.arange(self.num_ranks).reshape([axis.size for axis in self.axes])
        along = [index for index, axis in enumerate(self.axes) if axis.name in names]
        return np.ascontiguousarray(np.moveaxis(ranks, along, range(-len(along), 0)).reshape(-1, size))

    def coordinates(self, name: str) -> NDArray[np.int64]:
        """Return where every rank lies along an axis."""
        if self.size(name) == 1:
            return np.zeros(self.num_ranks, dtype=np.int64)
        return np.arange(self.num_ranks) // self.stride(name) % self.size(name)


Microbatch = int | tuple[int, ...]
"""Sequences of a microbatch: the same on all data ranks, or of each of them."""


def microbatch(sizes: int | Sequence[int]) -> Microbatch:
    """Return the sizes of all data ranks, as one number where they are equal.

    >>> microbatch([2, 2]), microbatch([3, 1])
    (2, (3, 1))
    """
    if isinstance(sizes, int):
        return sizes
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def data_ranks(mesh: Mesh) -> IntArray:
    """Return the data rank of every rank: those of a replica are neighbours, and so are those that share experts.

    >>> from meshwise.strategies.plan.mesh import Axis
    >>> data_ranks(Mesh((Axis("data", 2), Axis("expert", 2), Axis("tensor", 2)))).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    outer = mesh.coordinates(REPLICA) * mesh.size(DATA) + mesh.coordinates(DATA)
    return outer * mesh.size(EXPERT) + mesh.coordinates(EXPERT)


def nearest_divisor(whole: int, value: int) -> int:
    """Return the divisor of ``whole`` nearest to ``value``, the smaller of two.

    >>> nearest_divisor(12, 5), nearest_divisor(12, 8)
    (4, 6)
    """
    return min(divisors(whole), key=lambda d: (abs(d - value), d))


def divisors(whole: int) -> list[int]:
    """Return the divisors of ``whole``, rising.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})
