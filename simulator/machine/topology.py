"""The shapes that machines are wired in, as plain values: links, inside a node, and between nodes.

`meshwise.simulator.interconnect.interconnect` turns them into links and routes.
"""

from dataclasses import dataclass
from math import prod

from meshwise.simulator.brief import brief


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: ``latency`` in s, ``bandwidth`` in byte/s.

    ``launch`` is what a collective over this link costs once, in s, besides its steps.
    """

    latency: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.launch >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link has latency >= 0 and bandwidth > 0, met {self}")


@dataclass(frozen=True, slots=True)
class Switch:
    """Every device has one port of ``link`` into a non-blocking switch (NVSwitch, a CPU's memory).

    ``reduces`` says that the switch can add and multicast (NVLink SHARP).
    """

    link: Link
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices wired to each other: ``pairs`` are (a, b, links), each of ``link`` in both directions.

    Pairs that are not wired send through others by the fewest hops. Without ``pairs`` every
    two devices have one link (xGMI, HCCS).
    """

    link: Link
    pairs: tuple[tuple[int, int, int], ...] = ()

    __repr__ = brief()

    def __post_init__(self) -> None:
        if any(a == b or min(a, b) < 0 or links < 1 for a, b, links in self.pairs):
            raise ValueError("mesh pairs join two different devices by at least one link")


@dataclass(frozen=True, slots=True)
class Ring:
    """Each device is wired to the next and the one before, the last to the first."""

    link: Link


@dataclass(frozen=True, slots=True)
class PcieTree:
    """Devices on PCIe switches, switches on sockets, sockets joined by ``socket``.

    ``link`` is a slot and a switch's uplink.
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
    """A fabric of full bisection: NICs are its only limit."""


@dataclass(frozen=True, slots=True)
class LeafSpine:
    """Two tiers: ``nodes_per_leaf`` nodes on a leaf switch, whose uplinks are
    ``oversubscription`` times narrower than its downlinks; traffic is spread over all spines.

    ``rail_optimized`` gives NIC ``i`` of every node of a unit of ``nodes_per_leaf`` nodes a leaf of
    its own, so that neighbours on a rail need no spine. ``hop`` is the latency of one more switch.
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
    """Three tiers: leaves as in `LeafSpine`, ``leaves_per_pod`` of them to a pod, pods joined by a core.

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
    """Routers of ``nodes_per_router`` nodes, all-to-all by ``local`` links in groups of
    ``routers_per_group``; every two groups are joined by ``group_link``. Routes are minimal.
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
    """Devices (not NICs) on a 2-D or 3-D grid, each wired to its neighbours by ``link``.

    Where ``wraparound`` an axis closes to a ring; routes follow the axes in order, the short way.
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
    """Any graph: directed ``edges`` (from, to, link) between vertices by name.

    Device ``i`` is the vertex ``device i``; routes have the fewest hops and share equal ways evenly.
    A NIC or switch is any other name.
    """

    edges: tuple[tuple[str, str, Link], ...]

    __repr__ = brief()

    def __post_init__(self) -> None:
        if not self.edges or any(a == b for a, b, _ in self.edges):
            raise ValueError("a graph has edges between different vertices")


Fabric = Crossbar | LeafSpine | FatTree | Dragonfly | Torus | Graph
