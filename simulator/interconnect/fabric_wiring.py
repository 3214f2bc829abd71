"""Links between nodes: NICs and switches, or direct links between devices; one class for each fabric.

Leaf switches have a spine above them, or pods and a core. A dragonfly has groups of routers, with all-to-all links in
every group and among groups. A torus joins devices directly on a grid; a graph is whatever the user draws.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from math import prod
from typing import Protocol

import numpy as np

from meshwise.simulator.interconnect.host_wiring import HostWiring
from meshwise.simulator.interconnect.links import Edge, Links, Numbering, owners, starts
from meshwise.simulator.interconnect.node_wiring import Axis, axis
from meshwise.simulator.interconnect.routes import (
    FloatArray,
    IntArray,
    Routes,
    Shortest,
    along,
    joined,
    ordered_pairs,
    pair_index,
    table_of,
    where,
)
from meshwise.simulator.machine.topology import Crossbar, Dragonfly, FatTree, Graph, LeafSpine, Torus


class Tier:
    """Switches of one tier, each with one link up and one down; ``switch_of_nic`` is the one above every NIC.

    As parts of the cluster (`Parts`) the switches are numbered from ``first_part``. Traffic spreads evenly over the
    switches of the next tier, so that all uplinks of a switch act as one link of their total ``capacity``.
    """

    def __init__(
        self,
        links: Links,
        pattern: str,
        labels: tuple[IntArray, ...],
        of_nic: IntArray,
        capacity: FloatArray,
        hop: float,
        first_part: int,
    ) -> None:
        self._pattern, self._labels, self.of_nic = pattern, labels, of_nic
        self.part_of_nic, owner = first_part + of_nic, first_part + np.arange(len(capacity))
        self._up = links.add(f"{pattern} up", labels, capacity, hop, owner=owner)
        self._down = links.add(f"{pattern} down", labels, capacity, owner=owner)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
        """Return the links up and down between NICs, -1 for pairs below the same switch."""
        here, there = self.of_nic[source], self.of_nic[target]
        return where(here != there, self._up, here), where(here != there, self._down, there)

    def name(self, switch: int) -> str:
        """Return the name of a switch."""
        return self._pattern.format(*(column[switch] for column in self._labels))

    def edges(self, above: Iterable[str]) -> Iterator[Edge]:
        """Yield the edges from every switch to the one above it, of ``upper_names``, and back."""
        ways = zip(above, self._up.tolist(), self._down.tolist(), strict=False)
        for switch, (upper, up, down) in enumerate(ways):
            yield self.name(switch), upper, up
            yield upper, self.name(switch), down


class LeafWiring:
    """A leaf-spine or fat-tree network.

    The uplinks of a leaf are as wide as its NICs together, divided by the oversubscription; those of a pod are as wide
    as the uplinks of its leaves, divided by the oversubscription of the core. Each tier adds its ``hop`` on the way up.
    """

    def __init__(self, links: Links, fabric: LeafSpine | FatTree, node: IntArray, bandwidth: FloatArray) -> None:
        pattern, labels, leaf = _leaves(fabric, node)
        capacity = np.bincount(leaf, weights=bandwidth) / fabric.oversubscription
        nodes = int(node[-1]) + 1
        self._leaves = Tier(links, pattern, labels, leaf, capacity, fabric.hop, nodes)
        self._pods: Tier | None = None
        if isinstance(fabric, FatTree):
            self._pod_of_leaf = np.arange(len(capacity)) // fabric.leaves_per_pod
            above = np.bincount(self._pod_of_leaf, weights=capacity) / fabric.core_oversubscription
            pods = (np.arange(len(above)),)
            first_pod = nodes + len(capacity)
            self._pods = Tier(links, "pod {}", pods, self._pod_of_leaf[leaf], above, fabric.hop, first_pod)
        self.parts = tuple(tier.part_of_nic for tier in (self._leaves, self._pods) if tier is not None)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return the links up and down of every tier, -1 for tiers that a pair does not need."""
        up, down = self._leaves.columns(source, target)
        if self._pods is None:
            return up, down
        return up, *self._pods.columns(source, target), down

    def vertex(self, nic: int) -> str:
        """Return the name of a NIC's leaf."""
        return self._leaves.name(int(self._leaves.of_nic[nic]))

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from leaf to spine, or from leaf to pod to core, and back."""
        if self._pods is None:
            yield from self._leaves.edges(repeat("spine"))
        else:
            yield from self._leaves.edges(map(self._pods.name, self._pod_of_leaf.tolist()))
            yield from self._pods.edges(repeat("core"))


def _leaves(fabric: LeafSpine | FatTree, node: IntArray) -> tuple[str, tuple[IntArray, ...], IntArray]:
    """Return the name pattern of leaves, their labels, and the leaf of every NIC; ``node`` is the node of every NIC."""
    unit = node // fabric.nodes_per_leaf
    if not fabric.rail_optimized:
        return "leaf {}", (np.arange(unit[-1] + 1),), unit
    rail = np.arange(len(node)) - starts(np.bincount(node))[node]
    rails = np.zeros(unit[-1] + 1, dtype=np.int64)
    np.maximum.at(rails, unit, rail + 1)
    units = np.repeat(np.arange(len(rails)), rails)
    first = starts(rails)
    return "rail {}.{}", (units, np.arange(len(units)) - first[units]), first[unit] + rail


class DragonflyWiring:
    """A dragonfly with minimal routes: to the gateway of the source's group, that of the target's group, the router.

    The gateway of a group to group ``g``, the router with the link between both, is number ``g % routers_per_group`` of
    the group. Groups are complete, even if the last one has fewer nodes.
    """

    parts: tuple[IntArray, ...] = ()

    def __init__(self, links: Links, fabric: Dragonfly, node: IntArray) -> None:
        self._router = node // fabric.nodes_per_router
        routers = int(self._router[-1]) + 1
        self._size = min(fabric.routers_per_group, routers)
        self._groups = -(-routers // self._size)
        a, b = ordered_pairs(self._size)
        base = np.repeat(np.arange(self._groups) * self._size, len(a))
        self._ends = np.tile(a, self._groups) + base, np.tile(b, self._groups) + base
        local, between = fabric.local, fabric.group_link
        self._local = links.add("router {}>{}", self._ends, local.bandwidth, local.latency, local.launch)
        self._group_ends = ordered_pairs(self._groups)
        self._group = links.add("group {}>{}", self._group_ends, between.bandwidth, between.latency, between.launch)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return the links router to gateway, group to group and gateway to router, -1 for those not needed."""
        here, there = self._router[source], self._router[target]
        group, other = here // self._size, there // self._size
        exit_router = np.where(group == other, there, self._gateway(group, other))
        entry_router = np.where(group == other, there, self._gateway(other, group))
        return self._hop(here, exit_router), self._leap(group, other), self._hop(entry_router, there)

    def vertex(self, nic: int) -> str:
        """Return the name of a NIC's router."""
        return f"router {self._router[nic]}"

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between routers of a group, and between gateways of groups."""
        for tail, head, link in zip(*self._ends, self._local, strict=True):
            yield f"router {tail}", f"router {head}", int(link)
        group, other = self._group_ends
        exits, entries = self._gateway(group, other), self._gateway(other, group)
        for tail, head, link in zip(exits, entries, self._group, strict=True):
            yield f"router {tail}", f"router {head}", int(link)

    def _gateway(self, group: IntArray, other: IntArray) -> IntArray:
        """Return the router of ``group`` with the link to ``target_group``."""
        return group * self._size + other % self._size

    def _hop(self, router: IntArray, other: IntArray) -> IntArray:
        """Return the links between routers of one group, -1 for pairs of the same router."""
        size = self._size
        index = router // size * (size * (size - 1)) + pair_index(router % size, other % size, size)
        return where(router != other, self._local, index)

    def _leap(self, group: IntArray, other: IntArray) -> IntArray:
        """Return the links between groups, -1 for pairs of the same group."""
        return where(group != other, self._group, pair_index(group, other, self._groups))


class SwitchingWiring(Protocol):
    """The switches between NICs.

    Attributes
    ----------
    parts
        For every kind of switch that owns links, the switch above each NIC; their numbers follow those of nodes.
    """

    parts: tuple[IntArray, ...]

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return columns of links from NICs ``source`` to NICs ``target``, in order; -1 for links not on the route."""

    def vertex(self, nic: int) -> str:
        """Return the vertex that a NIC is plugged into."""

    def edges(self) -> Iterator[Edge]:
        """Yield the explicit edges."""


class CrossbarWiring:
    """A fabric without links: only NICs limit it."""

    parts: tuple[IntArray, ...] = ()

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return no links."""
        return ()

    def vertex(self, nic: int) -> str:
        """Return the one vertex of the fabric."""
        return "fabric"

    def edges(self) -> Iterator[Edge]:
        """Yield nothing."""
        yield from ()


class NicWiring:
    """NICs and the switches between them; the link out of a NIC has its whole latency.

    The NIC of a device with a PCIe slot is behind the slot, so that traffic crosses the slot too.
    """

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        host: HostWiring,
        fabric: Crossbar | LeafSpine | FatTree | Dragonfly,
    ) -> None:
        self._numbering, self._host = numbering, host
        node = owners(numbering.counts(lambda kind: kind.nics))
        bandwidth = numbering.figures(lambda kind: kind.nic.bandwidth)[node]
        latency = numbering.figures(lambda kind: kind.nic.latency)[node]
        launch = numbering.figures(lambda kind: kind.nic.launch)[node]
        nics = np.arange(len(node))
        self._out = links.add("nic {} out", nics, bandwidth, latency, launch, node)
        self._in = links.add("nic {} in", nics, bandwidth, launch=launch, owner=node)
        self._switches = _switches(links, fabric, node, bandwidth)

    @property
    def parts(self) -> tuple[IntArray, ...]:
        """For every kind of switch that owns links, the switch above each device."""
        return tuple(of_nic[self._numbering.nic] for of_nic in self._switches.parts)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between devices of different nodes."""
        nic, other = self._numbering.nic[source], self._numbering.nic[target]
        return along(
            self._host.slot_out[source],
            self._out[nic],
            *self._switches.columns(nic, other),
            self._in[other],
            self._host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from device (or its slot) to fabric and back, and those of the fabric."""
        for device, nic in enumerate(self._numbering.nic.tolist()):
            yield self._host.vertex(device), self._switches.vertex(nic), int(self._out[nic])
            yield self._switches.vertex(nic), self._host.vertex(device), int(self._in[nic])
        yield from self._switches.edges()


def _switches(
    links: Links, fabric: Crossbar | LeafSpine | FatTree | Dragonfly, node: IntArray, bandwidth: FloatArray
) -> SwitchingWiring:
    match fabric:
        case Crossbar():
            return CrossbarWiring()
        case Dragonfly():
            return DragonflyWiring(links, fabric, node)
        case LeafSpine() | FatTree():
            return LeafWiring(links, fabric, node, bandwidth)


class AxisWiring:
    """Links along one axis of a grid; neighbours on it are ``stride`` devices apart."""

    def __init__(self, links: Links, torus: Torus, name: str, axis: Axis, stride: int) -> None:
        self._axis, self._stride = axis, stride
        self._links = np.full((2, torus.num_devices), -1)
        link, position = torus.link, self.position(np.arange(torus.num_devices))
        for down, sign in enumerate("+-"):
            members = np.flatnonzero(np.isin(position, axis.exits(down)))
            pattern = f"torus {{}} {name}{sign}"
            self._links[down, members] = links.add(pattern, members, link.bandwidth, link.latency, link.launch)

    def position(self, devices: IntArray) -> IntArray:
        """Return the positions of devices on the axis."""
        return devices // self._stride % self._axis.size

    def moved(self, devices: IntArray, position: IntArray) -> IntArray:
        """Return the devices at ``position`` on the axis that are at the place of ``devices`` on all other axes."""
        return devices + (position - self.position(devices)) * self._stride

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes from ``source``, along the axis, to the position of ``target``."""
        walks = self._axis.walks(self.position(source), self.position(target))
        device = self.moved(source[walks.pair], walks.position)
        return Routes(walks.pair, self._links[walks.down, device], walks.share)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between neighbours on the axis."""
        for row, step in zip(self._links, (1, -1), strict=True):
            tails = np.flatnonzero(row >= 0)
            heads = self.moved(tails, (self.position(tails) + step) % self._axis.size)
            for tail, head, link in zip(tails, heads, row[tails], strict=True):
                yield f"device {tail}", f"device {head}", int(link)


class TorusWiring:
    """Links of a torus; routes follow its axes in order.

    Devices are numbered with the last axis fastest. An axis of two devices has one wire each way, with or without
    wraparound.
    """

    def __init__(self, links: Links, torus: Torus) -> None:
        self._axes = [
            AxisWiring(links, torus, name, axis(size, torus.wraparound), prod(torus.shape[number + 1 :]))
            for number, (name, size) in enumerate(zip("xyz", torus.shape, strict=False))
        ]

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices."""
        parts = []
        for wiring in self._axes:
            parts.append(wiring.routes(source, target))
            source = wiring.moved(source, wiring.position(target))
        return joined(parts)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between neighbours on all axes."""
        for wiring in self._axes:
            yield from wiring.edges()


class GraphWiring:
    """Links of a user's graph, one for each edge; devices are the vertices ``device 0``, ``device 1``, ..."""

    def __init__(self, links: Links, graph: Graph, num_devices: int) -> None:
        self._ends = tuple((tail, head) for tail, head, _ in graph.edges)
        often, times = Counter(self._ends).most_common(1)[0]
        if times > 1:
            raise ValueError(f"a graph has each edge once, met {'>'.join(often)} {times} times: make its link wider")
        built = [link for _, _, link in graph.edges]
        bandwidth, latency, launch = (
            np.array([getattr(link, cost) for link in built]) for cost in ("bandwidth", "latency", "launch")
        )
        self._links = links.add("{}>{}", self._ends, bandwidth, latency, launch)
        vertices = {f"device {device}": device for device in range(num_devices)}
        for ends in self._ends:
            for name in ends:
                vertices.setdefault(name, len(vertices))
        self._shortest = Shortest(len(vertices), [(vertices[tail], vertices[head]) for tail, head in self._ends])
        self._num_devices = num_devices

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes of fewest hops; raise ``ValueError`` if devices are not connected."""
        pairs, entry = np.unique(source * self._num_devices + target, return_inverse=True)
        rows = [self._ways(*divmod(pair, self._num_devices)) for pair in pairs.tolist()]
        routes = table_of(rows).routes(entry)
        return routes._replace(link=self._links[routes.link])

    def edges(self) -> Iterator[Edge]:
        """Yield the edges of the graph."""
        for (tail, head), link in zip(self._ends, self._links.tolist(), strict=True):
            yield tail, head, link

    def _ways(self, source: int, target: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ways = self._shortest.ways(source, target)
        if ways is None:
            raise ValueError(f"a graph joins the devices that communicate, met no way from {source} to {target}")
        return ways
