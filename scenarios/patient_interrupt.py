"""Ctrl-C among extension modules, which lose an interrupt or make an error of their own of it.

One that comes while a module is imported waits until it has loaded, and whoever meets an error can ask whether an
interrupt was there before.
"""

import sys
from signal import ITIMER_REAL, SIGALRM, SIGINT, default_int_handler, getsignal, setitimer, signal
from time import process_time
from types import FrameType

_IMPORT = "<frozen importlib._bootstrap>"
_AGAIN = 0.01
"""Seconds after which an interrupt that waits looks again."""
_PATIENCE = 1.0
"""Seconds of CPU time that an interrupt waits at most."""


class PatientInterrupt:
    """Handler of SIGINT: raises ``KeyboardInterrupt``, but not inside an import that ends soon.

    Met before: matplotlib without one of its modules, schemas without a function, and the command went on.

    Attributes
    ----------
    raised
        Whether ``KeyboardInterrupt`` was raised once.
    """

    def __init__(self) -> None:
        self.raised = False
        self._came: float | None = None

    def install(self) -> None:
        """Handle SIGINT from now on, where it is not ignored, as of a job of a script; SIGALRM is for looking again."""
        if getsignal(SIGINT) is not default_int_handler:
            return
        for number in (SIGINT, SIGALRM):
            signal(number, self)
        sys.unraisablehook = self._ignored

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise ``KeyboardInterrupt``, now or when what is being imported has loaded."""
        if number == SIGALRM and self._came is None:
            return
        self._came = process_time() if self._came is None else self._came
        if _imports(frame) and process_time() - self._came < _PATIENCE:
            setitimer(ITIMER_REAL, _AGAIN)
            return
        self._came, self.raised = None, True
        raise KeyboardInterrupt

    def _ignored(self, what: "sys.UnraisableHookArgs") -> None:
        """Raise an interrupt again that Python ignored, as it does where a generator is closed that nobody uses."""
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)
            return
        self._came = process_time()
        setitimer(ITIMER_REAL, _AGAIN)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported where the program is."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False
