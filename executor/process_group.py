"""Joining and leaving the process group of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from executor.accelerator import CORE, Accelerator
from executor.hosts import note_place, several_hosts
from executor.network_interface import address_towards, interface_towards, loopback
from executor.shared_folder import require_shared

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that gloo listens on and connects by."""
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable in which torchrun counts its restarts: its store still has the addresses of the ranks before."""


@contextmanager
def joined(folder: Path, timeout: float, accelerator: Accelerator = CORE) -> Iterator[None]:
    """Run the body inside a group of all ranks: rendezvous through ``folder``, or as torchrun says.

    Every wait for another rank ends after ``timeout`` seconds. Which interfaces NCCL takes it finds itself, where
    ``NCCL_SOCKET_IFNAME`` does not say.

    Raises
    ------
    ValueError
        Where the ranks of several hosts do not see one folder, or this host is not to be reached by the name of the
        first.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    accelerator.begin(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    backend = accelerator.backend
    wait = timedelta(seconds=timeout)
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        os.environ[_INTERFACE] = loopback()
        store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait)
    else:
        if several_hosts():
            note_place(folder, rank, address_towards(master))
        interface = interface_towards(master) if several_hosts() else loopback()
        if interface:
            os.environ.setdefault(_INTERFACE, interface)
        shared, *_ = next(dist.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
        attempt = dist.PrefixStore(f"attempt {os.environ.get(_ATTEMPT, 0)}", shared)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=ranks, timeout=wait)
        if several_hosts():
            require_shared(folder, rank)
    yield
    dist.barrier()
    dist.destroy_process_group()
