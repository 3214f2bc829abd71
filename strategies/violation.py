"""Why a layout is illegal."""

from typing import NamedTuple


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame and what holds, what was met, what would do.

    ``schedule.2`` is line 2, from 0, of an order that is written out.
    """

    field: str
    message: str
