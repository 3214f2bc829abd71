"""Loops compiled by numba where it is installed, and where loading it is worth its time.

The loops are plain functions of arrays; on lists Python itself runs them, several times
as fast as on arrays, so that each is written once and works without numba too.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

TO_LOAD = 500_000
"""Tasks that Python walks in the time in which numba loads, about 0.25 s."""

TO_CALL = 300
"""Tasks from which a loaded loop is faster than Python's."""

_walked = 0


def pays(tasks: int) -> bool:
    """Return whether to run a loop over so many tasks compiled.

    numba is loaded when Python has spent as much time in its stead, so that neither one
    small step nor many cost much more than they must.
    """
    global _walked
    _walked += tasks
    return tasks >= TO_CALL and (bool(sys.modules.get("numba")) or _walked >= TO_LOAD) and installed()


@cache
def installed() -> bool:
    """Return whether numba can be imported."""
    return find_spec("numba") is not None


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop as machine code, kept on disk between runs where that is possible."""
    njit = import_module("numba").njit
    try:
        return njit(cache=True)(loop)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder in which numba could keep it
        return njit(loop)  # type: ignore[no-any-return]
