"""A stretch of work of one rank inside a pass.

Ring attention: keys and values go round a context group while each rank meets them part by part.

References
----------
Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
"""

from collections.abc import Iterable
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.rank_classes.machine import Communicator
from meshwise.strategies.plan.mesh import COMMUNICATION, CONTEXT, TENSOR


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


def ring_forward(attention: Step, turns: int, size: float, group: Communicator) -> list[Step]:
    """Return forward: ``attention`` on one part after another, beside it the next part of ``size`` bytes."""
    moved = communication(group, CONTEXT, Collective.SHIFT, size, "keys and values", beside=True)
    return [*(step for _ in range(turns - 1) for step in (moved, attention)), attention]


def ring_backward(attention: Step, turns: int, size: float, group: Communicator) -> list[Step]:
    """Return backward: keys and values go round once more, and one turn behind them go their gradients.

    The gradients begin their way after the first part and are at home after ``turns`` shifts, the
    last of which nothing hides.
    """

    def moved(times: float, what: str, *, beside: bool = True) -> Step:
        return communication(group, CONTEXT, Collective.SHIFT, times * size, what, beside=beside)

    both = moved(2.0, "keys, values and their gradients")
    middle = [step for _ in range(turns - 2) for step in (both, attention)]
    first, last = moved(1.0, "keys and values"), moved(1.0, "gradients of keys and values")
    return [first, attention, *middle, last, attention, last._replace(beside=False)]
