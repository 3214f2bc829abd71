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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ValueError(f"{folder}: the folder cannot be written: {error.strerror}") from None
    try:
        _acquire(descriptor, folder)
        yield folder
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
        raise ValueError(f"{folder}: a run is in progress in this folder, met process {holder}; name another") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
