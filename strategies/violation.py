"""Why a layout is illegal."""

from collections.abc import Sequence
from typing import NamedTuple

_MOST = 16
"""Numbers that a message names one by one."""


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame and what holds, what was met, what would do.

    ``schedule.2`` is line 2, from 0, of an order that is written out.
    """

    field: str
    message: str


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as a message names them: of many the first ones and the last.

    >>> listed((3, 3, 1))
    '[3, 3, 1]'
    >>> listed(range(400_000))
    '[0, 1, 2, 3, 4, 5, 6, 7, ..., 399999]'
    """
    if len(numbers) <= _MOST:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[: _MOST // 2]))}, ..., {numbers[-1]}]"
