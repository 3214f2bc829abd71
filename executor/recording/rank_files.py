"""What ranks leave in the folder of a run: what each is doing, where it runs, and how it failed.

A heartbeat is one small shared file a rank: cheap to write, readable at any time. By the others the ranks of several
hosts know who is where, and who failed first.
"""

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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


LENGTH = 800
"""Characters of an exception that are kept at most."""


def error_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` leaves its exception as JSON."""
    return folder / f"rank-{rank}.error"


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that ended a rank, and when: seconds since 1970."""

    time: float
    error: str

    @classmethod
    def of(cls, error: Exception) -> "RankError":
        """Return an exception as one line, with what it came from, now."""
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        return cls(time.time(), ", because of ".join(map(_line, chain)))

    def write(self, folder: Path, rank: int) -> None:
        """Leave this as the error of ``rank``."""
        error_file(folder, rank).write_text(json.dumps(asdict(self)))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LENGTH]


def read_errors(folder: Path, ranks: int) -> dict[int, RankError]:
    """Return the errors of the ranks that left one."""
    paths = {rank: error_file(folder, rank) for rank in range(ranks)}
    return {rank: RankError(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}


WATCH_PARENT = "MESHWISE_WATCH_PARENT"
"""Environment variable with the process id of the launcher of a rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the name of its host, and its address in the network that the ranks use."""

    host: str
    address: str


def several_hosts() -> bool:
    """Return whether torchrun started ranks on other hosts, or in other agents of this one, too."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return "MASTER_ADDR" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


def place_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` says where it runs."""
    return folder / f"rank-{rank}.place"


def note_place(folder: Path, rank: int, address: str) -> None:
    """Leave in the shared folder that ``rank`` runs on this host, which has ``address`` for the others."""
    place_file(folder, rank).write_text(json.dumps(asdict(Place(socket.gethostname(), address))))


def first_failure(folder: Path, ranks: int) -> str:
    """Return which rank failed first of those that could say so, where, how, and which host it lost."""
    errors, places = read_errors(folder, ranks), _places(folder, ranks)
    rank = min(errors, key=lambda rank: errors[rank].time)
    host = f" on host {places[rank].host}" if rank in places else ""
    gone = lost(places, errors[rank].error) or _missing(places, ranks)
    what = f"{errors[rank].error} (at {operation(read_beat(folder, rank))})"
    return f"rank {rank}{host} failed first: {what}" + (f"; {gone}" if gone else "")


def _places(folder: Path, ranks: int) -> dict[int, Place]:
    paths = {rank: place_file(folder, rank) for rank in range(ranks)}
    return {rank: Place(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}


def _missing(places: Mapping[int, Place], ranks: int) -> str:
    absent = [str(rank) for rank in range(ranks) if rank not in places]
    return f"nothing was heard of rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""


def lost(places: Mapping[int, Place], error: str) -> str:
    """Return which host an error of gloo's says is gone, and its ranks; empty where it says none.

    gloo names the address of the peer whose connection broke.

    >>> error = "Connection closed by peer [10.0.0.2]:33841"
    >>> lost({0: Place("a", "10.0.0.1"), 1: Place("b", "10.0.0.2"), 2: Place("b", "10.0.0.2")}, error)
    'host b (10.0.0.2), which has the ranks 1, 2, closed its connection'
    """
    for address in re.findall(r"\[([0-9A-Fa-f.:]+)\]:\d+", error):
        there = [rank for rank, place in places.items() if place.address == address]
        if there:
            have = f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))}"
            return f"host {places[there[0]].host} ({address}), which has the {have}, closed its connection"
    return ""
