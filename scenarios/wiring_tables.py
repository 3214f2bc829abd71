"""From the tables of a cluster file to the networks inside and between its nodes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from scenarios.fabric_schema import (
    CrossbarFabric,
    DragonflyFabric,
    FabricTable,
    FatTreeFabric,
    GraphFabric,
    LeafSpineFabric,
    LinkTable,
    MeshNetwork,
    NodeNetworkTable,
    PcieNetwork,
    RingNetwork,
    TorusFabric,
)
from simulator.interconnect.kinds import (
    Crossbar,
    Dragonfly,
    Fabric,
    FatTree,
    Graph,
    LeafSpine,
    Mesh,
    NodeNetwork,
    PcieTree,
    Ring,
    Switch,
    Torus,
)
from simulator.link import Link

MAX_FULL_MESH = 256
"""Devices that are wired each to each; more would be millions of links."""


def to_link(table: LinkTable) -> Link:
    """Return the link that a table states."""
    return Link(table.latency, table.bandwidth, table.launch)


def to_network(table: NodeNetworkTable, devices: int) -> NodeNetwork:
    """Return the network inside a node of ``devices``; ``ValueError`` where it does not reach them all."""
    link = to_link(table)
    if isinstance(table, RingNetwork):
        return Ring(link)
    if isinstance(table, PcieNetwork):
        return PcieTree(link, table.devices_per_switch, table.switches_per_socket, to_link(table.socket))
    if isinstance(table, MeshNetwork):
        mesh = Mesh(link, tuple(table.pairs))
        check_mesh(mesh, devices)
        return mesh
    return Switch(link, table.reduces)


def to_fabric(table: FabricTable, devices: int) -> Fabric:
    """Return the fabric that a table states; ``ValueError`` where its devices do not reach each other."""
    if isinstance(table, CrossbarFabric):
        return Crossbar()
    if isinstance(table, LeafSpineFabric):
        return LeafSpine(**_fields(table))
    if isinstance(table, FatTreeFabric):
        return FatTree(**_fields(table))
    if isinstance(table, DragonflyFabric):
        links = {"local": to_link(table.local), "group_link": to_link(table.group_link)}
        return Dragonfly(**_fields(table) | links)
    if isinstance(table, TorusFabric):
        return Torus(tuple(table.shape), to_link(table), table.wraparound)
    graph = Graph(tuple(_edges(table)))
    _check_graph(graph, devices)
    return graph


def _fields(table: Any) -> dict[str, Any]:
    return {name: value for name, value in table if name != "kind"}


def _edges(table: GraphFabric) -> Iterator[tuple[str, str, Link]]:
    for edge in table.edges:
        ends: dict[str, Any] = dict(edge)
        link = to_link(edge)
        yield ends["from"], ends["to"], link
        if ends["both"]:
            yield ends["to"], ends["from"], link


def check_mesh(mesh: Mesh, devices: int) -> None:
    """Raise ``ValueError`` where pairs name other devices than a node has, or leave one out."""
    pairs = mesh.pairs
    if not pairs and devices > MAX_FULL_MESH:
        raise ValueError(f"a mesh without pairs has at most {MAX_FULL_MESH} devices, met {devices}")
    beyond = next((pair for pair in pairs if max(pair[:2]) >= devices), None)
    if beyond is not None:
        raise ValueError(f"pairs join devices below {devices}, met {list(beyond)}")
    if pairs:
        edges = [edge for a, b, _ in pairs for edge in ((a, b), (b, a))]
        missed = _missed(edges, range(devices))
        if missed is not None:
            raise ValueError(f"pairs join all devices, met none that lead from device 0 to device {missed}")


def _check_graph(graph: Graph, devices: int) -> None:
    names = [f"device {device}" for device in range(devices)]
    forth = [(a, b) for a, b, _ in graph.edges]
    for edges, way in ((forth, "device 0 to {}"), ([(b, a) for a, b in forth], "{} to device 0")):
        missed = _missed(edges, names)
        if missed is not None:
            raise ValueError(f"a graph has a way between every two devices, met none from {way.format(missed)}")


def _missed(edges: Iterable[tuple[Any, Any]], wanted: Iterable[Any]) -> Any:
    """Return the first of ``wanted`` that edges do not reach from the first of all, or ``None``."""
    following = defaultdict(list)
    for start, end in edges:
        following[start].append(end)
    wanted = list(wanted)
    reached, frontier = {wanted[0]}, [wanted[0]]
    while frontier:
        frontier = [end for start in frontier for end in following[start] if end not in reached]
        frontier = list(dict.fromkeys(frontier))
        reached.update(frontier)
    return next((vertex for vertex in wanted if vertex not in reached), None)
