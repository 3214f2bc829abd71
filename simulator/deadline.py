"""Long simulations that can be ended: whoever started one is asked from time to time whether it may go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("goes_on", default=None)


@contextmanager
def watched_by(check: Callable[[], None]) -> Iterator[None]:
    """Let ``check`` end what is lowered and simulated inside, by an exception."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def check_deadline() -> None:
    """Call the check of the innermost `watched_by`, if there is one; it raises to end the simulation."""
    check = _CHECK.get()
    if check is not None:
        check()
