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
from meshwise.strategies.plan.mesh import COMMUNICATION, CONTEXT, TENSOR


class Step(NamedTuple):
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
    operators: str
    launches: int = 1
    collective: Collective | None = None
    size: float = 0.0
    axis: str = TENSOR
    beside: bool = False
    tensor: str = ""
    deferred: bool = False


def communication(
    group: Communicator, axis: str, collective: Collective, size: float, what: str, *, beside: bool = False
) -> Step:
    """Return the segment of a collective of ``size`` bytes along an axis."""
    ticks = group.ticks(collective, size)
    return Step(COMMUNICATION[axis], ticks, f"{collective} {what}", 1, collective, size, axis, beside)


def chain_ticks(steps: Iterable[Step]) -> int:
    """Return the idle ticks of segments in order, where some overlap the next one.

    >>> keys = Step(TaskKind.CONTEXT_COMMUNICATION, 5, "keys", beside=True)
    >>> chain_ticks([Step(TaskKind.FORWARD, 2, "up"), keys, Step(TaskKind.FORWARD, 3, "attention")])
    7
    """
    total = under_way = 0
    for step in steps:
        if step.beside:
            under_way = max(under_way, step.ticks)
        else:
            total += max(step.ticks, under_way)
            under_way = 0
    return total


def ring_forward(attention: Step, turns: int, size: float, group: Communicator) -> list[Step]:
    """Return the forward of ring attention: it runs on one part while the next part of ``size`` bytes arrives."""
    moved = communication(group, CONTEXT, Collective.SHIFT, size, "keys and values", beside=True)
    return [*(step for _ in range(turns - 1) for step in (moved, attention)), attention]


def ring_backward(attention: Step, turns: int, size: float, group: Communicator) -> list[Step]:
    """Return the backward of ring attention: keys and values go round again, and one turn later their gradients.

    Gradients leave after the first part and are back home after ``num_turns`` shifts, the last of which nothing hides.
    """

    def moved(times: float, what: str, *, beside: bool = True) -> Step:
        """Return a shift of ``factor`` times the bytes of keys and values."""
        return communication(group, CONTEXT, Collective.SHIFT, times * size, what, beside=beside)

    both = moved(2.0, "keys, values and their gradients")
    middle = [step for _ in range(turns - 2) for step in (both, attention)]
    first, last = moved(1.0, "keys and values"), moved(1.0, "gradients of keys and values")
    return [first, attention, *middle, last, attention, last._replace(beside=False)]
