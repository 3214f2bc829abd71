"""Variants of a stage's passes: passes of one variant do the same work and hold the same memory."""

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray
from meshwise.strategies.schedules.orders import Actions
from meshwise.strategies.schedules.schedule import KINDS, Action, ActionKind

FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD, INPUTS, WEIGHTS, LAST_WEIGHTS = range(6)
"""The pass that makes a stage's last gradients is a variant of its own."""

WHOLE = (FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD)
"""Variants of schedules that do not split backward."""

SPLIT = (INPUTS, WEIGHTS, LAST_WEIGHTS)
"""Further variants of schedules that split backward."""

JOINED = len(WHOLE + SPLIT)
"""Added to the variant of a pass that `find_joined` marks."""

FIRST = 2 * JOINED
"""Added to the variant of a pass that `find_first_gradients` marks."""

_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT,
    ActionKind.WEIGHT,
    ActionKind.WEIGHT,
)


def kind_of(variant: int) -> ActionKind:
    """Return the kind of action of a variant's passes."""
    return _KINDS[variant % JOINED]


def joins(variant: int) -> bool:
    """Return whether passes of a variant are joined to their neighbour.

    >>> joins(FORWARD_PASS + JOINED), joins(LAST_BACKWARD + FIRST)
    (True, False)
    """
    return variant // JOINED % 2 > 0


def variant_of(action: Action, final: bool) -> int:
    """Return the variant of the pass of an action; ``final`` where it makes a stage's last gradients."""
    match action.kind:
        case ActionKind.FORWARD:
            return FORWARD_PASS
        case ActionKind.BACKWARD:
            return LAST_BACKWARD if final else BACKWARD_PASS
        case ActionKind.INPUT:
            return INPUTS
        case _:
            return LAST_WEIGHTS if final else WEIGHTS


def variants(rows: Actions, joins: NDArray[np.bool_]) -> IntArray:
    """Return the variant of every action of all pipeline ranks.

    >>> from meshwise.strategies.schedules.orders import actions
    >>> rows = actions("1f1b", 1, 2)
    >>> (variants(rows, joined(rows)) - JOINED).tolist() == [FORWARD_PASS, BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD]
    True
    """
    result: IntArray = np.array((FORWARD_PASS, BACKWARD_PASS, INPUTS, WEIGHTS))[rows.kind]
    return result + _last(rows, _makes(rows)) + JOINED * joins


def begin(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes the first gradients of its stage's weights.

    >>> from meshwise.strategies.schedules.orders import actions
    >>> begin(actions("zb1p", 1, 2)).tolist()  # F0 I0 W0 F1 I1 W1
    [False, False, True, False, False, False]
    """
    return _first(rows, _makes(rows))


def joined(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it is a forward directly followed by a backward of its stage, or that backward.

    Of a split backward it is the part for inputs, which alone reads parameters. Actions that overlap do not follow each
    other.

    >>> from meshwise.strategies.schedules.orders import actions
    >>> joined(actions("gpipe", 1, 2)).tolist()
    [False, True, True, False]
    """
    begins, reads = rows.kind[:-1] == _FORWARD, _goes_back(rows)[1:]
    follows = begins & reads & (rows.stage[1:] == rows.stage[:-1]) & ~rows.together[:-1]
    result: NDArray[np.bool_] = np.append(follows, False) | np.append(False, follows)
    return result


def first_and_last(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the first of its stage, or the last one, until which parameters may stay.

    >>> from meshwise.strategies.schedules.orders import actions
    >>> first_and_last(actions("zb1p", 1, 2)).tolist()  # F0 I0 W0 F1 I1 W1
    [True, False, False, False, False, True]
    """
    return _first(rows, rows.kind != _WEIGHT) | _last(rows, _makes(rows))


def _goes_back(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes gradients of inputs."""
    result: NDArray[np.bool_] = (rows.kind == _BACKWARD) | (rows.kind == _INPUT)
    return result


def _makes(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes gradients of weights."""
    result: NDArray[np.bool_] = (rows.kind == _BACKWARD) | (rows.kind == _WEIGHT)
    return result


def _first(rows: Actions, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the first one of its stage within ``mask``."""
    places = np.flatnonzero(among)
    result: NDArray[np.bool_] = np.zeros(len(among), np.bool_)
    result[places[np.unique(rows.stage[places], return_index=True)[1]]] = True
    return result


def _last(rows: Actions, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the last one of its stage within ``mask``."""
    places = np.flatnonzero(among)[::-1]
    _, found = np.unique(rows.stage[places], return_index=True)
    result = np.zeros(len(among), np.bool_)
    result[places[found]] = True
    return result


_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(len(KINDS))
