"""The console command ``meshwise``: parses arguments, and turns every failure into one message and an exit code.

An extension module may lose an interrupt that arrives during its import, or turn it into another error. Ctrl-C
therefore waits until an import has ended, and an error that follows an interrupt counts as the interrupt.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from signal import ITIMER_REAL, SIG_DFL, SIGALRM, SIGINT, default_int_handler, getsignal, setitimer, signal
from time import process_time
from types import FrameType
from typing import TYPE_CHECKING

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.scenarios.console import BAD_INPUT, FAILED, note

if TYPE_CHECKING:
    from typer.core import TyperGroup

_IMPORT = "<frozen importlib._bootstrap>"
_AGAIN = 0.01
"""Seconds after which a waiting interrupt checks again whether the import has ended."""
_PATIENCE = 1.0
"""Largest CPU time in seconds for which an interrupt waits."""


class PatientInterrupt:
    """A handler of SIGINT that raises ``KeyboardInterrupt``, but not inside an import that ends soon.

    Without it an interrupted import has left matplotlib without one of its modules, and schemas without a function,
    while the command went on.

    Attributes
    ----------
    raised
        Whether ``KeyboardInterrupt`` was raised at least once.
    """

    def __init__(self) -> None:
        self.raised = False
        self._interrupt_time: float | None = None

    @property
    def arrived(self) -> bool:
        """Whether an interrupt came, raised or still waiting for an import."""
        return self.raised or self._interrupt_time is not None

    def install(self) -> None:
        """Handle SIGINT from now on, unless it is ignored, as in a script's background job; SIGALRM is for retries."""
        if getsignal(SIGINT) is not default_int_handler:
            return
        for number in (SIGINT, SIGALRM):
            signal(number, self)
        sys.unraisablehook = self._report_ignored

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise ``KeyboardInterrupt`` now, or after the current import."""
        if number == SIGALRM and self._interrupt_time is None:
            return
        self._interrupt_time = process_time() if self._interrupt_time is None else self._interrupt_time
        if _is_importing(frame) and process_time() - self._interrupt_time < _PATIENCE:
            setitimer(ITIMER_REAL, _AGAIN)
            return
        self._interrupt_time, self.raised = None, True
        raise KeyboardInterrupt

    def _report_ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise an interrupt again that Python ignored, as it does when an unused generator is closed."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        self._interrupt_time = process_time()
        setitimer(ITIMER_REAL, _AGAIN)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is inside the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


_OWN = "meshwise"


def application() -> "TyperGroup":
    """Return the command line; typer is imported here, where Ctrl-C prints one word and no traceback."""
    from meshwise.scenarios.commands.table import command_group

    return command_group()


def run(arguments: Sequence[str] | None = None, *, interrupt: PatientInterrupt | None = None) -> int:
    """Run a command line (by default the process's) and return its exit code.

    0 done, 1 failed while running, 2 bad input, 3 nothing fits, 130 interrupted. After an ``interrupt`` every error but
    ``OSError`` counts as its consequence, such as matplotlib's "Invalid affine transformation matrix". A command that
    succeeds while an interrupt still waits, or after a library swallowed one, counts as interrupted.
    """
    try:
        code = application()(args=arguments, prog_name="meshwise", standalone_mode=False)
        sys.stdout.flush()
        if not code and interrupt is not None and interrupt.arrived:
            code = INTERRUPTED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout at exit, which would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        is_interrupt = interrupt is not None and interrupt.raised and not isinstance(error, OSError)
        code = INTERRUPTED if is_interrupt else _report_failure(error)
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _report_failure(error: Exception) -> int:
    """Print one message for an error and return the exit code."""
    if isinstance(error.__cause__, KeyboardInterrupt):  # typer makes an Abort of it
        return INTERRUPTED
    if os.environ.get("MESHWISE_DEBUG") == "1":
        traceback.print_exception(error)
    usage = getattr(error, "format_message", None)
    if usage is not None:
        note(str(usage()))
        return BAD_INPUT
    if isinstance(error, ValueError):
        note(str(error))
        return BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        remedy = (
            "pip install 'meshwise[exec]'"
            if error.name in ("torch", "safetensors")
            else "`meshwise doctor` shows what is missing"
        )
        note(f"{error.name} is not installed; {remedy}")
        return FAILED
    words = " ".join(str(error).split()) or "no message"
    if type(error).__module__.partition(".")[0] == _OWN:  # the program's own messages need no name of a class
        note(words)
        return FAILED
    note(f"failed: {type(error).__name__}: {words[:500]} (MESHWISE_DEBUG=1 shows where)")
    return FAILED


def main() -> None:
    """Run the command line of this process; an interrupt ends it without a traceback, even while modules load."""
    interrupt = PatientInterrupt()
    interrupt.install()
    try:
        code = run(interrupt=interrupt)
    except KeyboardInterrupt:  # a second one, while a message was printed
        code = INTERRUPTED
    if getsignal(SIGINT) is interrupt:
        setitimer(ITIMER_REAL, 0.0)
        signal(SIGINT, SIG_DFL)  # all is written: an interrupt during Python's exit should print no traceback
    if code == INTERRUPTED:
        with suppress(OSError):  # the reader of stdout may have gone
            sys.stdout.flush()
        os._exit(code)  # a half-loaded extension module may crash while Python shuts down
    sys.exit(code)
