"""The folder of a run on several hosts: all of them see the same one."""

import secrets
import time
from pathlib import Path

import torch
import torch.distributed as dist

_SEEN_WITHIN = 5.0
"""Seconds that a network file system gets to show a new file on all hosts."""


def require_shared(folder: Path, rank: int) -> None:
    """Return where all ranks see the same folder; a collective of the default group.

    Raises
    ------
    ValueError
        On every rank, where some see another folder: results of theirs would stay with them.
    """
    token = torch.tensor([secrets.randbits(62) if rank == 0 else 0])
    mark = folder / "shared"
    if rank == 0:
        mark.write_text(str(token.item()))
    dist.broadcast(token, 0)
    apart = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    apart[rank] = not _shows(mark, str(token.item()))
    dist.all_reduce(apart)
    if others := [other for other, is_apart in enumerate(apart.tolist()) if is_apart]:
        ranks = ", ".join(map(str, others))
        raise ValueError(f"hosts of a run share its folder, met another {folder} than that of rank 0 on ranks {ranks}")


def _shows(path: Path, text: str) -> bool:
    end = time.monotonic() + _SEEN_WITHIN
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
