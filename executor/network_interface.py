"""By which network interface a host of a run reaches the others."""

import socket
import struct
import sys
from ipaddress import ip_address

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
_ANY_PORT = 9


def loopback() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` elsewhere."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def address_towards(host: str) -> str:
    """Return the address of this machine that packets to ``host`` come from; of its own name that of the name.

    Nothing is sent.

    Raises
    ------
    OSError
        Where the name is not known here or there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_towards(master: str) -> str:
    """Return the interface by which this host of several reaches the first one, ``master``; empty where not known.

    gloo takes the address of this host's own name, which on many systems is a loopback address: 127.0.1.1.

    Raises
    ------
    ValueError
        Where ``master`` is a name that means this machine alone to this machine, and another one to others.
    """
    address = address_towards(master)
    if ip_address(address).is_loopback and not _says_loopback(master):
        raise ValueError(
            f"MASTER_ADDR is an address that all hosts reach, met {master}, which is {address} on "
            f"{socket.gethostname()}; name its address, or set GLOO_SOCKET_IFNAME to a network interface"
        )
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _says_loopback(master: str) -> bool:
    try:
        return ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; empty where it has none."""
    if sys.platform != "linux":
        return ""
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
