"""What the ranks of a run on several hosts know of each other: who is where, and who failed first."""

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.heartbeat import operation, read_beat
from executor.rank_error import read_errors

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
