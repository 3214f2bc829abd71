"""Topologies as plain values: links, networks inside a node, and fabrics between nodes.

`meshwise.simulator.interconnect.interconnect` turns them into numbered links and routes.
"""

from dataclasses import dataclass
from math import prod

from meshwise.simulator.brief import brief_repr


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: ``latency`` in s, ``bandwidth`` in byte/s.

    ``launch`` is the time in s that a collective over this link costs once, besides its steps.
    """

    latency: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.launch >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link has latency >= 0 and bandwidth > 0, met {self}")


@dataclass(frozen=True, slots=True)
class Switch:
    """A non-blocking switch with one port of ``link`` for every device (NVSwitch, a CPU's memory).

    ``reduces`` says whether the switch can add and multicast (NVLink SHARP).
    """

    link: Link
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices wired to each other: ``pairs`` are (a, b, number of links), each like ``link`` in both directions.

    Pairs without a wire send over other devices by the fewest hops. Without ``pairs`` every two devices have one link
    (xGMI, HCCS).
    """

    link: Link
    pairs: tuple[tuple[int, int, int], ...] = ()

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if any(a == b or min(a, b) < 0 or links < 1 for a, b, links in self.pairs):
            raise ValueError("mesh pairs join two different devices by at least one link")


@dataclass(frozen=True, slots=True)
class Ring:
    """Devices in a ring: each is wired to the next one, and the last to the first."""

    link: Link


@dataclass(frozen=True, slots=True)
class PcieTree:
    """Devices on PCIe switches, switches on sockets, and every two sockets joined by ``socket``.

    ``link`` is both a device's slot and a switch's uplink.
    """

    link: Link
    devices_per_switch: int
    switches_per_socket: int
    socket: Link

    def __post_init__(self) -> None:
        if min(self.devices_per_switch, self.switches_per_socket) < 1:
            raise ValueError("devices_per_switch and switches_per_socket are at least 1")


NodeNetwork = Switch | Mesh | Ring | PcieTree


@dataclass(frozen=True, slots=True)
class Crossbar:
    """A fabric of full bisection bandwidth, which only NICs limit."""


@dataclass(frozen=True, slots=True)
class LeafSpine:
    """Two tiers of switches: leaves of ``nodes_per_leaf`` nodes, and spines over which traffic is spread evenly.

    The uplinks of a leaf are ``oversubscription`` times narrower than its downlinks. With ``rail_optimized``, NICs
    ``i`` of all nodes of a unit of ``nodes_per_leaf`` nodes share a leaf, so that neighbours on a rail need no spine.
    ``hop`` is the latency in s of one more switch.
    """

    nodes_per_leaf: int
    oversubscription: float = 1.0
    rail_optimized: bool = False
    hop: float = 0.0
    reduces: bool = False

    def __post_init__(self) -> None:
        if self.nodes_per_leaf < 1 or self.oversubscription <= 0 or self.hop < 0:
            raise ValueError("nodes_per_leaf >= 1, oversubscription > 0 and hop >= 0")


@dataclass(frozen=True, slots=True)
class FatTree:
    """Three tiers of switches: leaves as in `LeafSpine`, pods of ``leaves_per_pod`` leaves, and a core that joins pods.

    A pod's uplinks are ``core_oversubscription`` times narrower than its leaves' uplinks.
    """

    nodes_per_leaf: int
    leaves_per_pod: int
    oversubscription: float = 1.0
    core_oversubscription: float = 1.0
    rail_optimized: bool = False
    hop: float = 0.0
    reduces: bool = False

    def __post_init__(self) -> None:
        if min(self.nodes_per_leaf, self.leaves_per_pod) < 1 or self.hop < 0:
            raise ValueError("nodes_per_leaf and leaves_per_pod are at least 1 and hop is not negative")
        if min(self.oversubscription, self.core_oversubscription) <= 0:
            raise ValueError("oversubscription is positive")


@dataclass(frozen=True, slots=True)
class Dragonfly:
    """Routers of ``nodes_per_router`` nodes in groups of ``routers_per_group``.

    Every two routers of a group are joined by a ``local`` link, every two groups by a ``group_link``. Routes are
    minimal.
    """

    nodes_per_router: int
    routers_per_group: int
    local: Link
    group_link: Link

    def __post_init__(self) -> None:
        if min(self.nodes_per_router, self.routers_per_group) < 1:
            raise ValueError("nodes_per_router and routers_per_group are at least 1")


@dataclass(frozen=True, slots=True)
class Torus:
    """Devices (not NICs) on a grid of 1 to 3 axes, each wired to its neighbours by ``link``.

    With ``wraparound`` every axis closes to a ring. Routes follow the axes in order, in the shorter direction.
    """

    shape: tuple[int, ...]
    link: Link
    wraparound: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= 3 or min(self.shape) < 1:
            raise ValueError(f"a torus has 1 to 3 axes of at least 1, met {self.shape}")

    @property
    def num_devices(self) -> int:
        """Devices on the grid."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Graph:
    """Any graph: directed ``edges`` (from, to, link) between named vertices.

    Device ``i`` is the vertex ``device i``; a vertex of any other name is a NIC or a switch. Routes have the fewest
    hops, and equal routes share the bytes evenly.
    """

    edges: tuple[tuple[str, str, Link], ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if not self.edges or any(a == b for a, b, _ in self.edges):
            raise ValueError("a graph has edges between different vertices")


Fabric = Crossbar | LeafSpine | FatTree | Dragonfly | Torus | Graph
