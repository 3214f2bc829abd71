"""Cluster files: read into a `Cluster`, and written back so that both are equal."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from scenarios.checking import check
from scenarios.cluster_document import cluster_document, exact
from scenarios.cluster_estimates import estimates, stated_efficiency, typical_delays, with_typical_delays
from scenarios.cluster_schema import (
    AcceleratorTable,
    ClusterTable,
    ConditionsTable,
    HostTable,
    LibraryTable,
    MixedClusterTable,
    NodeTypeTable,
)
from scenarios.errors import ScenarioError
from scenarios.fabric_schema import MAX_DEVICES
from scenarios.files import write
from scenarios.reader import Document, FieldPath, read
from scenarios.wiring_tables import check_mesh, to_fabric, to_link, to_network
from scenarios.yaml_text import dump
from simulator.accelerator import Accelerator
from simulator.cluster import FULL_BISECTION, Cluster, Node, Tenant
from simulator.collective_kinds import Algorithm, Collective, CollectiveCurve
from simulator.host import Host, Pcie
from simulator.interconnect.kinds import Graph, Mesh, PcieTree
from simulator.library import Library, Protocol

__all__ = ["FieldError", "cluster_document", "cluster_in", "exact", "load_cluster", "to_cluster", "write_cluster"]


class FieldError(ValueError):
    """A constructor refuses the value of a field; ``path`` leads to it."""

    def __init__(self, path: FieldPath, message: str) -> None:
        self.path = path
        super().__init__(message)


@contextmanager
def _at(*path: str | int) -> Iterator[None]:
    """Say of every error inside that it is of the field at ``path``."""
    try:
        yield
    except ValueError as error:
        below = error.path if isinstance(error, FieldError) else ()
        raise FieldError((*path, *below), str(error)) from None


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster in a file; `ScenarioError` lists everything that is wrong with it."""
    return cluster_in(read(path))


def cluster_in(document: Document) -> Cluster:
    """Return the cluster that a document states."""
    table = cluster_table(document)
    try:
        return to_cluster(table)
    except FieldError as error:
        raise ScenarioError((document.fault(error.path, str(error)),)) from None


def cluster_table(document: Document) -> ClusterTable | MixedClusterTable:
    """Return the table of a cluster file, as far as its fields say; `ScenarioError` lists what is wrong with it."""
    mixed = isinstance(document.data, dict) and "node_types" in document.data
    model: type[ClusterTable] | type[MixedClusterTable] = MixedClusterTable if mixed else ClusterTable
    table, faults = check(model, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    return table


def to_cluster(table: ClusterTable | MixedClusterTable) -> Cluster:
    """Return the cluster that a table states; `FieldError` where its numbers contradict each other."""
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
    """Return ``cluster`` with what ``table`` states on top: its entries replace and extend those of the cluster.

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
            if isinstance(cluster.fabric, Graph):
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
    """Return ``cluster`` with another number of nodes or of devices in each; without its fabric unless kept.

    Raises
    ------
    FieldError
        Where its nodes differ, or their wiring or the fabric has a size of its own.
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
    """Raise ``ValueError`` where the links of ``cluster`` contradict each other, or a speed is of none of them."""
    from simulator.interconnect.interconnect import interconnect

    interconnect(cluster)


def _accelerator(table: AcceleratorTable) -> Accelerator:
    if table.preset is not None:
        from simulator.catalog import accelerator

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
    """Write ``cluster`` as a cluster file that reads back equal; ``comment`` stands above it."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write(path, head + dump(cluster_document(cluster)))
