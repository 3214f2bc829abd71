"""Cluster files: read into a `Cluster`, with the networks inside and between its nodes, and written back equal.

A figure of efficiency that a file leaves out does not count as ideal: it is that of the accelerator which ``like``
names, else the median of the accelerators and links that the catalogue has timed
(`meshwise.simulator.catalog.typical`), and the result says so.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.fields import Table
from meshwise.scenarios.files.reader import Document, FieldPath, dump_yaml, read_document
from meshwise.scenarios.files.results import write
from meshwise.scenarios.inputs.cluster_document import build_cluster_document, build_fields, build_link, build_part
from meshwise.scenarios.schema.cluster import (
    MAX_DEVICES,
    AcceleratorTable,
    ClusterTable,
    ConditionsTable,
    LinkTable,
    MixedClusterTable,
    NodeTypeTable,
)
from meshwise.simulator.catalog import accelerator, describe_estimates
from meshwise.simulator.catalog.typical import (
    Efficiency,
    device_efficiency,
    timed_accelerators,
    typical_efficiency,
    typical_link,
)
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, Cluster, Node
from meshwise.simulator.machine.topology import Graph, Link, Mesh, PcieTree

_DELAYS = ("latency", "launch")


def _build_accelerator(table: AcceleratorTable) -> Accelerator:
    """Return an accelerator of the catalogue or one written out, whose unstated figures are ``like``'s or medians."""
    if table.preset is not None:
        return accelerator(table.preset)
    base, stated_names, values = _find_base_efficiency(table), table.model_fields_set, build_fields(table)
    values |= {name: getattr(base, name) for name in ("launch", "matmul", "sustained") if name not in stated_names}
    if "attention" not in stated_names:
        values["attention"] = base.scale_attention(values["matmul"])
    if "kernel_bandwidth_default" not in stated_names:
        values["kernel_bandwidth"] = tuple((dict(base.kernel_bandwidth) | table.kernel_bandwidth).items())
    return Accelerator(**values)


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


def _list_ideal(table: AcceleratorTable) -> Iterator[tuple[str, list[str]]]:
    """Yield the tables of efficiency that are stated in part, with the figures that they leave out, taken as ideal.

    An empty table means ideal on purpose.
    """
    for name, part in (("matmul", table.matmul), ("attention", table.attention)):
        stated_names = part.model_fields_set
        missing_names = [field for field in type(part).model_fields if field not in stated_names | _OPTIONAL_FIGURES]
        if stated_names and missing_names:
            yield name, missing_names


def _fill_delays(table: LinkTable, link: Link, *, is_inside: bool) -> Link:
    """Return a link in which latency and launch are those of timed links where its table states none."""
    timed_link = typical_link(inside=is_inside)
    return replace(link, **{name: getattr(timed_link, name) for name in _DELAYS if name not in table.model_fields_set})


def list_estimates(table: ClusterTable | MixedClusterTable) -> Iterator[str]:
    """Yield in words the estimates for figures that a cluster file leaves out."""
    for kind in table.node_types if isinstance(table, MixedClusterTable) else (table,):
        yield from _list_accelerator_estimates(kind.accelerator)
        links = (("intra_node", kind.intra_node), ("inter_node", kind.inter_node))
        for name, link in links:
            delays = [delay for delay in _DELAYS if delay not in link.model_fields_set]
            if delays:
                yield (
                    f"{name}: {', '.join(delays)} not stated, taken as the median of the catalogue's timed links; "
                    "bandwidth taken as reached"
                )


def _list_accelerator_estimates(table: AcceleratorTable) -> Iterator[str]:
    if table.preset is not None:
        yield from describe_estimates(table.preset)
        return
    for name, missing_names in _list_ideal(table):
        missing_text = f"{name} without {', '.join(missing_names)}"
        yield f"{table.name}: {missing_text}, taken as ideal; left out as a whole it is typical"
    unstated_names = _list_unstated(table)
    if not unstated_names:
        return
    has_matmul = "matmul" in table.model_fields_set
    fraction = table.matmul.fraction if has_matmul else _find_base_efficiency(table).matmul.fraction
    reach_text = f"products reach {fraction:.2f} of the peak in a burst"
    if table.like is not None:
        yield f"{table.name}: {', '.join(unstated_names)} not stated, taken from {table.like}; {reach_text}"
        return
    yield (
        f"{table.name}: {', '.join(unstated_names)} not stated, taken as the median of the "
        f"{len(timed_accelerators())} accelerators with timed kernels; {reach_text}; like: NAME takes those of one"
    )


MAX_FULL_MESH = 256
"""Most devices of a full mesh; more would be millions of links."""


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
    reached_vertices, frontier = {vertices[0]}, {vertices[0]}
    while frontier:
        frontier = {end for start in frontier for end in successors[start]} - reached_vertices
        reached_vertices |= frontier
    return next((vertex for vertex in vertices if vertex not in reached_vertices), None)


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
                nodes.append((_build_node(kind), kind.count))
    else:
        nodes = [(_build_node(table, "_per_node"), table.nodes)]
    curves = tuple(_build_parts(table.collectives, "collectives"))
    guesses = tuple(dict.fromkeys((*table.estimated, *list_estimates(table))))
    with _locate_errors("calibration"):
        calibration = None if table.calibration is None else build_part(table.calibration)
    cluster = Cluster(table.name, tuple(nodes), collectives=curves, estimated=guesses, calibration=calibration)
    return with_conditions(cluster, table)


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
            fabric = build_part(table.fabric)
            if isinstance(fabric, Graph):
                _check_graph(fabric, cluster.num_devices)
            cluster = replace(cluster, fabric=fabric)
            if isinstance(fabric, Graph):  # without speeds: their faults are reported at link_speeds below
                _check_wiring(replace(cluster, link_speeds=()))
    with _locate_errors("speeds"):
        cluster = replace(cluster, speeds=tuple((dict(cluster.speeds) | table.speeds).items()))
    with _locate_errors("link_speeds"):
        cluster = replace(cluster, link_speeds=tuple((dict(cluster.link_speeds) | table.link_speeds).items()))
        if cluster.link_speeds:
            _check_wiring(cluster)
    with _locate_errors("tenants"):
        cluster = replace(cluster, tenants=(*cluster.tenants, *_build_parts(table.tenants)))
    chosen_algorithms = {Collective(name): Algorithm(algorithm) for name, algorithm in table.algorithms.items()}
    has_slowdown = "overlap_slowdown" in table.model_fields_set
    return replace(
        cluster,
        algorithms=tuple((dict(cluster.algorithms) | chosen_algorithms).items()),
        overlap_slowdown=table.overlap_slowdown if has_slowdown else cluster.overlap_slowdown,
        library=cluster.library if table.library is None else build_part(table.library),
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


def _build_node(table: ClusterTable | NodeTypeTable, suffix: str = "") -> Node:
    """Return the node of a table; ``suffix`` ends the names of the fields that count its parts."""
    devices, nics, hosts = (getattr(table, f"{part}{suffix}") for part in ("devices", "nics", "hosts"))
    with _locate_errors("accelerator"):
        accelerator = _build_accelerator(table.accelerator)
    with _locate_errors("host"):
        host = build_part(table.host)
    with _locate_errors("intra_node"):
        network = build_part(table.intra_node)
        if isinstance(network, Mesh):
            check_mesh(network, devices)
        network = replace(network, link=_fill_delays(table.intra_node, network.link, is_inside=True))
    with _locate_errors(f"hosts{suffix}"):
        nic = _fill_delays(table.inter_node, build_link(table.inter_node), is_inside=False)
        node = Node(accelerator, host, devices, network, nics, nic, hosts)
    if isinstance(network, PcieTree):
        with _locate_errors("intra_node", "devices_per_switch"):
            _check_wiring(Cluster("node", ((node, 1),)))
    return node


def _check_wiring(cluster: Cluster) -> None:
    """Raise ``ValueError`` where the links of ``cluster`` contradict each other, or a speed names no link."""
    from meshwise.simulator.interconnect.interconnect import interconnect  # clusters of the catalogue need no check

    interconnect(cluster)


def _build_parts(tables: Iterable[Table], *path: str) -> Iterator[Any]:
    """Yield the parts that a list of tables describes; an error is located at ``path`` and the table's index."""
    for index, table in enumerate(tables):
        with _locate_errors(*path, index):
            yield build_part(table)


def write_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write ``cluster`` as a cluster file that reads back equal; ``comment`` goes above it."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write(path, head + dump_yaml(build_cluster_document(cluster)))
