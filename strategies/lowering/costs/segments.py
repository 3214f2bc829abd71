"""Segments: the pieces of work that make up one pass of a block on one rank, and what each of them is.

A segment says what a rank does, not how long that takes: the kernels of an operator, bytes that stream through memory,
or a collective with its bytes and its axis. `meshwise.strategies.lowering.timing` looks up its ticks on a rank.

In ring attention keys and values go round a context group while each rank attends to them part by part [1]_.

References
----------
.. [1] Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.casts import DELAYED_SCALING
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, PASS_AXES, TABLE_NODE, TENSOR
from meshwise.strategies.plan.offloading import FROM_HOST, TO_HOST
from meshwise.strategies.tables.loads import TableWork


@dataclass(frozen=True, eq=False, slots=True)
class Kernels:
    """The kernels of an operator in one direction, on one rank's share.

    Compared and hashed by identity: segments that are rewritten share the kernels that they run.

    Parameters
    ----------
    block, operator
        The operator, and the block that has its tensors.
    sizes
        The local size of every dim of its iteration space.
    is_quantised
        Whether a product casts to fp8 and multiplies in fp8.
    gradient_bytes
        Of an element of the sum to which a product adds the gradients of weights; 0 where it writes them apart.
    is_frozen
        Whether its weights have no gradients.
    is_distributed
        Whether it runs on distributed tensors, whose dispatch costs the host time.
    casts_weight
        Whether a product casts its weight to fp8, of which no copy is kept.
    is_composed
        Whether it runs the several kernels of `meshwise.simulator.machine.composition`.
    scaling
        How casts to fp8 find their scales, one of `meshwise.simulator.machine.casts.SCALINGS`.
    """

    block: Block
    operator: Operator
    sizes: Mapping[str, int]
    direction: Pass
    is_quantised: bool = False
    gradient_bytes: int = 0
    is_frozen: bool = False
    is_distributed: bool = False
    casts_weight: bool = False
    is_composed: bool = False
    scaling: str = DELAYED_SCALING


class Streaming(NamedTuple):
    """Bytes that kernels of a kind read and write, and the number of these kernels."""

    num_bytes: float
    kind: OperatorKind
    num_kernels: int = 1


class Checkpoints(NamedTuple):
    """Regions whose inputs a framework keeps to recompute them, and the kernels that its hooks launch."""

    num_regions: int
    num_hooks: int


class Share(StrEnum):
    """Which ticks of an operator's kernels a segment takes.

    With t ticks of the kernels, of which w make gradients of weights (none in forward), and n chunks: ``whole`` is t,
    ``chunk`` one chunk of the rest and all of the weights, (t - w) // n + w, and ``weights`` is w.
    """

    WHOLE = "whole"
    CHUNK = "chunk"
    WEIGHTS = "weights"


class Portion(NamedTuple):
    """A share of an operator's kernels, or what it leaves of them where ``is_rest``."""

    share: Share = Share.WHOLE
    num_chunks: int = 1
    is_rest: bool = False

    @property
    def rest(self) -> "Portion":
        """What this portion leaves, or the portion that leaves this rest."""
        return self._replace(is_rest=not self.is_rest)

    def count_ticks(self, ticks: int, weight_ticks: int) -> int:
        """Return the ticks of the portion, given those of all kernels and of the gradients of weights among them.

        >>> Portion(Share.CHUNK, 4).count_ticks(10, 2), Portion(Share.CHUNK, 4).rest.count_ticks(10, 2)
        (4, 6)
        """
        if self.share is Share.WHOLE:
            return ticks
        share_ticks = weight_ticks if self.share is Share.WEIGHTS else (ticks - weight_ticks) // self.num_chunks
        share_ticks += weight_ticks if self.share is Share.CHUNK else 0
        return ticks - share_ticks if self.is_rest else share_ticks


WHOLE = Portion()
"""All kernels of an operator."""


class Segment(NamedTuple):
    """A piece of work of one rank inside a pass: an operator, or a collective over its group along ``axis``.

    A copy between a rank and its host is a send along `FROM_HOST` or `TO_HOST`.

    Parameters
    ----------
    work
        What a segment computes or moves in memory; ``None`` for collectives, and for a pass with nothing to do.
    num_launches
        How often the host starts kernels for it: once for an operator, whose backward is one node of autograd.
    host_waits
        How often the host waits for the device before it starts them; the device then stands still for a launch.
    size
        Bytes of a collective.
    portion
        The part of the kernels that it runs.
    overlaps_next
        Whether the next segment starts with this one; what follows waits for both.
    tensor
        The tensor that a redistribution moves.
    deferred
        Whether it goes with the gradients of weights where a backward is split.
    is_optional
        Whether it is left out where it takes no time.
    """

    kind: TaskKind
    label: str
    work: Kernels | Streaming | Checkpoints | None = None
    num_launches: int = 1
    host_waits: int = 0
    collective: Collective | None = None
    size: float = 0.0
    axis: str = TENSOR
    portion: Portion = WHOLE
    overlaps_next: bool = False
    tensor: str = ""
    deferred: bool = False
    is_optional: bool = False


class BlockSegments(NamedTuple):
    """The segments of one block for one microbatch on one rank; a backward may begin with segments of a loss."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    num_loss_segments: int = 0


def build_communication(
    axis: str, collective: Collective, size: float, label: str, *, overlaps_next: bool = False
) -> Segment:
    """Return the segment of a collective of ``size`` bytes along an axis."""
    return Segment(
        PASS_AXES[axis].task,
        f"{collective} {label}",
        collective=collective,
        size=size,
        axis=axis,
        overlaps_next=overlaps_next,
    )


class Ring(NamedTuple):
    """What goes round in ring attention: bytes of keys and values, and of their gradients; and what follows each part.

    ``merge`` adds a part to the result of the parts before, ``sums`` the gradients of a part; None where the kernels of
    attention do that themselves.
    """

    size: float
    gradient_size: float
    merge: Segment | None = None
    sums: Segment | None = None


def build_ring_forward(attention: Segment, num_turns: int, ring: Ring) -> list[Segment]:
    """Return the forward of ring attention: it runs on one part while the next part arrives."""
    shift = build_communication(CONTEXT, Collective.SHIFT, ring.size, "keys and values", overlaps_next=True)
    merges = [ring.merge] if ring.merge else []
    later_turns = [segment for _ in range(num_turns - 2) for segment in (shift, attention, *merges)]
    return [shift, attention, *later_turns, attention, *merges]


def build_ring_backward(attention: Segment, num_turns: int, ring: Ring) -> list[Segment]:
    """Return the backward of ring attention: keys and values go round again, and one turn later their gradients.

    Gradients leave after the first part and are back home after ``num_turns`` shifts, the last of which nothing hides.
    """

    def build_shift(size: float, label: str) -> Segment:
        """Return a shift of so many bytes beside the attention that follows."""
        return build_communication(CONTEXT, Collective.SHIFT, size, label, overlaps_next=True)

    sums = [ring.sums] if ring.sums else []
    middle_shift = build_shift(ring.size + ring.gradient_size, "keys, values and their gradients")
    middle_segments = [segment for _ in range(num_turns - 2) for segment in (middle_shift, attention, *sums)]
    first_shift = build_shift(ring.size, "keys and values")
    last_shift = build_shift(ring.gradient_size, "gradients of keys and values")
    return [
        *(first_shift, attention, *sums, *middle_segments),
        *(last_shift, attention, *sums, last_shift._replace(overlaps_next=False)),
    ]


def build_table_forward(work: TableWork, *, pipelined: bool) -> list[Segment]:
    """Return the look-ups of a microbatch in tables that data ranks share, with what is exchanged before and after.

    Rows come from hosts beside the look-ups of others. Where it is ``pipelined`` they are there, as indices are.
    """
    lookups = _build_lookups(TaskKind.FORWARD, work.forward, "look-ups")
    indices, rows_from_host, _ = _list_moves(work)
    segments = [
        *(() if pipelined else (indices, rows_from_host._replace(overlaps_next=True))),
        lookups,
        _sum_in_nodes(Collective.REDUCE_SCATTER, work, "vectors of tables cut in a node"),
        build_communication(EXPERT, Collective.ALL_TO_ALL, work.vectors, "vectors of tables"),
        build_communication(EXPERT, Collective.REDUCE_SCATTER, work.partial_sums, "vectors of tables cut by rows"),
    ]
    return [segment for segment in segments if segment.size or segment.work]


def build_table_backward(work: TableWork, *, pipelined: bool) -> list[Segment]:
    """Return the gradients of tables that data ranks share, and their update, with what is exchanged before and after.

    Where it is ``pipelined`` updated rows go back to hosts beside the next microbatch.
    """
    *_, rows_to_host = _list_moves(work)
    segments = [
        build_communication(EXPERT, Collective.ALL_TO_ALL, work.vectors, "gradients of vectors of tables"),
        _sum_in_nodes(Collective.ALL_GATHER, work, "gradients of tables cut in a node"),
        build_communication(EXPERT, Collective.ALL_GATHER, work.partial_sums, "gradients of tables cut by rows"),
        build_communication(EXPERT, Collective.ALL_GATHER, work.gradients, "sparse gradients of tables"),
        _build_lookups(TaskKind.BACKWARD, work.backward, "gradients and update of tables"),
        *(() if pipelined else (rows_to_host,)),
    ]
    return [segment for segment in segments if segment.size or segment.work]


def _sum_in_nodes(collective: Collective, work: TableWork, label: str) -> Segment:
    """Return a collective of the ranks of a node, which have a table together."""
    return build_communication(EXPERT, collective, work.node_sums, label)._replace(axis=TABLE_NODE)


def list_table_moves(work: TableWork) -> tuple[Segment, ...]:
    """Return what moves beside a microbatch for its neighbours: indices and rows of the next, rows of the last."""
    return tuple(segment for segment in _list_moves(work) if segment.size)


def _list_moves(work: TableWork) -> tuple[Segment, Segment, Segment]:
    """Return the all-to-all of indices, and the copies of rows from hosts and to hosts."""
    indices = build_communication(EXPERT, Collective.ALL_TO_ALL, work.indices, "indices of tables")
    send, size = Collective.SEND, work.host_copies
    from_host, to_host = (
        Segment(TaskKind.HOST_COPY, label, collective=send, size=size, axis=axis)
        for axis, label in ((FROM_HOST, "rows from host"), (TO_HOST, "rows to host"))
    )
    return indices, from_host, to_host


def _build_lookups(kind: TaskKind, num_bytes: float, label: str) -> Segment:
    """Return one kernel over all tables of a rank, as FBGEMM's table-batched embeddings are."""
    return Segment(kind, label, Streaming(num_bytes, OperatorKind.EMBEDDING))
