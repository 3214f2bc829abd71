"""Joins and leaves the process group of a run.

It finds the network interface by which the hosts of a run reach each other, and checks that all see the same folder.
"""

import fcntl
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from meshwise.executor.recording.accelerator import CORE, Accelerator
from meshwise.executor.recording.private_torch import INTERFACE, limit_gloo_workers
from meshwise.executor.recording.rank_files import has_several_hosts, note_place

_SIOCGIFADDR = 0x8915
"""The ioctl of Linux that reads the IPv4 address of an interface (netdevice(7))."""
_ANY_PORT = 9


def find_loopback() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def find_address(host: str) -> str:
    """Return the address of this machine from which packets to ``host`` come; for its own name that name's address.

    A connected UDP socket has it; nothing is sent. ``OSError`` where the name is not known here or has no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def find_interface(master: str) -> str:
    """Return the network interface by which this host reaches the first host, ``master``; empty where not known.

    Without it gloo takes the address of this host's own name, which on many systems is a loopback address: 127.0.1.1.
    ``ValueError`` where ``master`` is a name that this machine resolves to a loopback address.
    """
    address = find_address(master)
    if ip_address(address).is_loopback and not _is_loopback_name(master):
        raise ValueError(
            f"MASTER_ADDR is an address that all hosts reach, met {master}, which is {address} on "
            f"{socket.gethostname()}; name its address, or set GLOO_SOCKET_IFNAME to a network interface"
        )
    return next((name for _, name in socket.if_nameindex() if _get_address(name) == address), "")


def _is_loopback_name(master: str) -> bool:
    try:
        return ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _get_address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty where it has none."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


_SHARE_TIMEOUT = 5.0
"""Seconds that a network file system gets to show a new file on all hosts."""


def require_shared_folder(folder: Path, rank: int) -> None:
    """Raise ``ValueError`` on every rank where one sees another folder, in which its results would stay.

    It is a collective of the default group.
    """
    token = torch.tensor([secrets.randbits(62) if rank == 0 else 0])
    mark_file = folder / "shared"
    if rank == 0:
        mark_file.write_text(str(token.item()))
    dist.broadcast(token, 0)
    mismatches = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mismatches[rank] = not _shows_text(mark_file, str(token.item()))
    dist.all_reduce(mismatches)
    if other_ranks := [other_rank for other_rank, is_mismatch in enumerate(mismatches.tolist()) if is_mismatch]:
        ranks = ", ".join(map(str, other_ranks))
        raise ValueError(f"hosts of a run share its folder, met another {folder} than that of rank 0 on ranks {ranks}")


def _shows_text(path: Path, text: str) -> bool:
    end = time.monotonic() + _SHARE_TIMEOUT
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable in which torchrun counts restarts; its store still has the addresses of earlier ranks."""


@contextmanager
def join_process_group(folder: Path, timeout: float, accelerator: Accelerator = CORE) -> Iterator[None]:
    """Run the body in a process group of all ranks, with a rendezvous through ``folder`` or by torchrun.

    Every wait for another rank ends after ``timeout`` seconds. NCCL chooses its interfaces itself, unless
    ``NCCL_SOCKET_IFNAME`` names them. ``ValueError`` where the ranks of several hosts do not see the same folder, or
    the name of the first host is a loopback address on this host.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    accelerator.claim_device(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    backend = accelerator.backend
    wait_limit = timedelta(seconds=timeout)
    limit_gloo_workers()
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        os.environ[INTERFACE] = find_loopback()
        store = dist.FileStore(str(folder / "store"), num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=wait_limit)
    else:
        if has_several_hosts():
            note_place(folder, rank, find_address(master))
        interface = find_interface(master) if has_several_hosts() else find_loopback()
        if interface:
            os.environ.setdefault(INTERFACE, interface)
        torchrun_store, *_ = next(dist.rendezvous("env://", timeout=wait_limit))  # type: ignore[attr-defined]
        # a prefix for each restart: torchrun's store keeps the keys of the ranks before
        attempt_store = dist.PrefixStore(f"attempt {os.environ.get(_ATTEMPT, 0)}", torchrun_store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=attempt_store, rank=rank, world_size=num_ranks, timeout=wait_limit)
        if has_several_hosts():
            require_shared_folder(folder, rank)
    yield
    dist.barrier()
    dist.destroy_process_group()
