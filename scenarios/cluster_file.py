"""Cluster files: read into a `Cluster`, and written back so that both are equal."""

import math
from pathlib import Path
from typing import Any

from scenarios import files
from scenarios.checking import check
from scenarios.cluster_schema import AcceleratorTable, ClusterTable, LinkTable
from scenarios.errors import ScenarioError
from scenarios.reader import Document, read
from scenarios.yaml_text import dump
from simulator import units
from simulator.cluster import Accelerator, Cluster, Collective, CollectiveCurve, Host, Link, MatmulModel
from simulator.units import Dimension


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster in a file; `ScenarioError` lists everything that is wrong with it."""
    return cluster_in(read(path))


def cluster_in(document: Document) -> Cluster:
    """Return the cluster that a document states."""
    table, faults = check(ClusterTable, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    try:
        return to_cluster(table)
    except ValueError as error:
        raise ScenarioError((document.fault((), str(error)),)) from None


def to_cluster(table: ClusterTable) -> Cluster:
    """Return the cluster that a table states; ``ValueError`` where its numbers contradict each other."""
    host = table.host
    bandwidth = math.inf if host.memory_bandwidth is None else host.memory_bandwidth
    return Cluster(
        name=table.name,
        accelerator=_accelerator(table.accelerator),
        host=Host(host.name, host.memory, bandwidth, host.cores),
        nodes=table.nodes,
        devices_per_node=table.devices_per_node,
        intra_node=_link(table.intra_node),
        inter_node=_link(table.inter_node),
        nics_per_node=table.nics_per_node,
        collectives=tuple(
            CollectiveCurve(Collective(curve.collective), curve.ranks, tuple(curve.points))
            for curve in table.collectives
        ),
    )


def _accelerator(table: AcceleratorTable) -> Accelerator:
    if table.preset is not None:
        from simulator.catalog import accelerator

        return accelerator(table.preset)
    assert table.name and table.peak and table.memory and table.memory_bandwidth  # the schema asks for them
    matmul = table.matmul
    return Accelerator(
        name=table.name,
        peak_flops=tuple(table.peak.items()),
        memory=table.memory,
        memory_bandwidth=table.memory_bandwidth,
        launch=table.launch,
        matmul=MatmulModel(matmul.fraction, matmul.half_k, matmul.tile, matmul.units, matmul.gradient),
        kernel_bandwidth=tuple(table.kernel_bandwidth.items()),
        kernel_bandwidth_default=table.kernel_bandwidth_default,
        reserved=table.reserved,
        sharded_launch=table.sharded_launch,
        optimizer_launch=table.optimizer_launch,
        computes_collectives=table.computes_collectives,
    )


def _link(table: LinkTable) -> Link:
    return Link(table.latency, table.bandwidth, table.launch)


def write_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write ``cluster`` as a cluster file that reads back equal; ``comment`` stands above it."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    files.write(path, head + dump(cluster_document(cluster)))


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Return ``cluster`` as the data of a cluster file, every figure exact and with its unit."""
    host: dict[str, Any] = {"name": cluster.host.name, "memory": exact(cluster.host.memory, Dimension.SIZE)}
    if math.isfinite(cluster.host.memory_bandwidth):
        host["memory_bandwidth"] = exact(cluster.host.memory_bandwidth, Dimension.BANDWIDTH)
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "nics_per_node": cluster.nics_per_node,
        "accelerator": _accelerator_document(cluster.accelerator),
        "host": host | {"cores": cluster.host.cores},
        "intra_node": _link_document(cluster.intra_node),
        "inter_node": _link_document(cluster.inter_node),
        "collectives": [_curve_document(curve) for curve in cluster.collectives],
    }


def _accelerator_document(device: Accelerator) -> dict[str, Any]:
    return {
        "name": device.name,
        "peak": {dtype: exact(rate, Dimension.COMPUTE_RATE) for dtype, rate in device.peak_flops},
        "memory": exact(device.memory, Dimension.SIZE),
        "memory_bandwidth": exact(device.memory_bandwidth, Dimension.BANDWIDTH),
        "launch": exact(device.launch, Dimension.TIME),
        "reserved": exact(device.reserved, Dimension.SIZE),
        "matmul": {
            "fraction": device.matmul.fraction,
            "half_k": device.matmul.half_k,
            "tile": list(device.matmul.tile),
            "units": device.matmul.units,
            "gradient": device.matmul.gradient,
        },
        "kernel_bandwidth": dict(device.kernel_bandwidth),
        "kernel_bandwidth_default": device.kernel_bandwidth_default,
        "sharded_launch": exact(device.sharded_launch, Dimension.TIME),
        "optimizer_launch": exact(device.optimizer_launch, Dimension.TIME),
        "computes_collectives": device.computes_collectives,
    }


def _link_document(link: Link) -> dict[str, Any]:
    return {
        "latency": exact(link.latency, Dimension.TIME),
        "bandwidth": exact(link.bandwidth, Dimension.BANDWIDTH),
        "launch": exact(link.launch, Dimension.TIME),
    }


def _curve_document(curve: CollectiveCurve) -> dict[str, Any]:
    points = [[int(size) if size == int(size) else size, exact(time, Dimension.TIME)] for size, time in curve.points]
    return {"collective": str(curve.collective), "ranks": curve.ranks, "points": points}


_UNITS = {
    Dimension.TIME: ("s", "ms", "us"),
    Dimension.SIZE: ("TiB", "GiB", "GB", "MiB", "KiB"),
    Dimension.BANDWIDTH: ("TB/s", "GB/s", "MB/s"),
    Dimension.COMPUTE_RATE: ("TFLOP/s", "GFLOP/s"),
}
_BASE = {Dimension.TIME: "s", Dimension.SIZE: "B", Dimension.BANDWIDTH: "B/s", Dimension.COMPUTE_RATE: "FLOP/s"}


def exact(value: float, dimension: Dimension) -> str:
    """Return ``value`` with a unit, so that reading it gives the very same number.

    >>> exact(80 * 2.0**30, Dimension.SIZE)
    '80 GiB'
    """
    value = float(value)
    candidates = [f"{value:.15g} {_BASE[dimension]}", f"{value!r} {_BASE[dimension]}"]
    for unit in _UNITS[dimension]:
        scaled = value / units.UNITS[dimension][unit]
        if 0.1 <= scaled < 100_000:
            candidates.append(f"{scaled:.12g} {unit}")
            candidates.append(f"{scaled:.15g} {unit}")
    same = [text for text in candidates if units.parse(text, dimension) == value]
    return min(same, key=len)
