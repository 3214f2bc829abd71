"""Small clusters of every kind, and what a route has to be."""

from collections import defaultdict
from math import inf
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import strategies as st

from meshwise.simulator.interconnect.interconnect import Interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import (
    Crossbar,
    Dragonfly,
    Fabric,
    FatTree,
    Graph,
    LeafSpine,
    Link,
    Mesh,
    NodeNetwork,
    PcieTree,
    Ring,
    Switch,
    Torus,
)

DEVICE = Accelerator("device", (("bf16", 1e12),), memory=1e9, memory_bandwidth=1e9)
FAST, SLOW, NIC = Link(1e-6, 300e9), Link(3e-6, 30e9), Link(5e-6, 50e9)
SWITCH, HOST = Switch(FAST), Host("host", 1e12)
CUBE_MESH = Mesh(
    Link(1e-6, 25e9),
    # DGX-1 with V100: six NVLinks a device (NVIDIA DGX-1 with Tesla V100 System Architecture, WP-08437-002).
    (
        *((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2)),
        *((2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
    ),
)


def node(
    devices: int = 8,
    network: NodeNetwork = SWITCH,
    nics: int | None = None,
    nic: Link = NIC,
    host: Host = HOST,
    hosts: int = 1,
) -> Node:
    return Node(DEVICE, host, devices, network, nics or devices, nic, hosts)


def machine(*nodes: tuple[Node, int], fabric: Fabric | None = None, **others: Any) -> Cluster:
    return Cluster("machine", nodes, fabric or Crossbar(), **others)


def one(interconnect: Interconnect, source: int, target: int) -> list[tuple[str, float]]:
    """The route of one pair by name."""
    _, link, share = interconnect.routes(np.array([source]), np.array([target]))
    return list(zip(map(interconnect.name, link.tolist()), share.tolist(), strict=True))


def bandwidth(interconnect: Interconnect, name: str) -> float:
    return float(interconnect.bandwidth[interconnect.link(name)])


def every_pair(devices: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.arange(devices * devices)
    return pairs // devices, pairs % devices


def ways(cluster: Cluster, interconnect: Interconnect, source: int, target: int) -> "nx.DiGraph[str]":
    """The part of the graph that a route may use: nodes do not forward, and their networks do not leave them."""
    direct = isinstance(cluster.fabric, Torus | Graph)
    inside = not direct and cluster.node_of(source) == cluster.node_of(target)
    if direct:
        barred = {"pcie out", "pcie in", "memory in", "memory out", "pcie switch out", "pcie switch in"}
    elif inside:
        barred = {"nic out", "nic in", "memory in", "memory out"}
    else:
        barred = {"device out", "device in", "node link", "node socket", "pcie switch out", "pcie switch in"}
        barred |= {"memory in", "memory out"}
    own = {f"{part} {device}" for part in ("device", "slot") for device in (source, target)}
    allowed: nx.DiGraph[str] = nx.DiGraph()
    for tail, head, link in interconnect.graph().edges(data="link"):
        foreign = not (inside or direct) and any(
            end.startswith(("device", "slot")) and end not in own for end in (tail, head)
        )
        root = any(end.startswith("root") for end in (tail, head))
        if not foreign and not root and interconnect.kind(link) not in barred:
            allowed.add_edge(tail, head, link=link, hops=1000 if interconnect.kind(link) == "group" else 1)
    return allowed


def check_flow(graph: "nx.DiGraph[str]", rows: list[tuple[int, float]], source: str, target: str) -> float:
    """Check that one unit flows from source to target and nowhere stops; return its hops."""
    edges = {data["link"]: (tail, head, data.get("hops", 1)) for tail, head, data in graph.edges(data=True)}
    balance: defaultdict[str, float] = defaultdict(float, {source: -1.0, target: 1.0})
    for link, share in rows:
        tail, head, _ = edges[link]
        balance[tail] += share
        balance[head] -= share
    assert len({link for link, _ in rows}) == len(rows)
    assert all(abs(left) < 1e-9 for left in balance.values()), dict(balance)
    return sum(share * edges[link][2] for link, share in rows)


def check_route(cluster: Cluster, interconnect: Interconnect, source: int, target: int) -> None:
    """Check that a route is a unit of flow over the fewest hops that it may take."""
    _, link, share = interconnect.routes(np.array([source]), np.array([target]))
    if source == target:
        assert not len(link)
        return
    allowed = ways(cluster, interconnect, source, target)
    ends = f"device {source}", f"device {target}"
    hops = check_flow(allowed, list(zip(link.tolist(), share.tolist(), strict=True)), *ends)
    assert hops == pytest.approx(nx.shortest_path_length(allowed, *ends, weight="hops"))


links = st.builds(
    Link, st.sampled_from([0.0, 1e-6, 2e-6]), st.integers(1, 100).map(float), st.sampled_from([0.0, 1e-5])
)


@st.composite
def meshes(draw: st.DrawFn, devices: int) -> Mesh:
    """A mesh that joins all devices: a tree, and more."""
    tree = [(draw(st.integers(0, b - 1)), b) for b in range(1, devices)]
    any_pair = st.tuples(*[st.integers(0, devices - 1)] * 2).filter(lambda ends: ends[0] != ends[1])
    more = draw(st.lists(any_pair, max_size=4)) if devices > 1 else []
    return Mesh(draw(links), tuple((a, b, draw(st.integers(1, 2))) for a, b in tree + more))


@st.composite
def node_kinds(draw: st.DrawFn) -> Node:
    devices = draw(st.integers(1, 6))
    per_switch = draw(st.integers(1, 3))
    network = draw(
        st.one_of(
            st.builds(Switch, links),
            st.builds(Mesh, links),
            meshes(devices),
            st.builds(Ring, links),
            st.builds(PcieTree, links, st.just(per_switch), st.integers(1, 2), links),
        )
    )
    pcie = draw(st.none() | st.builds(Pcie, links, st.just(per_switch)))
    memory = draw(st.sampled_from([inf, 100.0]))
    host = Host("host", 1e9, memory, numa_nodes=draw(st.integers(1, 2)), pcie=pcie)
    hosts = draw(st.sampled_from([count for count in range(1, devices + 1) if devices % count == 0]))
    return Node(DEVICE, host, devices, network, draw(st.integers(1, 6)), draw(links), hosts)


@st.composite
def toruses(draw: st.DrawFn, devices: int) -> Torus:
    shape = []
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from([size for size in range(1, devices + 1) if devices % size == 0])))
        devices //= shape[-1]
    return Torus((*shape, devices), draw(links), draw(st.booleans()))


@st.composite
def graphs(draw: st.DrawFn, devices: int) -> Graph:
    """Devices and switches, joined both ways by a tree and more."""
    names = [f"device {device}" for device in range(devices)] + [
        f"s{number}" for number in range(draw(st.integers(1, 4)))
    ]
    names = draw(st.permutations(names))
    wires = {(draw(st.sampled_from(names[:index])), name) for index, name in enumerate(names) if index}
    wires |= set(draw(st.lists(st.sampled_from([(a, b) for a in names for b in names if a < b]), max_size=6)))
    ends = {way: None for a, b in sorted(wires) for way in ((a, b), (b, a))}
    return Graph(tuple((a, b, draw(links)) for a, b in ends))


def fabrics(devices: int) -> st.SearchStrategy[Fabric]:
    few, over, hop = st.integers(1, 3), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 1e-7])
    return st.one_of(
        st.just(Crossbar()),
        st.builds(LeafSpine, few, over, st.booleans(), hop),
        st.builds(FatTree, few, few, over, over, st.booleans(), hop),
        st.builds(Dragonfly, few, few, links, links),
        toruses(devices),
        graphs(devices),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to three kinds of node in any order, on any fabric."""
    kinds = draw(st.lists(node_kinds(), min_size=1, max_size=3))
    nodes = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 3)), min_size=1, max_size=4))
    devices = sum(kind.devices * count for kind, count in nodes)
    return Cluster("random", tuple(nodes), draw(fabrics(devices)))
