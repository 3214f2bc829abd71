"""The interconnect of a cluster: its links and the routes over them."""

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwise.simulator.interconnect.fabric_wiring import GraphWiring, NicWiring, TorusWiring
from meshwise.simulator.interconnect.host_wiring import HostWiring
from meshwise.simulator.interconnect.links import Links, Parts, number_devices
from meshwise.simulator.interconnect.node_wiring import NodeWiring, build_node_wiring
from meshwise.simulator.interconnect.routes import BoolArray, FloatArray, IntArray, Routes, join_routes
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Graph, Torus

if TYPE_CHECKING:
    import networkx as nx


class Interconnect:
    """The links of a cluster, numbered from 0, and the routes over them.

    Devices of one node send over its network, devices of different nodes over the NIC of the source, the fabric and
    the NIC of the target. A `Torus` or a `Graph` joins devices itself: such a cluster has no links of node networks or
    NICs.

    Attributes
    ----------
    num_links
        Number of links, each one direction.
    bandwidth
        Byte/s of every link, after ``link_speeds`` of the cluster.
    latency
        Seconds that a message pays on entering the link; the latencies of a route add up.
    launch
        Seconds that a collective over the link costs once; of several links the largest counts.
    parts
        The nodes and switches that own links.
    """

    num_links: int
    bandwidth: FloatArray
    latency: FloatArray
    launch: FloatArray
    parts: Parts

    def __init__(self, cluster: Cluster) -> None:
        self._links, self._numbering = Links(), number_devices(cluster)
        is_direct = isinstance(cluster.fabric, Torus | Graph)
        self._host = HostWiring(self._links, self._numbering, trees=not is_direct)
        self._node_wirings: tuple[NodeWiring, ...] = ()
        self._fabric: TorusWiring | GraphWiring | NicWiring
        match cluster.fabric:
            case Torus() as torus:
                self._fabric = TorusWiring(self._links, torus)
            case Graph() as graph:
                self._fabric = GraphWiring(self._links, graph, cluster.num_devices)
            case fabric:
                kinds = range(len(self._numbering.kinds))
                self._node_wirings = tuple(
                    build_node_wiring(self._links, self._numbering, self._host, kind) for kind in kinds
                )
                self._fabric = NicWiring(self._links, self._numbering, self._host, fabric)
        fabric_parts = self._fabric.parts if isinstance(self._fabric, NicWiring) else ()
        self.parts = self._links.parts(np.stack([self._numbering.node, *fabric_parts]))
        self.bandwidth, self.latency, self.launch = self._links.figures()
        self.num_links = len(self.bandwidth)
        self._apply_speeds(cluster.link_speeds)
        # Interconnects are cached and shared by all users of a cluster.
        for figures in (self.bandwidth, self.latency, self.launch):
            figures.setflags(write=False)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes from ``source[i]`` to ``target[i]``; a device needs no link to reach itself.

        Raises
        ------
        ValueError
            If the arrays differ in length, a device does not exist, or a graph has no path.
        """
        source, target = self._check_devices(source), self._check_devices(target)
        if len(source) != len(target):
            raise ValueError(f"every source has a target, met {len(source)} sources and {len(target)} targets")
        place, is_remote = self._numbering, source != target
        parts = []
        if self._node_wirings:
            is_local = is_remote & (place.node[source] == place.node[target])
            is_remote &= ~is_local
            for kind, wiring in enumerate(self._node_wirings):
                parts.append(_select_routes(wiring, is_local & (place.kind[source] == kind), source, target))
        return join_routes([*parts, _select_routes(self._fabric, is_remote, source, target)])

    @cached_property
    def place(self) -> IntArray:
        """For every device a number, equal for devices at the same position of nodes of the same kind."""
        place = self._numbering
        return place.kind * max(kind.devices for kind in place.kinds) + place.local

    def to_host(self, devices: IntArray) -> Routes:
        """Return the routes from ``devices`` to their host memory."""
        return self._host.to_host(self._check_devices(devices))

    def from_host(self, devices: IntArray) -> Routes:
        """Return the routes to ``devices`` from their host memory."""
        return self._host.from_host(self._check_devices(devices))

    def host_of(self, devices: IntArray) -> IntArray:
        """Return the host of every device, numbered through the cluster."""
        return self._numbering.host[self._check_devices(devices)]

    def name(self, link: int) -> str:
        """Return the name of a link, such as ``nic 3 out``."""
        return self._links.name(link)

    def names(self, links: IntArray) -> list[str]:
        """Return the names of many links."""
        return self._links.names(links)

    def link(self, name: str) -> int:
        """Return the number of the link called ``name``; a ``ValueError`` names the most similar one."""
        return self._links.link(name)

    def kind(self, link: int) -> str:
        """Return a link's name without its numbers, such as ``nic out``; ``edge`` in a `Graph`."""
        return self._links.family(link).kind

    def graph(self) -> "nx.DiGraph[str]":
        """Return all links as a graph of named vertices, whose edges have the attribute ``link``, its number.

        Devices that share a link have an edge each for it.
        """
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        for wiring in (self._host, *self._node_wirings, self._fabric):
            for tail, head, link in wiring.edges():
                graph.add_edge(tail, head, link=link)
        return graph

    def _check_devices(self, devices: IntArray) -> IntArray:
        devices = np.asarray(devices, dtype=np.int64)
        count = len(self._numbering.node)
        if len(devices) and not 0 <= devices.min() <= devices.max() < count:
            raise ValueError(f"devices are numbered below {count}, met {devices.min()} to {devices.max()}")
        return devices

    def _apply_speeds(self, speeds: tuple[tuple[str, float], ...]) -> None:
        for name, factor in speeds:
            if not factor > 0:
                raise ValueError(f"link_speeds are (name, factor above 0), met ({name!r}, {factor})")
            self.bandwidth[self.link(name)] *= factor


@lru_cache(maxsize=8)
def interconnect(cluster: Cluster) -> Interconnect:
    """Return the interconnect of ``cluster``.

    Raises
    ------
    ValueError
        If the wires of a node do not connect all of its devices, or a link of ``link_speeds`` does not exist.
    """
    return Interconnect(cluster)


def _select_routes(
    wiring: NodeWiring | TorusWiring | GraphWiring | NicWiring,
    is_selected: BoolArray,
    source: IntArray,
    target: IntArray,
) -> Routes:
    """Return the routes over ``wiring`` of the selected pairs, numbered among all pairs."""
    pairs = np.flatnonzero(is_selected)
    routes = wiring.routes(source[pairs], target[pairs])
    return routes._replace(pair=pairs[routes.pair])
