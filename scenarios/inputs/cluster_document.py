"""From a `Cluster` to the data of a cluster file, with exact figures and units."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from meshwise.simulator import units
from meshwise.simulator.collective import CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, LOSSLESS, Cluster, Library, Node, Tenant
from meshwise.simulator.machine.host import Host
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
    Switch,
    Torus,
)
from meshwise.simulator.units import Dimension

Data = dict[str, Any]


def cluster_document(cluster: Cluster) -> Data:
    """Return ``cluster`` as the data of a cluster file; most values that equal their defaults are left out."""
    return {
        "name": cluster.name,
        **_nodes(cluster),
        **_conditions(cluster),
        "collectives": [_curve(curve) for curve in cluster.collectives],
        **({"estimated": list(cluster.estimated)} if cluster.estimated else {}),
    }


def _nodes(cluster: Cluster) -> Data:
    if len(cluster.nodes) > 1:
        counts = ("devices", "hosts", "nics")
        return {"node_types": [{"count": count, **_node(node, counts)} for node, count in cluster.nodes]}
    node, count = cluster.nodes[0]
    return {"nodes": count, **_node(node, ("devices_per_node", "hosts_per_node", "nics_per_node"))}


def _node(node: Node, counts: tuple[str, str, str]) -> Data:
    devices, hosts, nics = counts
    return {
        devices: node.devices,
        **({hosts: node.hosts} if node.hosts > 1 else {}),
        nics: node.nics,
        "accelerator": _accelerator(node.accelerator),
        "host": _host(node.host),
        "intra_node": _network(node.network),
        "inter_node": _link(node.nic),
    }


def _accelerator(device: Accelerator) -> Data:
    return {
        "name": device.name,
        "peak": {dtype: exact(rate, Dimension.COMPUTE_RATE) for dtype, rate in device.peak_flops},
        "memory": exact(device.memory, Dimension.SIZE),
        "memory_bandwidth": exact(device.memory_bandwidth, Dimension.BANDWIDTH),
        "launch": exact(device.launch, Dimension.TIME),
        "reserved": exact(device.reserved, Dimension.SIZE),
        "matmul": _matmul(device.matmul),
        "attention": _attention(device.attention),
        "sustained": device.sustained,
        "kernel_bandwidth": dict(device.kernel_bandwidth),
        "kernel_bandwidth_default": device.kernel_bandwidth_default,
        "sharded_launch": exact(device.sharded_launch, Dimension.TIME),
        "unit_launch": exact(device.unit_launch, Dimension.TIME),
        "recompute_launch": exact(device.recompute_launch, Dimension.TIME),
        "optimizer_launch": exact(device.optimizer_launch, Dimension.TIME),
        "computes_collectives": device.computes_collectives,
    }


def _matmul(model: MatmulModel) -> Data:
    plain = ("fraction", "half_k", "edge", "units", "waves", "data_gradient", "weight_gradient", "batched")
    return {
        **{name: getattr(model, name) for name in plain},
        "product_launch": exact(model.product_launch, Dimension.TIME),
        "tiles": [list(tile) for tile in model.tiles],
        **({"sharpness": model.sharpness} if math.isfinite(model.sharpness) else {}),
        "fractions": dict(model.fractions),
    }


def _attention(model: AttentionModel) -> Data:
    data = {field.name: getattr(model, field.name) for field in fields(AttentionModel)}
    return data | {"launch": exact(model.launch, Dimension.TIME)}


def _host(host: Host) -> Data:
    data: Data = {"name": host.name, "memory": exact(host.memory, Dimension.SIZE)}
    if math.isfinite(host.memory_bandwidth):
        data["memory_bandwidth"] = exact(host.memory_bandwidth, Dimension.BANDWIDTH)
    data["cores"] = host.cores
    if host.launch:
        data["launch"] = exact(host.launch, Dimension.TIME)
    if host.numa_nodes > 1:
        data["numa_nodes"] = host.numa_nodes
    if host.pcie is not None:
        data["pcie"] = {**_link(host.pcie.link), "devices_per_switch": host.pcie.devices_per_switch}
    return data


def _link(link: Link) -> Data:
    return {
        "latency": exact(link.latency, Dimension.TIME),
        "bandwidth": exact(link.bandwidth, Dimension.BANDWIDTH),
        "launch": exact(link.launch, Dimension.TIME),
    }


def _network(network: NodeNetwork) -> Data:
    link = _link(network.link)
    if isinstance(network, Switch):
        return {"kind": "switch", **link, "reduces": network.reduces}
    if isinstance(network, Mesh):
        return {"kind": "mesh", **link, "pairs": [list(pair) for pair in network.pairs]}
    if isinstance(network, PcieTree):
        switches = {name: getattr(network, name) for name in ("devices_per_switch", "switches_per_socket")}
        return {"kind": "pcie", **link, **switches, "socket": _link(network.socket)}
    return {"kind": "ring", **link}


def _conditions(cluster: Cluster) -> Data:
    data: Data = {} if cluster.fabric == FULL_BISECTION else {"fabric": _fabric(cluster.fabric)}
    if cluster.speeds:
        data["speeds"] = {str(device): factor for device, factor in cluster.speeds}
    if cluster.link_speeds:
        data["link_speeds"] = dict(cluster.link_speeds)
    if cluster.algorithms:
        data["algorithms"] = {str(collective): str(algorithm) for collective, algorithm in cluster.algorithms}
    if cluster.tenants:
        data["tenants"] = [_tenant(tenant) for tenant in cluster.tenants]
    if cluster.overlap_slowdown != 1.0:
        data["overlap_slowdown"] = cluster.overlap_slowdown
    if cluster.library != LOSSLESS:
        data["library"] = _library(cluster.library)
    return data


def _library(library: Library) -> Data:
    protocols = [
        {each.name: getattr(protocol, each.name) for each in fields(protocol)} for protocol in library.protocols
    ]
    return {
        "protocols": protocols,
        "own": library.own,
        "reduction": library.reduction,
        "reduction_launch": exact(library.reduction_launch, Dimension.TIME),
    }


_FABRICS = {
    Crossbar: "crossbar",
    LeafSpine: "leaf_spine",
    FatTree: "fat_tree",
    Dragonfly: "dragonfly",
    Torus: "torus",
    Graph: "graph",
}


def _fabric(fabric: Fabric) -> Data:
    kind = {"kind": _FABRICS[type(fabric)]}
    if isinstance(fabric, Torus):
        return {**kind, "shape": list(fabric.shape), **_link(fabric.link), "wraparound": fabric.wraparound}
    if isinstance(fabric, Graph):
        return {**kind, "edges": list(_edges(fabric))}
    values = {field.name: getattr(fabric, field.name) for field in fields(fabric)}
    if isinstance(fabric, LeafSpine | FatTree):
        values["hop"] = exact(fabric.hop, Dimension.TIME)
    links = {name: _link(value) for name, value in values.items() if isinstance(value, Link)}
    return {**kind, **values, **links}


def _edges(graph: Graph) -> Iterator[Data]:
    """Yield the edges of a graph; an edge that is followed by its reverse is written once, with ``both``."""
    both = False
    for (start, end, link), following in zip(graph.edges, (*graph.edges[1:], None), strict=True):
        if both:  # this edge is the reverse of the one before
            both = False
            continue
        both = following == (end, start, link)
        yield {"from": start, "to": end, **_link(link), **({"both": True} if both else {})}


def _tenant(tenant: Tenant) -> Data:
    return {
        "name": tenant.name,
        "devices": list(tenant.devices),
        "collective": str(tenant.collective),
        "size": exact(tenant.size, Dimension.SIZE),
        "period": exact(tenant.period, Dimension.TIME),
        "start": exact(tenant.start, Dimension.TIME),
    }


def _curve(curve: CollectiveCurve) -> Data:
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
    """Return a value in SI units as the shortest text with a unit that reads back as the very same number.

    >>> exact(80 * 2.0**30, Dimension.SIZE)
    '80 GiB'
    """
    value = float(value)
    # repr reads back equal always; fewer digits or another unit give shorter text where they do too
    candidates = [f"{value:.15g} {_BASE[dimension]}", f"{value!r} {_BASE[dimension]}"]
    for unit in _UNITS[dimension]:
        scaled = value / units.UNITS[dimension][unit]
        if 0.1 <= scaled < 100_000:
            candidates.append(f"{scaled:.12g} {unit}")
            candidates.append(f"{scaled:.15g} {unit}")
    same = [text for text in candidates if units.parse(text, dimension) == value]
    return min(same, key=len)
