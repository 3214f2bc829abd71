"""Where the hosts of a run meet: a name and a port of the first of them."""

import errno
import re
import socket
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""The port that torchrun takes where none is said."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:%-]*[A-Za-z0-9])?|::1?")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The first host of a run, by name or address, and the port of its store."""

    host: str
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ValueError(f"rendezvous: HOST:PORT names a host by name or address, met {self.host[:60]!r}")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"rendezvous: a port is from 1 to 65535, met {self.port}; nearest: {DEFAULT_PORT}")

    @classmethod
    def parse(cls, text: str) -> "Rendezvous":
        """Return what ``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT`` says.

        >>> Rendezvous.parse("node0:1234"), Rendezvous.parse("[fd00::2]:80").host
        (Rendezvous(host='node0', port=1234), 'fd00::2')
        """
        match = re.fullmatch(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(?::(?P<port>[0-9]{1,9}))?", text)
        if match is None:
            raise ValueError(f"rendezvous: HOST:PORT is the first host and a port of it, met {text[:60]!r}")
        return cls(match["address"] or match["name"] or "", int(match["port"] or DEFAULT_PORT))

    def require_free(self) -> None:
        """Return where the port is free, or the host is another machine, which is not asked.

        Raises
        ------
        ValueError
            Where the host is this machine and something listens on the port; names the next free one.
        """
        if self._is_here() and not _is_free(self.port):
            free = next((port for port in range(self.port + 1, 65536) if _is_free(port)), None)
            nearest = f"; nearest: {free}" if free else ""
            raise ValueError(f"rendezvous: the port is free on {self.host}, met {self.port}, which is busy{nearest}")

    def _is_here(self) -> bool:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True


def _is_free(port: int) -> bool:
    """Return whether torchrun's store, which listens on every address of its host, could have a port of this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
