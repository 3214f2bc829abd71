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

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import Document, FieldPath, dump_yaml, read_document
from meshwise.scenarios.files.results import write
from meshwise.scenarios.inputs.cluster_document import build_cluster_document, format_exact
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
from meshwise.simulator.catalog import accelerator, describe_estimates
from meshwise.simulator.catalog.typical import (
    Efficiency,
    device_efficiency,
    timed_accelerators,
    typical_efficiency,
    typical_link,
)
from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, Cluster, CommunicationLibrary, Node, Protocol, Tenant
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


def build_efficiency(table: AcceleratorTable) -> Efficiency:
    """Return the efficiency of an accelerator that is written out: its figures, else those of ``like`` or medians."""
    base = _find_base_efficiency(table)
    matmul = _build_matmul(table.matmul) if "matmul" in table.model_fields_set else base.matmul
    attention = AttentionModel(**table.attention.model_dump())
    base_bandwidth = () if "kernel_bandwidth_default" in table.model_fields_set else base.kernel_bandwidth
    return Efficiency(
        launch=table.launch if "launch" in table.model_fields_set else base.launch,
        matmul=matmul,
        attention=attention if "attention" in table.model_fields_set else base.scale_attention(matmul),
        sustained=table.sustained if "sustained" in table.model_fields_set else base.sustained,
        kernel_bandwidth=tuple((dict(base_bandwidth) | table.kernel_bandwidth).items()),
    )


def _find_base_efficiency(table: AcceleratorTable) -> Efficiency:
    return typical_efficiency() if table.like is None else device_efficiency(accelerator(table.like))


def _list_unstated(table: AcceleratorTable) -> tuple[str, ...]:
    """Return the names of the figures of efficiency that a table does not state."""
    stated_names = table.model_fields_set - {"kernel_bandwidth"}
    if (
        "kernel_bandwidth_default" in stated_names
        or dict(_find_base_efficiency(table).kernel_bandwidth).keys() <= table.kernel_bandwidth.keys()
    ):
        stated_names |= {"kernel_bandwidth"}
    return tuple(name for name in Efficiency._fields if name not in stated_names)


_OPTIONAL_FIGURES = frozenset({"sharpness", "fractions"})
"""Figures that refine others of their table: to leave them out makes nothing ideal."""


def _list_ideal(table: AcceleratorTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the tables of efficiency that are stated in part, with the figures that they leave out, taken as ideal.

    An empty table means ideal on purpose.
    """
    for name in ("matmul", "attention"):
        part: MatmulTable | AttentionTable = getattr(table, name)
        if part.model_fields_set:
            missing_fields = (
                field for field in type(part).model_fields if field not in part.model_fields_set | _OPTIONAL_FIGURES
            )
            if names := tuple(missing_fields):
                yield name, names


def _build_matmul(table: MatmulTable) -> MatmulModel:
    values = {name: getattr(table, name) for name in MatmulTable.model_fields}
    sharpness = math.inf if table.sharpness is None else table.sharpness
    return MatmulModel(**values | {"sharpness": sharpness, "fractions": tuple(table.fractions.items())})


def fill_link_delays(table: LinkTable, link: Link, *, is_inside: bool) -> Link:
    """Return a link in which latency and launch are those of timed links where its table states none."""
    timed_link = typical_link(inside=is_inside)
    return replace(link, **{name: getattr(timed_link, name) for name in _DELAYS if name not in table.model_fields_set})


def fill_network_delays(table: LinkTable, network: N) -> N:
    """Return a network inside a node whose link has the delays of timed links where its table states none."""
    return replace(network, link=fill_link_delays(table, network.link, is_inside=True))


def list_estimates(table: ClusterTable | MixedClusterTable) -> Iterator[str]:
    """Yield in words the estimates for figures that a cluster file leaves out."""
    for kind in table.node_types if isinstance(table, MixedClusterTable) else (table,):
        yield from _list_accelerator_estimates(kind.accelerator)
        links = (("intra_node", kind.intra_node), ("inter_node", kind.inter_node))
        for name, link in links:
            delays = [delay for delay in _DELAYS if delay not in link.model_fields_set]
            if delays:
                yield (
                    f"{name}: {_join_names(delays)} not stated, taken as the median of the catalogue's timed links; "
                    "bandwidth taken as reached"
                )


def _list_accelerator_estimates(table: AcceleratorTable) -> Iterator[str]:
    if table.preset is not None:
        yield from describe_estimates(table.preset)
        return
    for name, missing_names in _list_ideal(table):
        missing_text = f"{name} without {_join_names(missing_names)}"
        yield f"{table.name}: {missing_text}, taken as ideal; left out as a whole it is typical"
    unstated_names = _list_unstated(table)
    if not unstated_names:
        return
    has_matmul = "matmul" in table.model_fields_set
    fraction = table.matmul.fraction if has_matmul else _find_base_efficiency(table).matmul.fraction
    reach_text = f"products reach {fraction:.2f} of the peak in a burst"
    if table.like is not None:
        yield f"{table.name}: {_join_names(unstated_names)} not stated, taken from {table.like}; {reach_text}"
        return
    yield (
        f"{table.name}: {_join_names(unstated_names)} not stated, taken as the median of the "
        f"{len(timed_accelerators())} accelerators with timed kernels; {reach_text}; like: NAME takes those of one"
    )


def _join_names(names: list[str] | tuple[str, ...]) -> str:
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
        return LeafSpine(**_list_fields(table))
    if isinstance(table, FatTreeFabric):
        return FatTree(**_list_fields(table))
    if isinstance(table, DragonflyFabric):
        links = {"local": to_link(table.local), "group_link": to_link(table.group_link)}
        return Dragonfly(**_list_fields(table) | links)
    if isinstance(table, TorusFabric):
        return Torus(tuple(table.shape), to_link(table), table.wraparound)
    graph = Graph(tuple(_list_edges(table)))
    _check_graph(graph, devices)
    return graph


def _list_fields(table: Any) -> dict[str, Any]:
    return {name: value for name, value in table if name != "kind"}


def _list_edges(table: GraphFabric) -> Iterator[tuple[str, str, Link]]:
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
    far_pair = next((pair for pair in pairs if max(pair[:2]) >= devices), None)
    if far_pair is not None:
        raise ValueError(f"pairs join devices below {devices}, met {list(far_pair)}")
    if pairs:
        edges = [edge for a, b, _ in pairs for edge in ((a, b), (b, a))]
        unreached = _find_unreached(edges, range(devices))
        if unreached is not None:
            raise ValueError(f"pairs join all devices, met none that lead from device 0 to device {unreached}")


def _check_graph(graph: Graph, devices: int) -> None:
    # device 0 reaches every device, and every device reaches it: then every device reaches every other one
    names = [f"device {device}" for device in range(devices)]
    forward_edges = [(a, b) for a, b, _ in graph.edges]
    for edges, path_text in ((forward_edges, "device 0 to {}"), ([(b, a) for a, b in forward_edges], "{} to device 0")):
        unreached = _find_unreached(edges, names)
        if unreached is not None:
            raise ValueError(
                f"a graph has a way between every two devices, met none from {path_text.format(unreached)}"
            )


def _find_unreached(edges: Iterable[tuple[Any, Any]], vertices: Iterable[Any]) -> Any:
    """Return the first of ``vertices`` that edges do not reach from the first vertex, or ``None``."""
    successors = defaultdict(list)
    for start, end in edges:
        successors[start].append(end)
    vertices = list(vertices)
    reached_vertices, frontier = {vertices[0]}, [vertices[0]]
    while frontier:
        frontier = [end for start in frontier for end in successors[start] if end not in reached_vertices]
        frontier = list(dict.fromkeys(frontier))
        reached_vertices.update(frontier)
    return next((vertex for vertex in vertices if vertex not in reached_vertices), None)


__all__ = [
    "FieldError",
    "build_cluster",
    "build_cluster_document",
    "format_exact",
    "load_cluster",
    "to_cluster",
    "write_cluster",
]


class FieldError(ValueError):
    """Raised where a constructor refuses the value of a field; ``path`` leads to the field."""

    def __init__(self, path: FieldPath, message: str) -> None:
        self.path = path
        super().__init__(message)


@contextmanager
def _locate_errors(*path: str | int) -> Iterator[None]:
    """Turn every ``ValueError`` inside into a `FieldError` at ``path``."""
    try:
        yield
    except ValueError as error:
        inner_path = error.path if isinstance(error, FieldError) else ()
        raise FieldError((*path, *inner_path), str(error)) from None


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster of a file; `ScenarioError` lists all its faults."""
    return build_cluster(read_document(path))


def build_cluster(document: Document) -> Cluster:
    """Return the cluster of a document; `ScenarioError` where its fields are invalid or contradict each other."""
    table = read_cluster_table(document)
    try:
        return to_cluster(table)
    except FieldError as error:
        raise ScenarioError((document.fault(error.path, str(error)),)) from None


def read_cluster_table(document: Document) -> ClusterTable | MixedClusterTable:
    """Return the table of a cluster document; `ScenarioError` lists the faults of its fields."""
    is_mixed = isinstance(document.data, dict) and "node_types" in document.data
    model: type[ClusterTable] | type[MixedClusterTable] = MixedClusterTable if is_mixed else ClusterTable
    table, faults = check_table(model, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    return table


def to_cluster(table: ClusterTable | MixedClusterTable) -> Cluster:
    """Return the cluster of a table; `FieldError` where its figures contradict each other."""
    if isinstance(table, MixedClusterTable):
        nodes = []
        for index, kind in enumerate(table.node_types):
            with _locate_errors("node_types", index):
                nodes.append((_build_node(kind, kind.devices, kind.nics, {"hosts": kind.hosts}), kind.count))
    else:
        hosts = {"hosts_per_node": table.hosts_per_node}
        nodes = [(_build_node(table, table.devices_per_node, table.nics_per_node, hosts), table.nodes)]
    curves, guesses = tuple(_list_curves(table)), tuple(dict.fromkeys((*table.estimated, *list_estimates(table))))
    return with_conditions(Cluster(table.name, tuple(nodes), collectives=curves, estimated=guesses), table)


def with_conditions(cluster: Cluster, table: ConditionsTable) -> Cluster:
    """Return ``cluster`` with the conditions of ``table``, whose entries replace or extend those of the cluster.

    Raises
    ------
    FieldError
        Where a field does not suit the cluster, or the cluster is too large.
    """
    with _locate_errors("node_types" if isinstance(table, MixedClusterTable) else "nodes"):
        if cluster.num_devices > MAX_DEVICES:
            raise ValueError(f"nodes * devices_per_node are at most {MAX_DEVICES} devices, met {cluster.num_devices}")
    if table.fabric is not None:
        with _locate_errors("fabric"):
            cluster = replace(cluster, fabric=to_fabric(table.fabric, cluster.num_devices))
            if isinstance(cluster.fabric, Graph):  # without speeds: their faults are reported at link_speeds below
                _check_wiring(replace(cluster, link_speeds=()))
    with _locate_errors("speeds"):
        cluster = replace(cluster, speeds=tuple((dict(cluster.speeds) | table.speeds).items()))
    with _locate_errors("link_speeds"):
        cluster = replace(cluster, link_speeds=tuple((dict(cluster.link_speeds) | table.link_speeds).items()))
        if cluster.link_speeds:
            _check_wiring(cluster)
    with _locate_errors("tenants"):
        cluster = replace(cluster, tenants=(*cluster.tenants, *_list_tenants(table)))
    chosen_algorithms = {Collective(name): Algorithm(algorithm) for name, algorithm in table.algorithms.items()}
    has_slowdown = "overlap_slowdown" in table.model_fields_set
    return replace(
        cluster,
        algorithms=tuple((dict(cluster.algorithms) | chosen_algorithms).items()),
        overlap_slowdown=table.overlap_slowdown if has_slowdown else cluster.overlap_slowdown,
        library=cluster.library if table.library is None else _build_library(table.library),
    )


def resize_cluster(cluster: Cluster, nodes: int | None, devices_per_node: int | None, *, keeps_fabric: bool) -> Cluster:
    """Return ``cluster`` with another number of nodes or of devices a node; its fabric stays with ``keeps_fabric``.

    Raises
    ------
    FieldError
        Where the nodes differ, or the wiring of nodes or the fabric has a fixed size.
    """
    if nodes is devices_per_node is None:
        return cluster
    with _locate_errors("nodes" if nodes is not None else "devices_per_node"):
        result = (cluster if keeps_fabric else replace(cluster, fabric=FULL_BISECTION)).with_size(
            nodes, devices_per_node
        )
        if isinstance(result.first_node.network, Mesh):
            check_mesh(result.first_node.network, result.first_node.devices)
        return result


def _build_node(table: ClusterTable | NodeTypeTable, devices: int, nics: int, hosts: dict[str, int]) -> Node:
    with _locate_errors("accelerator"):
        accelerator = _build_accelerator(table.accelerator)
    with _locate_errors("host"):
        host = _build_host(table.host)
    with _locate_errors("intra_node"):
        network = fill_network_delays(table.intra_node, to_network(table.intra_node, devices))
    (field, num_hosts), *_ = hosts.items()
    with _locate_errors(field):
        nic = fill_link_delays(table.inter_node, to_link(table.inter_node), is_inside=False)
        node = Node(accelerator, host, devices, network, nics, nic, num_hosts)
    if isinstance(network, PcieTree):
        with _locate_errors("intra_node", "devices_per_switch"):
            _check_wiring(Cluster("node", ((node, 1),)))
    return node


def _check_wiring(cluster: Cluster) -> None:
    """Raise ``ValueError`` where the links of ``cluster`` contradict each other, or a speed names no link."""
    from meshwise.simulator.interconnect.interconnect import interconnect  # clusters of the catalogue need no check

    interconnect(cluster)


def _build_accelerator(table: AcceleratorTable) -> Accelerator:
    if table.preset is not None:
        return accelerator(table.preset)
    assert table.name and table.peak and table.memory and table.memory_bandwidth  # the schema asks for them
    efficiency = build_efficiency(table)
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


def _build_host(table: HostTable) -> Host:
    return Host(
        name=table.name,
        memory=table.memory,
        memory_bandwidth=math.inf if table.memory_bandwidth is None else table.memory_bandwidth,
        cores=table.cores,
        launch=table.launch,
        numa_nodes=table.numa_nodes,
        pcie=None if table.pcie is None else Pcie(to_link(table.pcie), table.pcie.devices_per_switch),
    )


def _build_library(table: LibraryTable) -> CommunicationLibrary:
    protocols = tuple(Protocol(**dict(protocol)) for protocol in table.protocols)
    return CommunicationLibrary(protocols, table.own, table.reduction, table.reduction_launch)


def _list_curves(table: ClusterTable | MixedClusterTable) -> Iterator[CollectiveCurve]:
    for index, curve in enumerate(table.collectives):
        with _locate_errors("collectives", index):
            yield CollectiveCurve(Collective(curve.collective), curve.ranks, tuple(curve.points))


def _list_tenants(table: ConditionsTable) -> Iterator[Tenant]:
    for index, tenant in enumerate(table.tenants):
        with _locate_errors(index):
            fields: dict[str, Any] = dict(tenant)
            devices, collective = tuple(tenant.devices), Collective(tenant.collective)
            yield Tenant(**fields | {"devices": devices, "collective": collective})


def write_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write ``cluster`` as a cluster file that reads back equal; ``comment`` goes above it."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write(path, head + dump_yaml(build_cluster_document(cluster)))
