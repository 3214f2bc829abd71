"""One run at a time in a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_file(folder: Path) -> Path:
    """Return the file that a run holds locked."""
    return folder / "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Run the body while no other run uses ``folder``, which is made where it is missing.

    The kernel gives the lock up with the process that holds it, however it ends.

    Raises
    ------
    ValueError
        Where another run holds the folder, or it cannot be written.
    """
    path = lock_file(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquired(path)
    except BlockingIOError:
        holder = path.read_text(errors="replace") if path.exists() else ""
        met = f"met process {holder or 'unknown'}"
        raise ValueError(f"{folder}: a run is in progress in this folder, {met}; name another") from None
    except OSError as error:
        raise ValueError(f"{folder}: the folder cannot be written: {error.strerror}") from None
    try:
        yield folder
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquired(path: Path) -> int:
    """Return a descriptor that holds the lock; ``BlockingIOError`` where another process holds it."""
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
        os.close(descriptor)  # its last holder removed this file before it was locked: there may be another by now
