"""One small shared file per rank that says what it is doing: cheap to write, readable at any time."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

SIZE = 128


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` beats."""
    return folder / f"rank-{rank}.heartbeat"


class Heartbeat:
    """Writes the step and operation of one rank, a microsecond or two a time."""

    def __init__(self, folder: Path, rank: int) -> None:
        descriptor = os.open(heartbeat_file(folder, rank), os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, SIZE)
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        self._count = 0
        self.step = -1

    def beat(self, operation: str) -> None:
        """Say that ``operation`` begins."""
        self._count += 1
        where = f"step {self.step}, {operation}" if self.step >= 0 else operation
        self._memory[:] = f"{self._count} {where}".encode()[:SIZE].ljust(SIZE)


def read_beat(folder: Path, rank: int) -> str:
    """Return the last beat of ``rank`` as ``count operation``; empty before the first."""
    try:
        return heartbeat_file(folder, rank).read_bytes().decode(errors="replace").strip("\0 ")
    except FileNotFoundError:
        return ""


def operation(beat: str) -> str:
    """Return the operation that a beat names.

    >>> operation("17 step 2, forward 0F1")
    'step 2, forward 0F1'
    """
    return beat.partition(" ")[2] or "start"


def teller(folder: Path, told: Callable[[str], None] | None) -> Callable[[], None]:
    """Return what to call often: it tells the operation of rank 0 whenever it is another one."""
    last = ""

    def look() -> None:
        nonlocal last
        now = operation(read_beat(folder, 0))
        if told is not None and now != last:
            told(now)
        last = now

    return look
