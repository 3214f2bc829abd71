"""Long simulations that can be ended: whoever started one is asked from time to time whether it may go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_GOES_ON: ContextVar[Callable[[], None] | None] = ContextVar("goes_on", default=None)


@contextmanager
def watched_by(check: Callable[[], None]) -> Iterator[None]:
    """Let ``check`` end what is lowered and simulated inside, by an exception."""
    token = _GOES_ON.set(check)
    try:
        yield
    finally:
        _GOES_ON.reset(token)


def check_deadline() -> None:
    """Raise what who watches raises, if anybody does."""
    check = _GOES_ON.get()
    if check is not None:
        check()
