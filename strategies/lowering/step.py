"""A stretch of work of one rank inside a pass."""

from collections.abc import Iterable
from typing import NamedTuple

from simulator.collective_kinds import Collective
from simulator.program import TaskKind
from strategies.lowering.communicator import Communicator
from strategies.mesh import COMMUNICATION, TENSOR


class Step(NamedTuple):
    """A stretch of work of one rank: compute, or a collective over its group along ``axis``.

    ``ticks`` are those where nothing contends; ``launches`` how often the host starts kernels for it: all of an
    operator at once, for autograd has one node for its backward.
    A step ``beside`` the next one starts with it, and what follows waits for both. ``tensor`` is what a
    redistribution moves. One that is ``deferred`` goes with the gradients of weights where they are apart.
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
    """Return the step of a collective of ``size`` bytes along an axis."""
    ticks = group.ticks(collective, size)
    return Step(COMMUNICATION[axis], ticks, f"{collective} {what}", 1, collective, size, axis, beside)


def chain_ticks(steps: Iterable[Step]) -> int:
    """Return the idle ticks of steps one after another, each with those beside it.

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
