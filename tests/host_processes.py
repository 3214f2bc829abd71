"""What Linux tells of processes in ``/proc``: their states, their parents, and the ports on which they listen.

Without ``/proc`` states are empty and lists have no items.
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT = 0, 1
"""Indices of the fields of ``/proc/PID/stat`` after the name (proc(5))."""
_LISTENING = "0A"


def is_alive(pid: int) -> bool:
    """Return whether a process runs, waits or is stopped; a zombie is not alive."""
    return _read_fields(pid)[_STATE] not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; false where it is gone."""
    return _read_fields(pid)[_STATE] == "T"


def list_children(pid: int) -> list[int]:
    """Return all descendants of a process, in order of their numbers."""
    parents = {process: int(_read_fields(process)[_PARENT]) for process in _list_pids()}
    descendants, new_pids = set[int](), {pid}
    while new_pids:
        new_pids = {process for process, parent in parents.items() if parent in new_pids} - descendants
        descendants |= new_pids
    return sorted(descendants)


def find_listeners(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return the addresses and TCP ports on which any of these processes listens."""
    inodes = {inode for pid in pids for inode in _list_sockets(pid)}
    return {place for inode, place in _read_listeners() if inode in inodes}


def list_listeners() -> set[tuple[str, int]]:
    """Return the addresses and TCP ports on which any process of this network namespace listens."""
    return {place for _, place in _read_listeners()}


def _list_pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()] if _PROC.is_dir() else []


def _read_fields(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "0"]


def _list_sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of the sockets that a process holds open."""
    try:
        descriptors = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _read_listeners() -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield inode, address and port of every listening socket of this network namespace."""
    for name in ("tcp", "tcp6"):
        path = _PROC / "net" / name
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                yield fields[9], (parse_address(address), int(port, 16))


def parse_address(text: str) -> str:
    """Return the address that ``/proc/net/tcp`` or ``tcp6`` prints as 32-bit words in the machine's byte order.

    >>> import sys
    >>> parse_address("0100007F" if sys.byteorder == "little" else "7F000001")
    '127.0.0.1'
    """
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> [is_loopback(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", "10.0.0.2")]
    [True, True, True, False, False, False]
    """
    parsed_address = ipaddress.ip_address(address)
    mapped_address = parsed_address.ipv4_mapped if isinstance(parsed_address, ipaddress.IPv6Address) else None
    return (mapped_address or parsed_address).is_loopback
