"""How a step ends: what follows its passes, in order, for the tasks of a step and for all that foretells its time."""

from enum import StrEnum
from typing import NamedTuple


class Scope(StrEnum):
    """Which pipeline positions go on together after a phase: none, the two of a pair, or all."""

    POSITION = "position"
    PAIR = "pair"
    ALL = "all"


class EndingPhase(NamedTuple):
    """A phase of the end of a step, whose ticks are columns of `meshwise.strategies.bounds.durations.EndingTicks`.

    Every position begins it when it has ended the phase before; positions in its scope end it together.
    """

    scope: Scope
    columns: tuple[str, ...]


GRADIENT_SUMS = EndingPhase(Scope.POSITION, ("late_reductions", "replicated_sums"))
"""Sums of gradients that passes have not reduced, then those of parameters that ranks have whole."""

TIED_SUMS = EndingPhase(Scope.PAIR, ("tied_sums",))
"""Sums of the gradients of each parameter that two positions keep."""

SQUARES = EndingPhase(Scope.POSITION, ("squares",))
"""The read of the gradients for their norm."""

NORM = EndingPhase(Scope.ALL, ("norm",))
"""The sum of the norm over all positions."""

UPDATE = EndingPhase(Scope.POSITION, ("optimizer",))
"""The update of the parameters."""

GATHER = EndingPhase(Scope.POSITION, ("gather",))
"""The gather of parameters that were updated as shards."""

ENDING = (GRADIENT_SUMS, TIED_SUMS, SQUARES, NORM, UPDATE, GATHER)
"""The phases of the end of a step, in order."""
