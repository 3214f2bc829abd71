"""Links between nodes: NICs and switches, or direct links between devices; one class for each fabric.

Leaf switches have a spine above them, or pods and a core. A dragonfly has groups of routers, with all-to-all links in
every group and among groups. A torus joins devices directly on a grid; a graph is whatever the user draws.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from meshwise.simulator.interconnect.links import Edge, Links, Numbering, owners, starts
from meshwise.simulator.interconnect.routes import (
    Axis,
    FloatArray,
    IntArray,
    Routes,
    ShortestPaths,
    build_axis,
    chain_links,
    expand_routes,
    join_routes,
    ordered_pairs,
    pair_index,
    pick_links,
)
from meshwise.simulator.machine.topology import Crossbar, Dragonfly, FatTree, Graph, LeafSpine, Torus

if TYPE_CHECKING:
    from meshwise.simulator.interconnect.host_wiring import HostWiring


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
        switch_of_nic: IntArray,
        capacity: FloatArray,
        hop: float,
        first_part: int,
    ) -> None:
        self._pattern, self._labels, self.switch_of_nic = pattern, labels, switch_of_nic
        self.part_of_nic, owner = first_part + switch_of_nic, first_part + np.arange(len(capacity))
        self._uplinks = links.add_links(f"{pattern} up", labels, capacity, hop, owner=owner)
        self._downlinks = links.add_links(f"{pattern} down", labels, capacity, owner=owner)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
        """Return the links up and down between NICs, -1 for pairs below the same switch."""
        source_switch, target_switch = self.switch_of_nic[source], self.switch_of_nic[target]
        return pick_links(source_switch != target_switch, self._uplinks, source_switch), pick_links(
            source_switch != target_switch, self._downlinks, target_switch
        )

    def name(self, switch: int) -> str:
        """Return the name of a switch."""
        return self._pattern.format(*(column[switch] for column in self._labels))

    def edges(self, upper_names: Iterable[str]) -> Iterator[Edge]:
        """Yield the edges from every switch to the one above it, of ``upper_names``, and back."""
        rows = zip(upper_names, self._uplinks.tolist(), self._downlinks.tolist(), strict=False)
        for switch, (upper_name, uplink, downlink) in enumerate(rows):
            yield self.name(switch), upper_name, uplink
            yield upper_name, self.name(switch), downlink


class TierWiring:
    """Tiers of switches: none in a crossbar, which only NICs limit, leaves in a leaf-spine network, pods in a fat tree.

    The uplinks of a leaf are as wide as its NICs together, divided by the oversubscription; those of a pod are as wide
    as the uplinks of its leaves, divided by the oversubscription of the core. Each tier adds its ``hop`` on the way up.
    """

    def __init__(
        self, links: Links, fabric: Crossbar | LeafSpine | FatTree, node: IntArray, bandwidth: FloatArray
    ) -> None:
        self._tiers: list[Tier] = []
        self._upper_names: list[Iterable[str]] = []
        if not isinstance(fabric, Crossbar):
            pattern, labels, leaf = _number_leaves(fabric, node)
            capacity = np.bincount(leaf, weights=bandwidth) / fabric.oversubscription
            nodes = int(node[-1]) + 1
            self._tiers.append(Tier(links, pattern, labels, leaf, capacity, fabric.hop, nodes))
            self._upper_names.append(repeat("spine"))
        if isinstance(fabric, FatTree):
            pod_of_leaf = np.arange(len(capacity)) // fabric.leaves_per_pod
            pod_capacity = np.bincount(pod_of_leaf, weights=capacity) / fabric.core_oversubscription
            pods, first_pod = (np.arange(len(pod_capacity)),), nodes + len(capacity)
            self._tiers.append(Tier(links, "pod {}", pods, pod_of_leaf[leaf], pod_capacity, fabric.hop, first_pod))
            self._upper_names = [list(map(self._tiers[1].name, pod_of_leaf.tolist())), repeat("core")]
        self.parts = tuple(tier.part_of_nic for tier in self._tiers)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return the links up and down of every tier, -1 for tiers that a pair does not need."""
        pairs = [tier.columns(source, target) for tier in self._tiers]
        return *(uplink for uplink, _ in pairs), *(downlink for _, downlink in reversed(pairs))

    def vertex(self, nic: int) -> str:
        """Return the name of a NIC's leaf, or of the whole crossbar."""
        return self._tiers[0].name(int(self._tiers[0].switch_of_nic[nic])) if self._tiers else "fabric"

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from leaf to spine, or from leaf to pod to core, and back."""
        for tier, upper_names in zip(self._tiers, self._upper_names, strict=True):
            yield from tier.edges(upper_names)


def _number_leaves(fabric: LeafSpine | FatTree, node: IntArray) -> tuple[str, tuple[IntArray, ...], IntArray]:
    """Return the name pattern of leaves, their labels, and the leaf of every NIC; ``node`` is the node of every NIC."""
    unit = node // fabric.nodes_per_leaf
    if not fabric.rail_optimized:
        return "leaf {}", (np.arange(unit[-1] + 1),), unit
    rail = np.arange(len(node)) - starts(np.bincount(node))[node]
    rails = np.zeros(unit[-1] + 1, dtype=np.int64)
    np.maximum.at(rails, unit, rail + 1)
    units = np.repeat(np.arange(len(rails)), rails)
    first_rail = starts(rails)
    return "rail {}.{}", (units, np.arange(len(units)) - first_rail[units]), first_rail[unit] + rail


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
        local_link, group_link = fabric.local, fabric.group_link
        self._local = links.add_links(
            "router {}>{}", self._ends, local_link.bandwidth, local_link.latency, local_link.launch
        )
        self._group_ends = ordered_pairs(self._groups)
        self._group = links.add_links(
            "group {}>{}", self._group_ends, group_link.bandwidth, group_link.latency, group_link.launch
        )

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return the links router to gateway, group to group and gateway to router, -1 for those not needed."""
        source_router, target_router = self._router[source], self._router[target]
        source_group, target_group = source_router // self._size, target_router // self._size
        exit_router = np.where(source_group == target_group, target_router, self._gateway(source_group, target_group))
        entry_router = np.where(source_group == target_group, target_router, self._gateway(target_group, source_group))
        return (
            self._hop(source_router, exit_router),
            self._leap(source_group, target_group),
            self._hop(entry_router, target_router),
        )

    def vertex(self, nic: int) -> str:
        """Return the name of a NIC's router."""
        return f"router {self._router[nic]}"

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between routers of a group, and between gateways of groups."""
        for tail, head, link in zip(*self._ends, self._local, strict=True):
            yield f"router {tail}", f"router {head}", int(link)
        source_group, target_group = self._group_ends
        exits, entries = self._gateway(source_group, target_group), self._gateway(target_group, source_group)
        for tail, head, link in zip(exits, entries, self._group, strict=True):
            yield f"router {tail}", f"router {head}", int(link)

    def _gateway(self, group: IntArray, target_group: IntArray) -> IntArray:
        """Return the router of ``group`` with the link to ``target_group``."""
        return group * self._size + target_group % self._size

    def _hop(self, router: IntArray, target_router: IntArray) -> IntArray:
        """Return the links between routers of one group, -1 for pairs of the same router."""
        size = self._size
        index = router // size * (size * (size - 1)) + pair_index(router % size, target_router % size, size)
        return pick_links(router != target_router, self._local, index)

    def _leap(self, group: IntArray, target_group: IntArray) -> IntArray:
        """Return the links between groups, -1 for pairs of the same group."""
        return pick_links(group != target_group, self._group, pair_index(group, target_group, self._groups))


class NicWiring:
    """NICs and the switches between them; the link out of a NIC has its whole latency.

    The NIC of a device with a PCIe slot is behind the slot, so that traffic crosses the slot too.
    """

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        host: "HostWiring",
        fabric: Crossbar | LeafSpine | FatTree | Dragonfly,
    ) -> None:
        self._numbering, self._host = numbering, host
        node = owners(numbering.counts(lambda kind: kind.nics))
        bandwidth = numbering.figures(lambda kind: kind.nic.bandwidth)[node]
        latency = numbering.figures(lambda kind: kind.nic.latency)[node]
        launch = numbering.figures(lambda kind: kind.nic.launch)[node]
        nics = np.arange(len(node))
        self._out_links = links.add_links("nic {} out", nics, bandwidth, latency, launch, node)
        self._in_links = links.add_links("nic {} in", nics, bandwidth, launch=launch, owner=node)
        self._switches = (
            DragonflyWiring(links, fabric, node)
            if isinstance(fabric, Dragonfly)
            else TierWiring(links, fabric, node, bandwidth)
        )

    @property
    def parts(self) -> tuple[IntArray, ...]:
        """For every kind of switch that owns links, the switch above each device."""
        return tuple(nic_switches[self._numbering.nic] for nic_switches in self._switches.parts)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between devices of different nodes."""
        source_nic, target_nic = self._numbering.nic[source], self._numbering.nic[target]
        return chain_links(
            self._host.slot_out[source],
            self._out_links[source_nic],
            *self._switches.columns(source_nic, target_nic),
            self._in_links[target_nic],
            self._host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from device (or its slot) to fabric and back, and those of the fabric."""
        for device, nic in enumerate(self._numbering.nic.tolist()):
            yield self._host.vertex(device), self._switches.vertex(nic), int(self._out_links[nic])
            yield self._switches.vertex(nic), self._host.vertex(device), int(self._in_links[nic])
        yield from self._switches.edges()


class AxisWiring:
    """Links along one axis of a grid; neighbours on it are ``stride`` devices apart."""

    def __init__(self, links: Links, torus: Torus, name: str, axis: Axis, stride: int) -> None:
        self._axis, self._stride = axis, stride
        self._links = np.full((2, torus.num_devices), -1)
        link, position = torus.link, self.position(np.arange(torus.num_devices))
        for direction, sign in enumerate("+-"):
            members = np.flatnonzero(np.isin(position, axis.exits(direction)))
            pattern = f"torus {{}} {name}{sign}"
            self._links[direction, members] = links.add_links(
                pattern, members, link.bandwidth, link.latency, link.launch
            )

    def position(self, devices: IntArray) -> IntArray:
        """Return the positions of devices on the axis."""
        return devices // self._stride % self._axis.size

    def move_devices(self, devices: IntArray, position: IntArray) -> IntArray:
        """Return the devices at ``position`` on the axis that are at the place of ``devices`` on all other axes."""
        return devices + (position - self.position(devices)) * self._stride

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes from ``source``, along the axis, to the position of ``target``."""
        walks = self._axis.walks(self.position(source), self.position(target))
        device = self.move_devices(source[walks.pair], walks.position)
        return Routes(walks.pair, self._links[walks.direction, device], walks.share)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between neighbours on the axis."""
        for row, step in zip(self._links, (1, -1), strict=True):
            tails = np.flatnonzero(row >= 0)
            heads = self.move_devices(tails, (self.position(tails) + step) % self._axis.size)
            for tail, head, link in zip(tails, heads, row[tails], strict=True):
                yield f"device {tail}", f"device {head}", int(link)


class TorusWiring:
    """Links of a torus; routes follow its axes in order.

    Devices are numbered with the last axis fastest. An axis of two devices has one wire each way, with or without
    wraparound.
    """

    def __init__(self, links: Links, torus: Torus) -> None:
        self._axes = [
            AxisWiring(links, torus, name, build_axis(size, torus.wraparound), prod(torus.shape[number + 1 :]))
            for number, (name, size) in enumerate(zip("xyz", torus.shape, strict=False))
        ]

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices."""
        parts = []
        for wiring in self._axes:
            parts.append(wiring.routes(source, target))
            source = wiring.move_devices(source, wiring.position(target))
        return join_routes(parts)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between neighbours on all axes."""
        for wiring in self._axes:
            yield from wiring.edges()


class GraphWiring:
    """Links of a user's graph, one for each edge; devices are the vertices ``device 0``, ``device 1``, ..."""

    def __init__(self, links: Links, graph: Graph, num_devices: int) -> None:
        self._ends = tuple((tail, head) for tail, head, _ in graph.edges)
        repeated_ends, num_repeats = Counter(self._ends).most_common(1)[0]
        if num_repeats > 1:
            raise ValueError(
                f"a graph has each edge once, met {'>'.join(repeated_ends)} {num_repeats} times: make its link wider"
            )
        edge_links = [link for _, _, link in graph.edges]
        bandwidth, latency, launch = (
            np.array([getattr(link, cost) for link in edge_links]) for cost in ("bandwidth", "latency", "launch")
        )
        self._links = links.add_links("{}>{}", self._ends, bandwidth, latency, launch)
        vertices = {f"device {device}": device for device in range(num_devices)}
        for ends in self._ends:
            for name in ends:
                vertices.setdefault(name, len(vertices))
        self._paths = ShortestPaths(len(vertices), [(vertices[tail], vertices[head]) for tail, head in self._ends])
        self._num_devices = num_devices

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes of fewest hops; raise ``ValueError`` if devices are not connected."""
        pairs, entry = np.unique(source * self._num_devices + target, return_inverse=True)
        rows = [self._find_paths(*divmod(pair, self._num_devices)) for pair in pairs.tolist()]
        routes = expand_routes(rows, entry)
        return routes._replace(link=self._links[routes.link])

    def edges(self) -> Iterator[Edge]:
        """Yield the edges of the graph."""
        for (tail, head), link in zip(self._ends, self._links.tolist(), strict=True):
            yield tail, head, link

    def _find_paths(self, source: int, target: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        paths = self._paths.find_paths(source, target)
        if paths is None:
            raise ValueError(f"a graph joins the devices that communicate, met no way from {source} to {target}")
        return paths
