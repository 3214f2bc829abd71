"""Deadlines of long simulations: the code that started one is asked from time to time whether it may go on.

What looks at many plans asks a `TimeLeft` itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

TimeLeft = Callable[[], float]
"""Returns the number of seconds that are left."""


def unlimited_seconds() -> float:
    """Return the number of seconds left without a limit: infinity."""
    return inf


# A context variable and not a parameter: the loops that call the check lie many calls below the code that sets it.
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("goes_on", default=None)


@contextmanager
def set_check(check: Callable[[], None]) -> Iterator[None]:
    """Run a block during which lowering and simulation call ``check``; it raises to end them."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def check_deadline() -> None:
    """Call the check of the innermost `set_check`, if there is one; it raises to end the simulation."""
    check = _CHECK.get()
    if check is not None:
        check()
