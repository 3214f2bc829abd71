"""Joining and leaving the process group of a run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def loopback() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


@contextmanager
def joined(folder: Path, timeout: float) -> Iterator[None]:
    """Run the body inside a gloo group: rendezvous through ``folder``, or as torchrun says.

    Every wait for another rank ends after ``timeout`` seconds.
    """
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    wait = timedelta(seconds=timeout)
    if "MASTER_ADDR" in os.environ:
        if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) == ranks:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        dist.init_process_group("gloo", init_method="env://", timeout=wait)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback()
        store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    yield
    dist.barrier()
    dist.destroy_process_group()
