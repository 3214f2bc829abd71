"""The mesh of ranks, the sizes of microbatches on data ranks, and divisors of whole numbers.

A mesh arranges ranks along named axes; the last axis varies fastest. Error messages name the nearest divisor as the
degree that would be legal.

Microbatches may differ in size between data ranks, so that devices of several types finish together. All data ranks
run the same number of microbatches, and faster ranks have more sequences in each. The gradients of all sequences are
summed and divided by the global batch, so that the reduced tensors and their bytes are those of equal microbatches.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (intra-TaskGraph load
balance: the batch of a replica in proportion to the FLOP/s of its device, as long as the memory holds it).
Zhang et al. 2024, "Poplar: efficient scaling of distributed DNN training on heterogeneous GPU clusters" (the same
with every stage of ZeRO, by measured speeds).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import IntArray, TaskKind

PIPELINE, DATA, EXPERT, CONTEXT, TENSOR = "pipeline", "data", "expert", "context", "tensor"
TENSOR_ROWS = "tensor_rows"
"""The second axis of tensor parallelism: the rows of a grid whose columns lie along `TENSOR`."""

TENSOR_DEPTH = "tensor_depth"
"""The third axis of operator parallelism, outside the other two: a plan may have it, a layout never has."""

OPERATOR_AXES = (TENSOR_DEPTH, TENSOR_ROWS, TENSOR)
"""The axes that may cut any dim of any operator of a plan, from the outermost to the innermost."""

REPLICA = "replica"
"""The outer of two data-parallel axes: ranks along `DATA` share states, ranks along `REPLICA` hold equal states."""

AXES = (PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, TENSOR_ROWS, TENSOR)
"""The axes of a layout's mesh, in their usual order from the outermost."""


class PassAxis(NamedTuple):
    """What runs along an axis whose ranks divide the operators of a pass.

    Parameters
    ----------
    task
        The kind of task of its collectives.
    collectives
        The collectives that its groups run inside passes, the most usual one first.
    """

    task: TaskKind
    collectives: tuple[Collective, ...]


PASS_AXES = {
    TENSOR: PassAxis(
        TaskKind.TENSOR_COMMUNICATION, (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ),
    TENSOR_ROWS: PassAxis(
        TaskKind.TENSOR_COMMUNICATION, (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
    ),
    TENSOR_DEPTH: PassAxis(
        TaskKind.TENSOR_COMMUNICATION, (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
    ),
    CONTEXT: PassAxis(
        TaskKind.CONTEXT_COMMUNICATION,
        (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.SHIFT),
    ),
    EXPERT: PassAxis(TaskKind.EXPERT_COMMUNICATION, (Collective.ALL_TO_ALL,)),
}
"""The axes whose ranks divide the operators of a pass between them."""

SEQUENCE_AXES = (CONTEXT,)
"""The axes that divide sequences: they cut no parameter, and their ranks share states with data ranks."""

EXPERT_DATA = "expert data"
"""The kind of group whose ranks hold the same experts."""

GROUPS = {
    **{name: (name,) for name in PASS_AXES},
    DATA: (DATA, EXPERT, *SEQUENCE_AXES),
    EXPERT_DATA: (DATA, *SEQUENCE_AXES),
    REPLICA: (REPLICA,),
}
"""The axes that each kind of group spans. A data group has all ranks of a replica that hold the same part of the
parameters outside experts, for expert and context ranks also divide the batch (Megatron-LM's data and expert data
groups)."""

FORWARD, BACKWARD = "forward", "backward"
"""Kinds of pairs of neighbouring pipeline ranks, sender first."""

TABLE_NODE = "node of tables"
"""Kind of the groups of ranks on one node that add up vectors of tables cut by rows there."""

NORM = "norm"
"""Kind of the groups that sum the norm of gradients."""


def tied_kind(first_position: int, second_position: int) -> str:
    """Return the kind of the pairs of ranks that keep one parameter at two pipeline positions."""
    return f"tied {first_position} {second_position}"


def hop_kind(sender: int, receiver: int) -> str:
    """Return the kind of the pairs of ranks at two pipeline positions that exchange boundaries but do not adjoin."""
    return f"send {sender} {receiver}"


class Axis(NamedTuple):
    """One axis of a mesh: its name and its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes from the outermost to the innermost; ranks are numbered in row-major order."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or any(axis.size < 1 for axis in self.axes):
            raise ValueError(f"mesh axes have distinct names and sizes of at least 1, met {self.axes}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return prod(axis.size for axis in self.axes)

    def size(self, name: str) -> int:
        """Return the size of an axis; 1 where the mesh has no axis of that name."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        return 1

    def stride(self, name: str) -> int:
        """Return the distance between two neighbours along an axis, in ranks."""
        result = 1
        for axis in reversed(self.axes):
            if axis.name == name:
                return result
            result *= axis.size
        raise ValueError(f"mesh has the axes {', '.join(mesh_axis.name for mesh_axis in self.axes)}, met {name}")

    def coordinate(self, rank: int, name: str) -> int:
        """Return the coordinate of ``rank`` along an axis.

        >>> Mesh((Axis("pipeline", 2), Axis("data", 3), Axis("tensor", 4))).coordinate(17, "data")
        1
        """
        # an axis that the mesh does not have has one rank, and `stride` would raise
        return rank // self.stride(name) % self.size(name) if self.size(name) > 1 else 0

    def group_size(self, kind: str) -> int:
        """Return the number of ranks in a group of one kind of `GROUPS`."""
        return prod(map(self.size, GROUPS[kind]))

    def rows(self, *names: str) -> NDArray[np.int64]:
        """Return the groups along some axes, one row of ranks per group, by first rank; no rows for groups of one.

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
        # the axes of the group move to the end, so that each row of the flattened array is one group
        axis_indices = [index for index, axis in enumerate(self.axes) if axis.name in names]
        return np.ascontiguousarray(np.moveaxis(ranks, axis_indices, range(-len(axis_indices), 0)).reshape(-1, size))

    def coordinates(self, name: str) -> NDArray[np.int64]:
        """Return the coordinate of every rank along an axis."""
        if self.size(name) == 1:
            return np.zeros(self.num_ranks, dtype=np.int64)
        return np.arange(self.num_ranks) // self.stride(name) % self.size(name)


Microbatch = int | tuple[int, ...]
"""Sequences of a microbatch: one number for all data ranks, or one number per data rank."""


def normalise_microbatch(sizes: int | Sequence[int]) -> Microbatch:
    """Return microbatch sizes of data ranks as one number where they are equal.

    >>> normalise_microbatch([2, 2]), normalise_microbatch([3, 1])
    (2, (3, 1))
    """
    if isinstance(sizes, int):
        return sizes
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def list_state_ranks(mesh: Mesh) -> IntArray:
    """Return the rank of every rank among those of its replica that share states: data, expert and sequence ranks."""
    result = np.zeros(mesh.num_ranks, dtype=np.int64)
    for name in GROUPS[DATA]:
        result = result * mesh.size(name) + mesh.coordinates(name)
    return result


def list_data_ranks(mesh: Mesh) -> IntArray:
    """Return the data rank of every rank; ranks of a replica, and within it ranks that share experts, are neighbours.

    >>> from meshwise.strategies.plan.mesh import Axis
    >>> list_data_ranks(Mesh((Axis("data", 2), Axis("expert", 2), Axis("tensor", 2)))).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    outer_rank = mesh.coordinates(REPLICA) * mesh.size(DATA) + mesh.coordinates(DATA)
    return outer_rank * mesh.size(EXPERT) + mesh.coordinates(EXPERT)


def nearest_divisor(number: int, value: int) -> int:
    """Return the divisor of ``number`` nearest to ``value``; of two equally near ones the smaller.

    >>> nearest_divisor(12, 5), nearest_divisor(12, 8)
    (4, 6)
    """
    return min(divisors(number), key=lambda divisor: (abs(divisor - value), divisor))


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in rising order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small_divisors = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small_divisors, *(number // divisor for divisor in small_divisors)}))
