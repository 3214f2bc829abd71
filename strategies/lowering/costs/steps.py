"""Segments: the pieces of work that make up one pass of a block on one rank.

In ring attention keys and values go round a context group while each rank attends to them part by part [1]_.

References
----------
.. [1] Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
"""

from collections.abc import Iterable
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.rank_classes.machine import Communicator
from meshwise.strategies.plan.mesh import CONTEXT, PASS_AXES, TENSOR


class Segment(NamedTuple):
    """A piece of work of one rank inside a pass: an operator, or a collective over its group along ``axis``.

    Parameters
    ----------
    ticks
        Ticks where nothing contends.
    num_launches
        How often the host starts kernels for it: once for an operator, whose backward is one node of autograd.
    size
        Bytes of a collective.
    overlaps_next
        Whether the next segment starts with this one; what follows waits for both.
    tensor
        The tensor that a redistribution moves.
    deferred
        Whether it goes with the gradients of weights where a backward is split.
    """

    kind: TaskKind
    ticks: int
    label: str
    num_launches: int = 1
    collective: Collective | None = None
    size: float = 0.0
    axis: str = TENSOR
    overlaps_next: bool = False
    tensor: str = ""
    deferred: bool = False


def build_communication(
    group: Communicator, axis: str, collective: Collective, size: float, label: str, *, overlaps_next: bool = False
) -> Segment:
    """Return the segment of a collective of ``size`` bytes along an axis."""
    ticks = group.ticks(collective, size)
    return Segment(PASS_AXES[axis].task, ticks, f"{collective} {label}", 1, collective, size, axis, overlaps_next)


def chain_ticks(segments: Iterable[Segment]) -> int:
    """Return the idle ticks of segments in order, where some overlap the next one.

    >>> keys = Segment(TaskKind.CONTEXT_COMMUNICATION, 5, "keys", overlaps_next=True)
    >>> chain_ticks([Segment(TaskKind.FORWARD, 2, "up"), keys, Segment(TaskKind.FORWARD, 3, "attention")])
    7
    """
    total = overlapped_ticks = 0
    for segment in segments:
        if segment.overlaps_next:
            overlapped_ticks = max(overlapped_ticks, segment.ticks)
        else:
            total += max(segment.ticks, overlapped_ticks)
            overlapped_ticks = 0
    return total


def build_ring_forward(attention: Segment, num_turns: int, size: float, group: Communicator) -> list[Segment]:
    """Return the forward of ring attention: it runs on one part while the next part of ``size`` bytes arrives."""
    shift = build_communication(group, CONTEXT, Collective.SHIFT, size, "keys and values", overlaps_next=True)
    return [*(segment for _ in range(num_turns - 1) for segment in (shift, attention)), attention]


def build_ring_backward(attention: Segment, num_turns: int, size: float, group: Communicator) -> list[Segment]:
    """Return the backward of ring attention: keys and values go round again, and one turn later their gradients.

    Gradients leave after the first part and are back home after ``num_turns`` shifts, the last of which nothing hides.
    """

    def build_shift(factor: float, label: str, *, overlaps_next: bool = True) -> Segment:
        """Return a shift of ``factor`` times the bytes of keys and values."""
        return build_communication(group, CONTEXT, Collective.SHIFT, factor * size, label, overlaps_next=overlaps_next)

    middle_shift = build_shift(2.0, "keys, values and their gradients")
    middle_segments = [segment for _ in range(num_turns - 2) for segment in (middle_shift, attention)]
    first_shift, last_shift = build_shift(1.0, "keys and values"), build_shift(1.0, "gradients of keys and values")
    return [first_shift, attention, *middle_segments, last_shift, attention, last_shift._replace(overlaps_next=False)]
