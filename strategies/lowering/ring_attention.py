"""Ring attention: keys and values go round a context group while each rank meets them part by part.

References
----------
Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
"""

from simulator.collective_kinds import Collective
from strategies.lowering.communicator import Communicator
from strategies.lowering.step import Step, communication
from strategies.mesh import CONTEXT


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
