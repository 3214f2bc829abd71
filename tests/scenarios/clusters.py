"""Clusters of every kind, for tests that write and read them."""

from math import prod

from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, CommunicationLibrary, Node, Protocol, Tenant
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel
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

POSITIVE = st.floats(1e-12, 1e15)
FACTORS = st.floats(0.001, 1000)
SMALL = st.integers(1, 64)
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=12)
LINKS = st.builds(Link, latency=st.floats(0, 1), bandwidth=POSITIVE, launch=st.floats(0, 1))
PROTOCOLS = st.builds(Protocol, NAMES, st.floats(0, 1000), st.floats(0, 1000), st.floats(0.001, 1), st.booleans())
LIBRARIES = st.builds(
    CommunicationLibrary,
    st.lists(PROTOCOLS, max_size=2).map(tuple),
    st.floats(0, 2),
    st.floats(0.001, 1),
    st.floats(0, 1),
)
CURVES = st.builds(
    CollectiveCurve,
    collective=st.sampled_from(Collective),
    ranks=st.integers(1, 1024),
    points=st.dictionaries(st.floats(1, 1e9), POSITIVE, min_size=1, max_size=3).map(
        lambda points: tuple(sorted(points.items()))
    ),
)
ACCELERATORS = st.builds(
    Accelerator,
    name=NAMES,
    peak_flops=st.just((("fp32", 1e12), ("bf16", 2.5e14))),
    memory=POSITIVE,
    memory_bandwidth=POSITIVE,
    launch=st.floats(0, 1),
    matmul=st.builds(
        MatmulModel,
        fraction=st.floats(0.01, 1),
        half_k=st.floats(0, 1e6),
        tiles=st.just(((128, 256), (64, 64))),
        edge=st.floats(0, 100),
        units=st.integers(0, 200),
        waves=st.floats(0, 1),
        sharpness=st.floats(1, 20) | st.just(float("inf")),
        weight_gradient=st.floats(0.5, 1),
        fractions=st.just((("fp8", 0.6),)),
    ),
    attention=st.builds(
        AttentionModel, half_sequence=st.floats(0, 1e4), block=st.integers(1, 256), launch=st.floats(0, 1)
    ),
    sustained=st.floats(1, 2),
    kernel_bandwidth=st.just((("norm", 0.4), ("norm_backward", 0.3), ("activation_backward", 0.5), ("optimizer", 1.7))),
    kernel_bandwidth_default=st.floats(0.01, 1),
    reserved=st.floats(0, 1e10),
)
HOSTS = st.builds(
    Host,
    name=NAMES,
    memory=POSITIVE,
    memory_bandwidth=POSITIVE | st.just(float("inf")),
    cores=st.integers(1, 99),
    launch=st.floats(0, 1),
    numa_nodes=st.integers(1, 8),
    pcie=st.none() | st.builds(Pcie, LINKS, st.integers(1, 4)),
)


@st.composite
def meshes(draw: st.DrawFn, devices: int) -> Mesh:
    """Draw a mesh: all to all, or a chain of all devices and some more pairs."""
    chain = [(device, device + 1, draw(SMALL)) for device in range(devices - 1)]
    more = st.tuples(st.integers(0, devices - 1), st.integers(0, devices - 1), SMALL)
    pairs = chain + [pair for pair in draw(st.lists(more, max_size=3)) if pair[0] != pair[1]]
    return Mesh(draw(LINKS), tuple(draw(st.permutations(pairs))) if draw(st.booleans()) else ())


def networks(devices: int, host: Host) -> st.SearchStrategy[NodeNetwork]:
    """Return networks inside a node of ``devices``; a PCIe tree has the switches of the host's."""
    a_switch = SMALL if host.pcie is None else st.just(host.pcie.devices_per_switch)
    return st.one_of(
        st.builds(Switch, LINKS, st.booleans()),
        st.builds(Ring, LINKS),
        st.builds(PcieTree, LINKS, a_switch, SMALL, LINKS),
        meshes(devices),
    )


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Draw a node of up to twelve devices."""
    hosts = draw(st.integers(1, 3))
    devices = hosts * draw(st.integers(1, 4))
    host = draw(HOSTS)
    network = draw(networks(devices, host))
    return Node(draw(ACCELERATORS), host, devices, network, draw(SMALL), draw(LINKS), hosts)


@st.composite
def graphs(draw: st.DrawFn, devices: int) -> Graph:
    """Draw a graph: a star of all devices, with links that differ by direction or not, in any order."""
    hub = draw(NAMES.filter(lambda name: not name.startswith("device")))
    edges = []
    for device in range(devices):
        out, back = f"device {device}", draw(LINKS)
        edges += [(out, hub, back), (hub, out, back if draw(st.booleans()) else draw(LINKS))]
    return Graph(tuple(draw(st.permutations(edges))))


@st.composite
def fabrics(draw: st.DrawFn, devices: int) -> Fabric:
    """Draw a fabric for a cluster of ``devices``."""
    switches = {
        "nodes_per_leaf": draw(SMALL),
        "oversubscription": draw(FACTORS),
        "rail_optimized": draw(st.booleans()),
        "hop": draw(st.floats(0, 1)),
        "reduces": draw(st.booleans()),
    }
    factors = [n for n in range(1, devices + 1) if devices % n == 0]
    first = draw(st.sampled_from(factors))
    shape = draw(st.sampled_from([(devices,), (first, devices // first), (first, 1, devices // first)]))
    assert prod(shape) == devices
    kinds = (
        Crossbar(),
        LeafSpine(**switches),
        FatTree(**switches, leaves_per_pod=draw(SMALL), core_oversubscription=draw(FACTORS)),
        Dragonfly(draw(SMALL), draw(SMALL), draw(LINKS), draw(LINKS)),
        Torus(shape, draw(LINKS), draw(st.booleans())),
        draw(graphs(devices)),
    )
    return draw(st.sampled_from(kinds))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw a cluster, of equal nodes or mixed, with whatever holds on top."""
    kinds = draw(st.lists(st.tuples(nodes(), st.integers(1, 3)), min_size=1, max_size=3))
    devices = sum(node.devices * count for node, count in kinds)
    fabric = draw(fabrics(devices))
    wires = interconnect(Cluster("wires", tuple(kinds), fabric))
    links = st.integers(0, wires.num_links - 1).map(wires.name)
    numbers = st.integers(0, devices - 1)
    algorithms = st.sampled_from([algorithm for algorithm in Algorithm if algorithm is not Algorithm.MEASURED])
    tenants = st.builds(
        Tenant,
        name=NAMES,
        devices=st.lists(numbers, min_size=2, max_size=4, unique=True).map(tuple),
        collective=st.sampled_from(Collective),
        size=POSITIVE,
        period=POSITIVE,
        start=st.floats(0, 1e6),
    )
    return Cluster(
        name=draw(NAMES),
        nodes=tuple(kinds),
        fabric=fabric,
        speeds=tuple(draw(st.dictionaries(numbers, FACTORS, max_size=3)).items()),
        link_speeds=tuple(draw(st.dictionaries(links, FACTORS, max_size=3)).items()) if wires.num_links else (),
        collectives=tuple(draw(st.lists(CURVES, max_size=2))),
        algorithms=tuple(draw(st.dictionaries(st.sampled_from(Collective), algorithms, max_size=3)).items()),
        tenants=tuple(draw(st.lists(tenants, max_size=2))) if devices > 1 else (),
        overlap_slowdown=draw(st.floats(1, 2)),
        library=draw(LIBRARIES),
    )
