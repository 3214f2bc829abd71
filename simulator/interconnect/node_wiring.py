"""Links inside nodes, and the routes between devices of one node: one class a kind of network.

Devices share a non-blocking switch, are wired in a ring or to each other, or reach each other over PCIe switches and
sockets. Along an axis of a ring or a torus bytes go the short way round, an exact half by both ways.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from meshwise.simulator.interconnect.host_wiring import HostWiring
from meshwise.simulator.interconnect.links import Edge, Links, Numbering
from meshwise.simulator.interconnect.routes import (
    FloatArray,
    IntArray,
    Routes,
    Shortest,
    along,
    expanded,
    ordered_pairs,
    pair_index,
    table_of,
    where,
)
from meshwise.simulator.machine.topology import Link, Mesh, PcieTree, Ring, Switch


class Ports:
    """A port out, which has the whole latency, and a port in for every device of a kind of node."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self.devices = numbering.devices_of(kind)
        self._rank = numbering.rank
        node = numbering.node[self.devices]
        self._out = links.add("device {} out", self.devices, link.bandwidth, link.latency, link.launch, node)
        self._in = links.add("device {} in", self.devices, link.bandwidth, launch=link.launch, owner=node)

    def out(self, devices: IntArray) -> IntArray:
        """Return the port out of every device."""
        return self._out[self._rank[devices]]

    def into(self, devices: IntArray) -> IntArray:
        """Return the port into every device."""
        return self._in[self._rank[devices]]


class SwitchWiring:
    """The ports of all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._node = numbering.node
        self._ports = Ports(links, numbering, kind, link)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return port out, port in."""
        return along(self._ports.out(source), self._ports.into(target))

    def edges(self) -> Iterator[Edge]:
        """Yield device to switch and switch to device."""
        devices = self._ports.devices
        for device, out, into in zip(devices, self._ports.out(devices), self._ports.into(devices), strict=True):
            yield f"device {device}", f"node {self._node[device]} switch", int(out)
            yield f"node {self._node[device]} switch", f"device {device}", int(into)


class Wires:
    """Wire ``i`` leads from part ``tail[i]`` to part ``head[i]`` of every node of a kind.

    ``width[i]`` is how many links it bundles, 1 where it is not given.
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
        added = links.add(pattern, labels, bandwidth, link.latency, link.launch, labels[0])
        self._links = added.reshape(len(nodes), count)

    def of(self, devices: IntArray, wires: IntArray) -> IntArray:
        """Return for every device the link that is a wire of its node."""
        return self._links[self._numbering.node_rank[self._numbering.node[devices]], wires]

    def between_devices(self) -> Iterator[Edge]:
        """Yield the explicit edges where the parts are devices."""
        devices = self._numbering.devices_of(self._kind).reshape(len(self._links), -1)
        for members, row in zip(devices, self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"device {members[tail]}", f"device {members[head]}", int(link)

    def between(self, part: str) -> Iterator[Edge]:
        """Yield the explicit edges where the parts are numbered in their node and called ``part``."""
        for node, row in zip(self._numbering.nodes_of(self._kind), self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"node {node} {part} {tail}", f"node {node} {part} {head}", int(link)


class Walks(NamedTuple):
    """Steps sorted by pair: a ``share`` of the pair's bytes leaves ``position``, up or (``down`` is 1) down."""

    pair: IntArray
    position: IntArray
    down: IntArray
    share: FloatArray


class Axis(NamedTuple):
    """Positions in a row, ``closed`` to a ring or not."""

    size: int
    closed: bool

    def exits(self, down: int) -> IntArray:
        """Return the positions from which a link leads up the axis, or (``down`` is 1) down."""
        return np.arange(self.size) if self.closed else np.arange(down, self.size - 1 + down)

    def walks(self, source: IntArray, target: IntArray) -> Walks:
        """Return the steps from every source position to its target.

        >>> there = axis(4).walks(np.array([3, 0]), np.array([0, 2]))
        >>> there.position.tolist(), there.down.tolist(), there.share.tolist()
        ([3, 0, 1, 0, 3], [0, 0, 0, 1, 1], [1.0, 0.5, 0.5, 0.5, 0.5])
        """
        hops = np.stack([target - source, source - target], axis=1)
        if self.closed:
            hops %= self.size
            hops[hops > hops[:, ::-1]] = 0
        hops = np.maximum(hops, 0)
        share = 1.0 / np.maximum(np.count_nonzero(hops, axis=1), 1)
        way, step = expanded(hops.ravel())
        pair, down = np.divmod(way, 2)
        return Walks(pair, (source[pair] + np.where(down, -step, step)) % self.size, down, share[pair])


def axis(size: int, wraparound: bool = True) -> Axis:
    """Return the axis of ``size`` positions; two joined by one wire are no ring."""
    return Axis(size, wraparound and size > 2)


class RingWiring:
    """A link from each device to the next and to the one before, in all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._local, self._axis = numbering.local, axis(numbering.kinds[kind].devices)
        up, down = self._axis.exits(0), self._axis.exits(1)
        ends = np.concatenate([up, down]), np.concatenate([up + 1, down - 1]) % self._axis.size
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", ends, link)
        self._wire = np.zeros((2, self._axis.size), dtype=np.int64)
        self._wire[0, up] = np.arange(len(up))
        self._wire[1, down] = np.arange(len(up), len(ends[0]))

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the short way round."""
        walks = self._axis.walks(self._local[source], self._local[target])
        link = self._wires.of(source[walks.pair], self._wire[walks.down, walks.position])
        return Routes(walks.pair, link, walks.share)

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()


class FullMeshWiring:
    """A link between every two devices."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._local, self._size = numbering.local, numbering.kinds[kind].devices
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", ordered_pairs(self._size), link)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the one link."""
        return along(self._wires.of(source, pair_index(self._local[source], self._local[target], self._size)))

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()


class MeshWiring:
    """Links between some pairs of devices; the others send through them, by ways found when first asked for."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, mesh: Mesh) -> None:
        self._local, self._size = numbering.local, numbering.kinds[kind].devices
        width = _widths(mesh, self._size)
        tail, head = (np.array(column, dtype=np.int64) for column in zip(*width, strict=True))
        count = np.array(list(width.values()), dtype=np.float64)
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", (tail, head), mesh.link, count)
        self._shortest = _joined(tuple(width), self._size)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the ways of fewest hops."""
        wanted, entry = np.unique(self._local[source] * self._size + self._local[target], return_inverse=True)
        ways = (self._shortest.ways(*divmod(pair, self._size)) for pair in wanted.tolist())
        local = table_of([way for way in ways if way is not None]).routes(entry)
        return local._replace(link=self._wires.of(source[local.pair], local.link))

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()


def _widths(mesh: Mesh, size: int) -> dict[tuple[int, int], int]:
    """Return how many links lead from one device to another, in order of the two."""
    width: dict[tuple[int, int], int] = {}
    for a, b, count in mesh.pairs:
        if max(a, b) >= size:
            raise ValueError(f"mesh pairs are devices of the node, below {size}, met ({a}, {b})")
        for ends in ((a, b), (b, a)):
            width[ends] = width.get(ends, 0) + count
    return dict(sorted(width.items()))


def _joined(wires: tuple[tuple[int, int], ...], size: int) -> Shortest:
    """Return the ways over ``wires``, each of which there is in both directions; they join all devices."""
    shortest = Shortest(size, wires)
    reached = shortest.distances(0)
    missing = next((device for device in range(size) if device not in reached), None)
    if missing is not None:
        raise ValueError(f"a mesh joins all {size} devices of its node, met no way from 0 to {missing}")
    return shortest


class PcieTreeWiring:
    """A port for every device, the uplinks of switches, and a link between every two sockets of a node.

    The uplinks, and the slots where the host has them, are those that copies to the host cross.
    """

    def __init__(self, links: Links, numbering: Numbering, kind: int, tree: PcieTree, host: HostWiring) -> None:
        self._numbering, self._host, self._per_socket = numbering, host, tree.switches_per_socket
        self._ports = Ports(links, numbering, kind, tree.link)
        self._sockets = int(self._socket(self._ports.devices[-1:])[0]) + 1
        pattern = "node {} socket {}>{}"
        self._wires = Wires(links, numbering, kind, pattern, ordered_pairs(self._sockets), tree.socket)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return slot and port out, uplink, socket to socket, uplink, port and slot in: what is on the way."""
        host, here, there = self._host, self._socket(source), self._socket(target)
        leaves_switch, leaves_socket = host.switch[source] != host.switch[target], here != there
        socket = np.full(len(source), -1)
        wires = pair_index(here, there, self._sockets)[leaves_socket]
        socket[leaves_socket] = self._wires.of(source[leaves_socket], wires)
        return along(
            host.slot_out[source],
            self._ports.out(source),
            where(leaves_switch, host.uplink_out, source),
            socket,
            where(leaves_switch, host.uplink_in, target),
            self._ports.into(target),
            host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield device (or its slot) to switch to socket to socket, and back."""
        host, devices = self._host, self._ports.devices
        sockets = self._socket(devices)
        for device, socket, out, into in zip(
            devices, sockets, self._ports.out(devices), self._ports.into(devices), strict=True
        ):
            lower, switch = host.vertex(device), f"pcie switch {host.switch[device]}"
            upper = f"node {self._numbering.node[device]} socket {socket}"
            yield lower, switch, int(out)
            yield switch, lower, int(into)
            yield switch, upper, int(host.uplink_out[device])
            yield upper, switch, int(host.uplink_in[device])
        yield from self._wires.between("socket")

    def _socket(self, devices: IntArray) -> IntArray:
        """Return the socket of every device, counted in its node."""
        first = devices - self._numbering.local[devices]
        switch: IntArray = self._host.switch[devices] - self._host.switch[first]
        return switch // self._per_socket


class NodeWiring(Protocol):
    """The links inside all nodes of one kind."""

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices; the two of each pair are in one node of the kind."""

    def edges(self) -> Iterator[Edge]:
        """Yield the explicit edges."""


def node_wiring(links: Links, numbering: Numbering, host: HostWiring, kind: int) -> NodeWiring:
    """Return the links inside the nodes of a kind, added to ``links``."""
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
