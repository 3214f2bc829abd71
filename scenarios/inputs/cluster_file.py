"""Cluster files: read into a `Cluster`, with the networks inside and between its nodes, and written back equal.

A figure of efficiency that a file leaves out does not count as ideal: it is that of the accelerator which ``like``
names, else the median of the accelerators and links that the catalogue has timed
(`meshwise.simulator.catalog.typical`), and the result says so.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from meshwise.scenarios.files.checking import check
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import Document, FieldPath, dump, read
from meshwise.scenarios.files.results import write
from meshwise.scenarios.inputs.cluster_document import cluster_document, exact
from meshwise.scenarios.schema.cluster import (
    MAX_DEVICES,
    AcceleratorTable,
    AttentionTable,
    ClusterTable,
    ConditionsTable,
    CrossbarFabric,
    DragonflyFabric,
    FabricTable,
    FatTreeFabric,
    GraphFabric,
    HostTable,
    LeafSpineFabric,
    LibraryTable,
    LinkTable,
    MatmulTable,
    MeshNetwork,
    MixedClusterTable,
    NodeNetworkTable,
    NodeTypeTable,
    PcieNetwork,
    RingNetwork,
    TorusFabric,
)
from meshwise.simulator.catalog import accelerator, estimated
from meshwise.simulator.catalog.typical import (
    Efficiency,
    efficiency_of,
    timed_accelerators,
    typical_efficiency,
    typical_link,
)
from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, Cluster, Library, Node, Protocol, Tenant
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

_DELAYS = ("latency", "launch")
N = TypeVar("N", bound=NodeNetwork)


def stated_efficiency(table: AcceleratorTable) -> Efficiency:
    """Return the efficiency of an accelerator that is written out: its figures, else those of ``like`` or medians."""
    base = _base(table)
    matmul = _matmul(table.matmul) if "matmul" in table.model_fields_set else base.matmul
    attention = AttentionModel(**table.attention.model_dump())
    others = () if "kernel_bandwidth_default" in table.model_fields_set else base.kernel_bandwidth
    return Efficiency(
        launch=table.launch if "launch" in table.model_fields_set else base.launch,
        matmul=matmul,
        attention=attention if "attention" in table.model_fields_set else base.attention_beside(matmul),
        sustained=table.sustained if "sustained" in table.model_fields_set else base.sustained,
        kernel_bandwidth=tuple((dict(others) | table.kernel_bandwidth).items()),
    )


def _base(table: AcceleratorTable) -> Efficiency:
    return typical_efficiency() if table.like is None else efficiency_of(accelerator(table.like))


def _left_out(table: AcceleratorTable) -> tuple[str, ...]:
    """Return the names of the figures of efficiency that a table does not state."""
    stated = table.model_fields_set - {"kernel_bandwidth"}
    if (
        "kernel_bandwidth_default" in stated
        or dict(_base(table).kernel_bandwidth).keys() <= table.kernel_bandwidth.keys()
    ):
        stated |= {"kernel_bandwidth"}
    return tuple(name for name in Efficiency._fields if name not in stated)


_OF_ITSELF = frozenset({"sharpness", "fractions"})
"""Figures that refine others of their table: to leave them out makes nothing ideal."""


def _ideal(table: AcceleratorTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the tables of efficiency that are stated in part, with the figures that they leave out, taken as ideal.

    An empty table means ideal on purpose.
    """
    for name in ("matmul", "attention"):
        part: MatmulTable | AttentionTable = getattr(table, name)
        if part.model_fields_set:
            missing = (field for field in type(part).model_fields if field not in part.model_fields_set | _OF_ITSELF)
            if names := tuple(missing):
                yield name, names


def _matmul(table: MatmulTable) -> MatmulModel:
    values = {name: getattr(table, name) for name in MatmulTable.model_fields}
    sharpness = math.inf if table.sharpness is None else table.sharpness
    return MatmulModel(**values | {"sharpness": sharpness, "fractions": tuple(table.fractions.items())})


def typical_delays(table: LinkTable, link: Link, *, inside: bool) -> Link:
    """Return a link in which latency and launch are those of timed links where its table states none."""
    typical = typical_link(inside=inside)
    return replace(link, **{name: getattr(typical, name) for name in _DELAYS if name not in table.model_fields_set})


def with_typical_delays(table: LinkTable, network: N) -> N:
    """Return a network inside a node whose link has the delays of timed links where its table states none."""
    return replace(network, link=typical_delays(table, network.link, inside=True))


def estimates(table: ClusterTable | MixedClusterTable) -> Iterator[str]:
    """Yield in words the estimates for figures that a cluster file leaves out."""
    for kind in table.node_types if isinstance(table, MixedClusterTable) else (table,):
        yield from _of_accelerator(kind.accelerator)
        links = (("intra_node", kind.intra_node), ("inter_node", kind.inter_node))
        for name, link in links:
            delays = [delay for delay in _DELAYS if delay not in link.model_fields_set]
            if delays:
                yield (
                    f"{name}: {_listed(delays)} not stated, taken as the median of the catalogue's timed links; "
                    "bandwidth taken as reached"
                )


def _of_accelerator(table: AcceleratorTable) -> Iterator[str]:
    if table.preset is not None:
        yield from estimated(table.preset)
        return
    for name, missing in _ideal(table):
        yield f"{table.name}: {name} without {_listed(missing)}, taken as ideal; left out as a whole it is typical"
    taken = _left_out(table)
    if not taken:
        return
    stated = "matmul" in table.model_fields_set
    fraction = table.matmul.fraction if stated else _base(table).matmul.fraction
    reach = f"products reach {fraction:.2f} of the peak in a burst"
    if table.like is not None:
        yield f"{table.name}: {_listed(taken)} not stated, taken from {table.like}; {reach}"
        return
    yield (
        f"{table.name}: {_listed(taken)} not stated, taken as the median of the {len(timed_accelerators())} "
        f"accelerators with timed kernels; {reach}; like: NAME takes those of one"
    )


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)


MAX_FULL_MESH = 256
"""Most devices of a full mesh; more would be millions of links."""


def to_link(table: LinkTable) -> Link:
    """Return the link of a table."""
    return Link(table.latency, table.bandwidth, table.launch)


def to_network(table: NodeNetworkTable, devices: int) -> NodeNetwork:
    """Return the network inside a node of so many devices; ``ValueError`` where it does not reach all of them."""
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
    """Return the fabric of a table; ``ValueError`` where its devices do not all reach each other."""
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
    """Raise ``ValueError`` where pairs of a mesh name devices that the node lacks, or do not connect all of them."""
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
    # device 0 reaches every device, and every device reaches it: then every device reaches every other one
    names = [f"device {device}" for device in range(devices)]
    forth = [(a, b) for a, b, _ in graph.edges]
    for edges, way in ((forth, "device 0 to {}"), ([(b, a) for a, b in forth], "{} to device 0")):
        missed = _missed(edges, names)
        if missed is not None:
            raise ValueError(f"a graph has a way between every two devices, met none from {way.format(missed)}")


def _missed(edges: Iterable[tuple[Any, Any]], wanted: Iterable[Any]) -> Any:
    """Return the first of ``vertices`` that edges do not reach from the first vertex, or ``None``."""
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


__all__ = ["FieldError", "cluster_document", "cluster_in", "exact", "load_cluster", "to_cluster", "write_cluster"]


class FieldError(ValueError):
    """Raised where a constructor refuses the value of a field; ``path`` leads to the field."""

    def __init__(self, path: FieldPath, message: str) -> None:
        self.path = path
        super().__init__(message)


@contextmanager
def _at(*path: str | int) -> Iterator[None]:
    """Turn every ``ValueError`` inside into a `FieldError` at ``path``."""
    try:
        yield
    except ValueError as error:
        below = error.path if isinstance(error, FieldError) else ()
        raise FieldError((*path, *below), str(error)) from None


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster of a file; `ScenarioError` lists all its faults."""
    return cluster_in(read(path))


def cluster_in(document: Document) -> Cluster:
    """Return the cluster of a document; `ScenarioError` where its fields are invalid or contradict each other."""
    table = cluster_table(document)
    try:
        return to_cluster(table)
    except FieldError as error:
        raise ScenarioError((document.fault(error.path, str(error)),)) from None


def cluster_table(document: Document) -> ClusterTable | MixedClusterTable:
    """Return the table of a cluster document; `ScenarioError` lists the faults of its fields."""
    mixed = isinstance(document.data, dict) and "node_types" in document.data
    model: type[ClusterTable] | type[MixedClusterTable] = MixedClusterTable if mixed else ClusterTable
    table, faults = check(model, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    return table


def to_cluster(table: ClusterTable | MixedClusterTable) -> Cluster:
    """Return the cluster of a table; `FieldError` where its figures contradict each other."""
    if isinstance(table, MixedClusterTable):
        nodes = []
        for index, kind in enumerate(table.node_types):
            with _at("node_types", index):
                nodes.append((_node(kind, kind.devices, kind.nics, {"hosts": kind.hosts}), kind.count))
    else:
        hosts = {"hosts_per_node": table.hosts_per_node}
        nodes = [(_node(table, table.devices_per_node, table.nics_per_node, hosts), table.nodes)]
    curves, guesses = tuple(_curves(table)), tuple(dict.fromkeys((*table.estimated, *estimates(table))))
    return with_conditions(Cluster(table.name, tuple(nodes), collectives=curves, estimated=guesses), table)


def with_conditions(cluster: Cluster, table: ConditionsTable) -> Cluster:
    """Return ``cluster`` with the conditions of ``table``, whose entries replace or extend those of the cluster.

    Raises
    ------
    FieldError
        Where a field does not suit the cluster, or the cluster is too large.
    """
    with _at("node_types" if isinstance(table, MixedClusterTable) else "nodes"):
        if cluster.num_devices > MAX_DEVICES:
            raise ValueError(f"nodes * devices_per_node are at most {MAX_DEVICES} devices, met {cluster.num_devices}")
    if table.fabric is not None:
        with _at("fabric"):
            cluster = replace(cluster, fabric=to_fabric(table.fabric, cluster.num_devices))
            if isinstance(cluster.fabric, Graph):  # without speeds: their faults are reported at link_speeds below
                _check_wiring(replace(cluster, link_speeds=()))
    with _at("speeds"):
        cluster = replace(cluster, speeds=tuple((dict(cluster.speeds) | table.speeds).items()))
    with _at("link_speeds"):
        cluster = replace(cluster, link_speeds=tuple((dict(cluster.link_speeds) | table.link_speeds).items()))
        if cluster.link_speeds:
            _check_wiring(cluster)
    with _at("tenants"):
        cluster = replace(cluster, tenants=(*cluster.tenants, *_tenants(table)))
    chosen = {Collective(name): Algorithm(algorithm) for name, algorithm in table.algorithms.items()}
    given = "overlap_slowdown" in table.model_fields_set
    return replace(
        cluster,
        algorithms=tuple((dict(cluster.algorithms) | chosen).items()),
        overlap_slowdown=table.overlap_slowdown if given else cluster.overlap_slowdown,
        library=cluster.library if table.library is None else _library(table.library),
    )


def resized(cluster: Cluster, nodes: int | None, devices_per_node: int | None, *, keeps_fabric: bool) -> Cluster:
    """Return ``cluster`` with another number of nodes or of devices a node; its fabric stays with ``keeps_fabric``.

    Raises
    ------
    FieldError
        Where the nodes differ, or the wiring of nodes or the fabric has a fixed size.
    """
    if nodes is devices_per_node is None:
        return cluster
    with _at("nodes" if nodes is not None else "devices_per_node"):
        result = (cluster if keeps_fabric else replace(cluster, fabric=FULL_BISECTION)).resized(nodes, devices_per_node)
        if isinstance(result.first.network, Mesh):
            check_mesh(result.first.network, result.first.devices)
        return result


def _node(table: ClusterTable | NodeTypeTable, devices: int, nics: int, hosts: dict[str, int]) -> Node:
    with _at("accelerator"):
        accelerator = _accelerator(table.accelerator)
    with _at("host"):
        host = _host(table.host)
    with _at("intra_node"):
        network = with_typical_delays(table.intra_node, to_network(table.intra_node, devices))
    (field, num_hosts), *_ = hosts.items()
    with _at(field):
        nic = typical_delays(table.inter_node, to_link(table.inter_node), inside=False)
        node = Node(accelerator, host, devices, network, nics, nic, num_hosts)
    if isinstance(network, PcieTree):
        with _at("intra_node", "devices_per_switch"):
            _check_wiring(Cluster("node", ((node, 1),)))
    return node


def _check_wiring(cluster: Cluster) -> None:
    """Raise ``ValueError`` where the links of ``cluster`` contradict each other, or a speed names no link."""
    from meshwise.simulator.interconnect.interconnect import interconnect  # clusters of the catalogue need no check

    interconnect(cluster)


def _accelerator(table: AcceleratorTable) -> Accelerator:
    if table.preset is not None:
        return accelerator(table.preset)
    assert table.name and table.peak and table.memory and table.memory_bandwidth  # the schema asks for them
    efficiency = stated_efficiency(table)
    return Accelerator(
        name=table.name,
        peak_flops=tuple(table.peak.items()),
        memory=table.memory,
        memory_bandwidth=table.memory_bandwidth,
        **efficiency._asdict(),
        kernel_bandwidth_default=table.kernel_bandwidth_default,
        reserved=table.reserved,
        sharded_launch=table.sharded_launch,
        unit_launch=table.unit_launch,
        recompute_launch=table.recompute_launch,
        optimizer_launch=table.optimizer_launch,
        computes_collectives=table.computes_collectives,
    )


def _host(table: HostTable) -> Host:
    return Host(
        name=table.name,
        memory=table.memory,
        memory_bandwidth=math.inf if table.memory_bandwidth is None else table.memory_bandwidth,
        cores=table.cores,
        launch=table.launch,
        numa_nodes=table.numa_nodes,
        pcie=None if table.pcie is None else Pcie(to_link(table.pcie), table.pcie.devices_per_switch),
    )


def _library(table: LibraryTable) -> Library:
    protocols = tuple(Protocol(**dict(protocol)) for protocol in table.protocols)
    return Library(protocols, table.own, table.reduction, table.reduction_launch)


def _curves(table: ClusterTable | MixedClusterTable) -> Iterator[CollectiveCurve]:
    for index, curve in enumerate(table.collectives):
        with _at("collectives", index):
            yield CollectiveCurve(Collective(curve.collective), curve.ranks, tuple(curve.points))


def _tenants(table: ConditionsTable) -> Iterator[Tenant]:
    for index, tenant in enumerate(table.tenants):
        with _at(index):
            fields: dict[str, Any] = dict(tenant)
            devices, collective = tuple(tenant.devices), Collective(tenant.collective)
            yield Tenant(**fields | {"devices": devices, "collective": collective})


def write_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write ``cluster`` as a cluster file that reads back equal; ``comment`` goes above it."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write(path, head + dump(cluster_document(cluster)))
