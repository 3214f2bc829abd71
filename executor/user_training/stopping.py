"""A run that is asked to end: Ctrl-C and SIGTERM reach its ranks through a file, and they end with a checkpoint."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from meshwise.executor.user_training.job import stop_file

_SIGNAL_CODE = 128
"""Shells report a process that a signal ended with this and the signal's number."""


class StoppedError(RuntimeError):
    """A run that was asked to end, and has; the message says how to go on.

    Parameters
    ----------
    code
        The exit code of a command that ends so.
    """

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.code = _SIGNAL_CODE + number


class StopRequest:
    """Passes Ctrl-C and SIGTERM on to the ranks of a run, as long as its body runs; a second one ends it at once.

    Attributes
    ----------
    number
        That of the signal that has come; ``None`` before.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.number: int | None = None
        self._file, self._tell = stop_file(folder), tell
        self._earlier_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT in a script's background job
                    self._earlier_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        self._tell(f"{signal.Signals(number).name}: ends after the step that runs, with a checkpoint; again: at once")

    def pass_on(self) -> None:
        """Tell the ranks of a signal that has come; to be called often."""
        if self.number is not None:
            self._file.touch()
