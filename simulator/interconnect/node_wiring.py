"""Links inside nodes, and the routes between devices of one node: one class for each kind of network.

Devices share a non-blocking switch, are wired in a ring or to each other, or reach each other over PCIe switches and
sockets.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwise.simulator.interconnect.links import Edge, Links, Numbering
from meshwise.simulator.interconnect.routes import (
    FloatArray,
    IntArray,
    Routes,
    ShortestPaths,
    build_axis,
    chain_links,
    expand_routes,
    ordered_pairs,
    pair_index,
    pick_links,
)
from meshwise.simulator.machine.topology import Link, Mesh, PcieTree, Ring, Switch

if TYPE_CHECKING:
    from meshwise.simulator.interconnect.host_wiring import HostWiring


class Ports:
    """A port out of and a port into every device of a kind of node; the port out has the whole latency."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self.devices = numbering.devices_of(kind)
        self._rank, self._node = numbering.rank, numbering.node[self.devices]
        figures = link.bandwidth, link.latency, link.launch
        self._out_links = links.add_links("device {} out", self.devices, *figures, self._node)
        self._in_links = links.add_links(
            "device {} in", self.devices, link.bandwidth, launch=link.launch, owner=self._node
        )

    def rows(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return device, node, port out and port in of every device."""
        return self.devices.tolist(), self._node.tolist(), self._out_links.tolist(), self._in_links.tolist()

    def out_links(self, devices: IntArray) -> IntArray:
        """Return the port out of every device."""
        return self._out_links[self._rank[devices]]

    def in_links(self, devices: IntArray) -> IntArray:
        """Return the port into every device."""
        return self._in_links[self._rank[devices]]


class SwitchWiring(Ports):
    """The ports of all nodes of one kind, into a switch."""

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes: the source's port out, the target's port in."""
        return chain_links(self.out_links(source), self.in_links(target))

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from devices to the switch and back."""
        for device, node, out_link, in_link in zip(*self.rows(), strict=True):
            yield f"device {device}", f"node {node} switch", out_link
            yield f"node {node} switch", f"device {device}", in_link


class Wires:
    """Wires of all nodes of a kind: wire ``i`` leads from part ``tail[i]`` to part ``head[i]`` of a node.

    ``width[i]`` is the number of links that it bundles, by default 1.
    """

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        kind: int,
        pattern: str,
        ends: tuple[IntArray, IntArray],
        link: Link,
        width: FloatArray | None = None,
    ) -> None:
        self._numbering, self._kind = numbering, kind
        self.tail, self.head = ends
        nodes, count = numbering.nodes_of(kind), len(self.tail)
        labels = np.repeat(nodes, count), np.tile(self.tail, len(nodes)), np.tile(self.head, len(nodes))
        bandwidth = link.bandwidth * np.tile(np.ones(count) if width is None else width, len(nodes))
        new_links = links.add_links(pattern, labels, bandwidth, link.latency, link.launch, labels[0])
        self._links = new_links.reshape(len(nodes), count)

    def find_links(self, devices: IntArray, wires: IntArray) -> IntArray:
        """Return the links of ``wires[i]`` in the node of ``devices[i]``."""
        return self._links[self._numbering.node_rank[self._numbering.node[devices]], wires]

    def list_device_edges(self) -> Iterator[Edge]:
        """Yield the explicit edges of wires between devices."""
        devices = self._numbering.devices_of(self._kind).reshape(len(self._links), -1)
        for members, row in zip(devices, self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"device {members[tail]}", f"device {members[head]}", int(link)

    def list_part_edges(self, part: str) -> Iterator[Edge]:
        """Yield the explicit edges of wires between parts called ``part``, numbered inside their node."""
        for node, row in zip(self._numbering.nodes_of(self._kind), self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"node {node} {part} {tail}", f"node {node} {part} {head}", int(link)


class _WiredDevices:
    """Devices of all nodes of a kind that wires join directly."""

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        kind: int,
        link: Link,
        ends: tuple[IntArray, IntArray],
        width: FloatArray | None = None,
    ) -> None:
        self._local, self._size = numbering.local, numbering.kinds[kind].devices
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", ends, link, width)

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.list_device_edges()


class RingWiring(_WiredDevices):
    """Links from each device to the next and to the previous one, in all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._axis = build_axis(numbering.kinds[kind].devices)
        up_positions, down_positions = self._axis.exits(0), self._axis.exits(1)
        tail = np.concatenate([up_positions, down_positions])
        head = np.concatenate([up_positions + 1, down_positions - 1]) % self._axis.size
        super().__init__(links, numbering, kind, link, (tail, head))
        self._wire = np.zeros((2, self._axis.size), dtype=np.int64)
        self._wire[0, up_positions] = np.arange(len(up_positions))
        self._wire[1, down_positions] = np.arange(len(up_positions), len(tail))

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes in the shorter direction."""
        walks = self._axis.walks(self._local[source], self._local[target])
        link = self._wires.find_links(source[walks.pair], self._wire[walks.direction, walks.position])
        return Routes(walks.pair, link, walks.share)


class FullMeshWiring(_WiredDevices):
    """Links between every two devices of a node, in all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        super().__init__(links, numbering, kind, link, ordered_pairs(numbering.kinds[kind].devices))

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes, of one link each."""
        return chain_links(
            self._wires.find_links(source, pair_index(self._local[source], self._local[target], self._size))
        )


class MeshWiring(_WiredDevices):
    """Links between some pairs of devices; other pairs send over them, by routes found at their first use."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, mesh: Mesh) -> None:
        size = numbering.kinds[kind].devices
        width = _count_wires(mesh, size)
        tail, head = (np.array(column, dtype=np.int64) for column in zip(*width, strict=True))
        count = np.array(list(width.values()), dtype=np.float64)
        super().__init__(links, numbering, kind, mesh.link, (tail, head), count)
        self._paths = _build_paths(tuple(width), size)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes of fewest hops."""
        # Routes are the same in every node, so that each pair of positions is looked up once.
        pairs, entry = np.unique(self._local[source] * self._size + self._local[target], return_inverse=True)
        paths = (self._paths.find_paths(*divmod(pair, self._size)) for pair in pairs.tolist())
        local = expand_routes([path for path in paths if path is not None], entry)
        return local._replace(link=self._wires.find_links(source[local.pair], local.link))


def _count_wires(mesh: Mesh, size: int) -> dict[tuple[int, int], int]:
    """Return the number of links from one device to another, in order of both."""
    width: dict[tuple[int, int], int] = {}
    for a, b, count in mesh.pairs:
        if max(a, b) >= size:
            raise ValueError(f"mesh pairs are devices of the node, below {size}, met ({a}, {b})")
        for ends in ((a, b), (b, a)):
            width[ends] = width.get(ends, 0) + count
    return dict(sorted(width.items()))


def _build_paths(wires: tuple[tuple[int, int], ...], size: int) -> ShortestPaths:
    """Return the shortest paths over ``wires``, given in both directions; raise if they do not connect all devices."""
    paths = ShortestPaths(size, wires)
    distances = paths.distances(0)
    missing_device = next((device for device in range(size) if device not in distances), None)
    if missing_device is not None:
        raise ValueError(f"a mesh joins all {size} devices of its node, met no way from 0 to {missing_device}")
    return paths


class PcieTreeWiring:
    """Ports of devices, uplinks of switches, and links between every two sockets of a node.

    Uplinks, and slots if the host has them, are shared with copies to the host.
    """

    def __init__(self, links: Links, numbering: Numbering, kind: int, tree: PcieTree, host: "HostWiring") -> None:
        self._numbering, self._host, self._per_socket = numbering, host, tree.switches_per_socket
        self._ports = Ports(links, numbering, kind, tree.link)
        self._sockets = int(self._find_sockets(self._ports.devices[-1:])[0]) + 1
        pattern = "node {} socket {}>{}"
        self._wires = Wires(links, numbering, kind, pattern, ordered_pairs(self._sockets), tree.socket)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes: slot and port out, uplink, socket to socket, uplink, port and slot in, where needed."""
        host, source_socket, target_socket = self._host, self._find_sockets(source), self._find_sockets(target)
        leaves_switch, leaves_socket = host.switch[source] != host.switch[target], source_socket != target_socket
        socket = np.full(len(source), -1)
        wires = pair_index(source_socket, target_socket, self._sockets)[leaves_socket]
        socket[leaves_socket] = self._wires.find_links(source[leaves_socket], wires)
        return chain_links(
            host.slot_out[source],
            self._ports.out_links(source),
            pick_links(leaves_switch, host.uplink_out, source),
            socket,
            pick_links(leaves_switch, host.uplink_in, target),
            self._ports.in_links(target),
            host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield the edges from device (or its slot) to switch to socket to socket, and back."""
        host, sockets = self._host, self._find_sockets(self._ports.devices)
        for device, node, out_link, in_link, socket in zip(*self._ports.rows(), sockets, strict=True):
            lower_vertex, switch = host.vertex(device), f"pcie switch {host.switch[device]}"
            upper_vertex = f"node {node} socket {socket}"
            yield lower_vertex, switch, out_link
            yield switch, lower_vertex, in_link
            yield switch, upper_vertex, int(host.uplink_out[device])
            yield upper_vertex, switch, int(host.uplink_in[device])
        yield from self._wires.list_part_edges("socket")

    def _find_sockets(self, devices: IntArray) -> IntArray:
        """Return the socket of every device, numbered inside its node."""
        first_device = devices - self._numbering.local[devices]
        switch: IntArray = self._host.switch[devices] - self._host.switch[first_device]
        return switch // self._per_socket


class NodeWiring(Protocol):
    """The links inside all nodes of one kind."""

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices; both of a pair are in one node of the kind."""

    def edges(self) -> Iterator[Edge]:
        """Yield the explicit edges."""


def build_node_wiring(links: Links, numbering: Numbering, host: "HostWiring", kind: int) -> NodeWiring:
    """Add the links inside the nodes of a kind to ``links``, and return their wiring."""
    match numbering.kinds[kind].network:
        case Switch(link=link):
            return SwitchWiring(links, numbering, kind, link)
        case Mesh(link=link, pairs=()):
            return FullMeshWiring(links, numbering, kind, link)
        case Mesh() as mesh:
            return MeshWiring(links, numbering, kind, mesh)
        case Ring(link=link):
            return RingWiring(links, numbering, kind, link)
        case PcieTree() as tree:
            return PcieTreeWiring(links, numbering, kind, tree, host)
