"""Loops that numba compiles, if it is installed and loading it is worth its time.

The loops are plain functions of arrays. Without numba, Python runs them on lists, several times as fast as on arrays:
each loop is written once.
"""

import os
import sys
from collections.abc import Callable, MutableSequence, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.simulator.program import IntArray

Ints = MutableSequence[int]

LOAD_TASKS = 500_000
"""Tasks that Python walks in the time that numba takes to load, about 0.25 s."""

CALL_TASKS = 300
"""Tasks from which a call of a compiled loop is faster than Python."""

_walked = 0


def pays(tasks: int) -> bool:
    """Return whether to run a loop over this number of tasks compiled.

    numba is loaded once Python has spent the time of loading it on such loops, so that neither a single small step nor
    many of them take much longer than necessary.
    """
    global _walked
    _walked += tasks
    return tasks >= CALL_TASKS and (bool(sys.modules.get("numba")) or _walked >= LOAD_TASKS) and installed()


@cache
def installed() -> bool:
    """Return whether numba can be imported."""
    return find_spec("numba") is not None


@cache
def compile_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop as machine code, which is kept on disk between runs if possible."""
    numba = import_module("numba")
    stated_folder = numba.config.CACHE_DIR
    try:
        # not beside the source: what an uninstalled version leaves there would hide another installation
        numba.config.CACHE_DIR = stated_folder or str(find_cache_folder())
        return numba.njit(cache=True)(loop)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder in which numba could keep it
        return numba.njit(loop)  # type: ignore[no-any-return]
    finally:
        numba.config.CACHE_DIR = stated_folder


def find_cache_folder() -> Path:
    """Return the user's folder for files that can be made again; ``RuntimeError`` where the user has none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise"


def run_loop(
    loop: Callable[..., Any], inputs: Sequence[IntArray], outputs: Sequence[IntArray], is_compiled: bool
) -> tuple[Any, list[IntArray]]:
    """Run a loop over columns, of which it changes ``outputs``, and return its result and these columns."""
    if is_compiled:
        return compile_loop(loop)(*inputs, *outputs), list(outputs)
    lists = [column.tolist() for column in outputs]
    result = loop(*(column.tolist() for column in inputs), *lists)
    return result, [np.array(column, np.int64) for column in lists]
