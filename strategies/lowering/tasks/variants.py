"""Variants of a stage's passes: passes of one variant do the same work and hold the same memory."""

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray
from meshwise.strategies.schedules.orders import Actions
from meshwise.strategies.schedules.schedule import KINDS, Action, ActionKind

FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD, INPUTS, WEIGHTS, LAST_WEIGHTS = range(6)
"""The pass that makes a stage's last gradients is a variant of its own."""

WHOLE_VARIANTS = (FORWARD_PASS, BACKWARD_PASS, LAST_BACKWARD)
"""Variants of schedules that do not split backward."""

SPLIT_VARIANTS = (INPUTS, WEIGHTS, LAST_WEIGHTS)
"""Further variants of schedules that split backward."""

JOINED_OFFSET = len(WHOLE_VARIANTS + SPLIT_VARIANTS)
"""Added to the variant of a pass that `find_joined` marks."""

FIRST_OFFSET = 2 * JOINED_OFFSET
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
    return _KINDS[variant % JOINED_OFFSET]


def is_joined(variant: int) -> bool:
    """Return whether passes of a variant are joined to their neighbour.

    >>> is_joined(FORWARD_PASS + JOINED_OFFSET), is_joined(LAST_BACKWARD + FIRST_OFFSET)
    (True, False)
    """
    return variant // JOINED_OFFSET % 2 > 0


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


def list_variants(rows: Actions, joined_mask: NDArray[np.bool_]) -> IntArray:
    """Return the variant of every action of all pipeline ranks.

    >>> from meshwise.strategies.schedules.orders import list_actions
    >>> rows = list_actions("1f1b", 1, 2)
    >>> variants = list_variants(rows, find_joined(rows)) - JOINED_OFFSET
    >>> variants.tolist() == [FORWARD_PASS, BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD]
    True
    """
    result: IntArray = np.array((FORWARD_PASS, BACKWARD_PASS, INPUTS, WEIGHTS))[rows.kind]
    return result + _find_last(rows, _makes_weight_gradients(rows)) + JOINED_OFFSET * joined_mask


def find_first_gradients(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes the first gradients of its stage's weights.

    >>> from meshwise.strategies.schedules.orders import list_actions
    >>> find_first_gradients(list_actions("zb1p", 1, 2)).tolist()  # F0 I0 W0 F1 I1 W1
    [False, False, True, False, False, False]
    """
    return _find_first(rows, _makes_weight_gradients(rows))


def find_joined(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it is a forward directly followed by a backward of its stage, or that backward.

    Of a split backward it is the part for inputs, which alone reads parameters. Actions that overlap do not follow each
    other.

    >>> from meshwise.strategies.schedules.orders import list_actions
    >>> find_joined(list_actions("gpipe", 1, 2)).tolist()
    [False, True, True, False]
    """
    is_forward, reads_parameters = rows.kind[:-1] == _FORWARD, _makes_input_gradients(rows)[1:]
    is_followed = is_forward & reads_parameters & (rows.stage[1:] == rows.stage[:-1]) & ~rows.pairs_next[:-1]
    result: NDArray[np.bool_] = np.append(is_followed, False) | np.append(False, is_followed)
    return result


def find_stage_ends(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the first of its stage, or the last one, until which parameters may stay.

    >>> from meshwise.strategies.schedules.orders import list_actions
    >>> find_stage_ends(list_actions("zb1p", 1, 2)).tolist()  # F0 I0 W0 F1 I1 W1
    [True, False, False, False, False, True]
    """
    return _find_first(rows, rows.kind != _WEIGHT) | _find_last(rows, _makes_weight_gradients(rows))


def _makes_input_gradients(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes gradients of inputs."""
    result: NDArray[np.bool_] = (rows.kind == _BACKWARD) | (rows.kind == _INPUT)
    return result


def _makes_weight_gradients(rows: Actions) -> NDArray[np.bool_]:
    """Return, for every action, whether it makes gradients of weights."""
    result: NDArray[np.bool_] = (rows.kind == _BACKWARD) | (rows.kind == _WEIGHT)
    return result


def _find_first(rows: Actions, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the first one of its stage within ``mask``."""
    places = np.flatnonzero(mask)
    result: NDArray[np.bool_] = np.zeros(len(mask), np.bool_)
    result[places[np.unique(rows.stage[places], return_index=True)[1]]] = True
    return result


def _find_last(rows: Actions, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, for every action, whether it is the last one of its stage within ``mask``."""
    places = np.flatnonzero(mask)[::-1]
    _, indices = np.unique(rows.stage[places], return_index=True)
    result = np.zeros(len(mask), np.bool_)
    result[places[indices]] = True
    return result


_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(len(KINDS))
