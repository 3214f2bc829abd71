"""Variants of a stage's passes: those of one variant do the same and hold the same memory."""

import numpy as np
from numpy.typing import NDArray

from simulator.program import IntArray
from strategies.orders import Orders
from strategies.schedule import Action, ActionKind

FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD, INPUTS, WEIGHTS, LAST_WEIGHTS = range(6)
"""What makes a stage's last gradients is apart from others of its kind."""

WHOLE = (FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD)
"""The variants of schedules that do not split backward."""

SPLIT = (INPUTS, WEIGHTS, LAST_WEIGHTS)
"""Those that others have besides."""

JOINED = len(WHOLE + SPLIT)
"""Added to the variant of a `joined` pass."""

_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT,
    ActionKind.WEIGHT,
    ActionKind.WEIGHT,
)


def kind_of(variant: int) -> ActionKind:
    """Return what the passes of a variant do."""
    return _KINDS[variant % JOINED]


def variant_of(action: Action, final: bool) -> int:
    """Return the variant of a pass that an action runs; ``final`` for that which makes a stage's last gradients."""
    match action.kind:
        case ActionKind.FORWARD:
            return FORWARD_PASS
        case ActionKind.BACKWARD:
            return LAST_BACKWARD if final else BACKWARD_PASS
        case ActionKind.INPUT:
            return INPUTS
        case _:
            return LAST_WEIGHTS if final else WEIGHTS


def variants(rows: Orders, joins: NDArray[np.bool_]) -> IntArray:
    """Return the variant of every action of all pipeline ranks, of a schedule that does not split backward.

    >>> from strategies.orders import orders
    >>> rows = orders("1f1b", 1, 2)
    >>> (variants(rows, joined(rows)) - JOINED).tolist() == [FORWARD_PASS, BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD]
    True
    """
    _, from_end = np.unique(rows.passes[::-1], return_index=True)
    last = np.zeros(len(rows.passes), np.bool_)
    last[len(last) - 1 - from_end] = True
    result: IntArray = np.array((FORWARD_PASS, BACKWARD_PASS))[rows.passes % 2]
    result[last & (rows.passes % 2 == 1)] = LAST_BACKWARD
    return result + JOINED * joins


def joined(rows: Orders) -> NDArray[np.bool_]:
    """Return for every action whether it is a forward that a backward of its stage follows at once, or that backward.

    >>> from strategies.orders import orders
    >>> joined(orders("gpipe", 1, 2)).tolist()
    [False, True, True, False]
    """
    follows = (rows.passes[:-1] % 2 == 0) & (rows.passes[1:] == rows.passes[:-1] + 1)
    follows[rows.start[1:-1] - 1] = False  # the next rank's first action
    result: NDArray[np.bool_] = np.append(follows, False) | np.append(False, follows)
    return result


def opening(rows: Orders) -> NDArray[np.bool_]:
    """Return for every action whether it is the first forward of its stage."""
    _, first = np.unique(rows.passes, return_index=True)
    result: NDArray[np.bool_] = np.zeros(len(rows.passes), np.bool_)
    result[first] = True
    result &= rows.passes % 2 == 0
    return result
