"""The small files of a rank in the folder of a run: what it is doing, where it runs, and how it failed.

A heartbeat is one small memory-mapped file for each rank: cheap to write and readable at any time. The other files tell
the ranks of several hosts which rank runs where, and which failed first.
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
from typing import TypeVar

SIZE = 128
T = TypeVar("T")


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of the heartbeat of ``rank``."""
    return folder / f"rank-{rank}.heartbeat"


class Heartbeat:
    """Writes the step and the operation of one rank; a beat takes a microsecond or two."""

    def __init__(self, folder: Path, rank: int) -> None:
        descriptor = os.open(heartbeat_file(folder, rank), os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, SIZE)
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        self._count = 0
        self.step = -1

    def beat(self, operation: str) -> None:
        """Write that ``operation`` begins."""
        self._count += 1
        text = f"step {self.step}, {operation}" if self.step >= 0 else operation
        self._memory[:] = f"{self._count} {text}".encode()[:SIZE].ljust(SIZE)


def read_beat(folder: Path, rank: int) -> str:
    """Return the last beat of ``rank`` as ``count operation``; empty before the first."""
    try:
        return heartbeat_file(folder, rank).read_bytes().decode(errors="replace").strip("\0 ")
    except FileNotFoundError:
        return ""


def parse_operation(beat: str) -> str:
    """Return the operation that a beat names.

    >>> parse_operation("17 step 2, forward 0F1")
    'step 2, forward 0F1'
    """
    return beat.partition(" ")[2] or "start"


def make_teller(folder: Path, report: Callable[[str], None] | None) -> Callable[[], None]:
    """Return a function to call often, which calls ``report`` with the operation of rank 0 whenever it has changed."""
    last_operation = ""

    def look() -> None:
        nonlocal last_operation
        current_operation = parse_operation(read_beat(folder, 0))
        if report is not None and current_operation != last_operation:
            report(current_operation)
        last_operation = current_operation

    return look


LENGTH = 800
"""The most characters of an exception that are kept."""


def error_file(folder: Path, rank: int) -> Path:
    """Return the path of the JSON file with the exception of ``rank``."""
    return folder / f"rank-{rank}.error"


class UserError(ValueError):
    """What a user's file, data or options must mend; the message says all, and needs no traceback."""


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that ended a rank, and its time in seconds since 1970.

    ``user_text`` is the message of a `UserError`, else empty.
    """

    time: float
    error: str
    user_text: str = ""

    @classmethod
    def from_exception(cls, error: Exception) -> "RankError":
        """Return an exception with its causes, as one line, and the time now."""
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        user_text = str(error) if isinstance(error, UserError) else ""
        return cls(time.time(), ", because of ".join(map(_format_line, chain)), user_text)

    def write(self, folder: Path, rank: int) -> None:
        """Write this as the error of ``rank``."""
        error_file(folder, rank).write_text(json.dumps(asdict(self)))


def _format_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LENGTH]


def read_errors(folder: Path, ranks: int) -> dict[int, RankError]:
    """Return the errors by rank, of the ranks that wrote one."""
    return _read_entries(error_file, RankError, folder, ranks)


def _read_entries(
    find_file: Callable[[Path, int], Path], kind: Callable[..., T], folder: Path, ranks: int
) -> dict[int, T]:
    paths = {rank: find_file(folder, rank) for rank in range(ranks)}
    return {rank: kind(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}


WATCH_PARENT = "MESHWISE_WATCH_PARENT"
"""Environment variable with the process id of the launcher that a rank watches."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the name of its host, and the host's address in the network of the ranks."""

    host: str
    address: str


def has_several_hosts() -> bool:
    """Return whether torchrun also started ranks on other hosts, or by other agents on this host."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return "MASTER_ADDR" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


def place_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that says where ``rank`` runs."""
    return folder / f"rank-{rank}.place"


def note_place(folder: Path, rank: int, address: str) -> None:
    """Write into the shared folder that ``rank`` runs on this host, which the others reach at ``address``."""
    place_file(folder, rank).write_text(json.dumps(asdict(Place(socket.gethostname(), address))))


def describe_first_failure(folder: Path, ranks: int) -> str:
    """Return a sentence about the first failure that a rank wrote: the rank, its host, the error and a lost host."""
    errors, places = read_errors(folder, ranks), _read_entries(place_file, Place, folder, ranks)
    rank = min(errors, key=lambda rank: errors[rank].time)
    host = f" on host {places[rank].host}" if rank in places else ""
    lost_host = describe_lost_host(places, errors[rank].error) or _describe_missing(places, ranks)
    failure = f"{errors[rank].error} (at {parse_operation(read_beat(folder, rank))})"
    return f"rank {rank}{host} failed first: {failure}" + (f"; {lost_host}" if lost_host else "")


def _describe_missing(places: Mapping[int, Place], ranks: int) -> str:
    missing_ranks = [str(rank) for rank in range(ranks) if rank not in places]
    plural = "s" if len(missing_ranks) > 1 else ""
    return f"nothing was heard of rank{plural} {', '.join(missing_ranks)}" if missing_ranks else ""


def describe_lost_host(places: Mapping[int, Place], error: str) -> str:
    """Return which host was lost and its ranks, by an error of gloo; empty where the error names none.

    gloo names the address of the peer whose connection broke.

    >>> error = "Connection closed by peer [10.0.0.2]:33841"
    >>> describe_lost_host({0: Place("a", "10.0.0.1"), 1: Place("b", "10.0.0.2"), 2: Place("b", "10.0.0.2")}, error)
    'host b (10.0.0.2), which has the ranks 1, 2, closed its connection'
    """
    for address in re.findall(r"\[([0-9A-Fa-f.:]+)\]:\d+", error):
        ranks = [rank for rank, place in places.items() if place.address == address]
        if ranks:
            rank_list = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            return f"host {places[ranks[0]].host} ({address}), which has the {rank_list}, closed its connection"
    return ""
