"""What one input may take and do: a second of CPU, 500 MB, the one error, and no effect outside."""

import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.simulator.files import is_plain

SECONDS = 1.0
MEGABYTES = 500
STOP = 10.0
"""Seconds of CPU after which an input is broken off."""
MOST_WORDS = 200_000
"""Characters that the message of an error has at most."""
_ROOT = Path(__file__).resolve().parents[3]
_EFFECTS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir"),
    *("os.chmod", "os.symlink", "os.link", "subprocess.Popen", "socket.connect", "socket.bind"),
    *("pickle.find_class", "shutil.rmtree", "ctypes.dlopen", "webbrowser.open", "urllib.Request"),
)
"""Audit events (Python Library Reference, "Audit events table") that reading data never causes."""


class TooLong(BaseException):
    """An input takes longer than `STOP`; no ``except Exception`` keeps it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an input did that it may not: ``kind`` and ``place`` are the same for inputs that fail alike."""

    kind: str
    place: str
    detail: str


class _Watched:
    """The effects that the present input has had; empty hands where none is being read."""

    found: list[str] | None = None
    folders: tuple[str, ...] = ()
    hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watched.found is None:
        return
    if event in _EFFECTS:
        _Watched.found.append(event)
    elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, mode, flags = os.path.abspath(os.fsdecode(arguments[0])), arguments[1], arguments[2]
        writes = (mode or "r")[0] in "wax" or "+" in (mode or "") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes:
            _Watched.found.append(f"writes {path}")
        elif not path.startswith(_Watched.folders):
            _Watched.found.append(f"opens {path}")


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Yield a list of what is run, written, or opened outside of ``folder`` and of what is installed."""
    if not _Watched.hooked:
        sys.addaudithook(_hook)
        _Watched.hooked = True
    installed = (_ROOT, Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/sys/devices/system"))
    _Watched.folders = tuple(str(path) for path in (folder.resolve(), folder, *installed))
    found: list[str] = []
    _Watched.found = found
    try:
        yield found
    finally:
        _Watched.found = None


def failure(
    read: Callable[[bytes], object], content: bytes, errors: tuple[type[Exception], ...], folder: Path
) -> tuple[Failure | None, bool, float]:
    """Return what is wrong with how an input was read, whether it was accepted, and the seconds of CPU it took."""
    before, start = _peak(), time.process_time()
    accepted, found = False, None
    old = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, STOP)
    try:
        with watched(folder) as effects, warnings.catch_warnings():
            warnings.simplefilter("error")  # a user would see it, and a number that is none may follow
            read(content)
        accepted = True
    except errors as error:
        found = _of_message(str(error))
    except TooLong as error:
        found = Failure("too long", _place(error), f"more than {STOP} s")
    except (Exception, RecursionError) as error:
        found = Failure(type(error).__name__, _place(error), str(error)[:300])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    seconds = time.process_time() - start
    if found is None and effects:
        found = Failure("effect", effects[0].split(" ")[0], "; ".join(effects)[:300])
    if found is None and (grown := _peak() - before) > MEGABYTES:
        found = Failure("memory", "", f"{grown:.0f} MB")
    if found is None and seconds > SECONDS:
        found = Failure("slow", "", f"{seconds:.1f} s")
    return found, accepted, seconds


def _of_message(text: str) -> Failure | None:
    """Return what is wrong with the message of an input error: it says something, in little, and in plain text."""
    if not text.strip() or len(text) > MOST_WORDS:
        return Failure("message", "length", f"{len(text)} characters")
    bad = next((line for line in text.split("\n") if not is_plain(line)), None)
    return None if bad is None else Failure("message", "control characters", ascii(bad)[:300])


def _stop(*_: object) -> None:
    raise TooLong


def _place(error: BaseException) -> str:
    """Return the file and line of the program where an error arose."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(_ROOT))]
    frame = frames[-1]
    return f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}"


def _peak() -> float:
    """Return the most memory that this process has had, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
