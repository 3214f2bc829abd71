"""Tells whether a process of this host is stopped, and locks a folder for one run at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process until it is continued; Linux tells it (proc(5))."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Run the body with ``folder`` locked against other runs; create the folder where it is missing.

    The kernel releases the lock when its process ends, however that ends. ``ValueError`` where another run has locked
    the folder, or it cannot be written.
    """
    path = folder / "run.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire_lock(path)
    except BlockingIOError:
        holder = path.read_text(errors="replace") if path.exists() else ""
        holder_text = f"met process {holder or 'unknown'}"
        raise ValueError(f"{folder}: a run is in progress in this folder, {holder_text}; name another") from None
    except OSError as error:
        raise ValueError(f"{folder}: the folder cannot be written: {error.strerror}") from None
    try:
        yield folder
    finally:  # removed while it is locked, so that it cannot be the file of the next holder
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire_lock(path: Path) -> int:
    """Return the descriptor of the locked file; ``BlockingIOError`` where another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last holder removed this file before we locked it: there may be a new one


INTERRUPTED = 130
"""Exit code of a command that SIGINT ended, as shells report it: 128 + 2; results up to then are written."""
