"""Accelerators and clusters by name; every figure has a source and a status in the data files."""

from functools import lru_cache
from math import ceil
from typing import Any

from meshwise.simulator.catalog.records import STATUSES, Record, is_calibrated, names, record
from meshwise.simulator.catalog.slices import closed_axes, slice_pairs, slice_shape
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Library, Node, Protocol
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel
from meshwise.simulator.machine.topology import (
    Crossbar,
    Dragonfly,
    Fabric,
    FatTree,
    LeafSpine,
    Link,
    Mesh,
    NodeNetwork,
    Ring,
    Switch,
    Torus,
)
from meshwise.simulator.units import Dimension, parse

__all__ = [
    "STATUSES",
    "accelerator",
    "accelerator_names",
    "assumed",
    "cluster",
    "cluster_names",
    "data_sheet",
    "estimated",
    "sources",
    "statuses",
    "timed_products",
]


def accelerator_names() -> tuple[str, ...]:
    """Return the names of the accelerators that the catalog holds."""
    return names("accelerators")


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that the catalog holds."""
    return names("clusters")


def sources(name: str) -> dict[str, str]:
    """Return where the figures of an accelerator or cluster come from, by their paths."""
    return {path: text for path, (_, text) in _any(name).origins.items()}


def statuses(name: str) -> dict[str, str]:
    """Return how far the figures of an accelerator or cluster can be trusted: one of `STATUSES` by path."""
    return {path: status for path, (status, _) in _any(name).origins.items()}


def assumed(name: str) -> dict[str, str]:
    """Return the assumed figures (stated in no document) with reasons; a cluster's include its accelerator's."""
    found = _any(name)
    device = found.figures.get("accelerator")
    inherited = {f"accelerator.{path}": why for path, why in assumed(device).items()} if device else {}
    return inherited | {path: why for path, (status, why) in found.origins.items() if status == "assumed"}


def _any(name: str) -> Record:
    return record("accelerators" if name in names("accelerators") else "clusters", name)


@lru_cache(maxsize=64)
def accelerator(name: str) -> Accelerator:
    """Return an accelerator by name; ``ValueError`` names the known ones."""
    return _accelerator(record("accelerators", name).figures)


@lru_cache(maxsize=1)
def timed_products() -> frozenset[MatmulModel]:
    """Return the models of matrix products that were fitted to published timings; relatives share them."""
    return frozenset(accelerator(name).matmul for name in accelerator_names() if is_calibrated(name))


def estimated(name: str) -> tuple[str, ...]:
    """Return a remark on where an accelerator's efficiency comes from; nothing where it or a relative was timed."""
    if accelerator(name).matmul in timed_products():
        return ()
    found = record("accelerators", name)
    status, source = found.origin("matmul") or ("assumed", "no source")
    return (f"{found.figures['name']}: nobody timed its kernels; products {status}: {source}",)


def data_sheet(name: str) -> Accelerator:
    """Return an accelerator with the figures of its data sheet, without fits to published kernels."""
    return _accelerator(record("accelerators", name, calibrated=False).figures)


def _accelerator(figures: dict[str, Any]) -> Accelerator:
    return Accelerator(
        name=figures["name"],
        peak_flops=tuple((dtype, parse(rate, Dimension.COMPUTE_RATE)) for dtype, rate in figures["peak"].items()),
        memory=parse(figures["reported_memory"], Dimension.SIZE),
        memory_bandwidth=parse(figures["memory_bandwidth"], Dimension.BANDWIDTH),
        launch=parse(figures.get("launch", "0 us"), Dimension.TIME),
        matmul=_matmul(figures.get("matmul", {})),
        attention=_attention(figures.get("attention", {})),
        sustained=figures.get("sustained", 1.0),
        kernel_bandwidth=tuple(figures.get("kernel_bandwidth", {}).items()),
        kernel_bandwidth_default=figures.get("kernel_bandwidth_default", 1.0),
        reserved=parse(figures["reserved"], Dimension.SIZE) if "reserved" in figures else 0.0,
        computes_collectives=figures.get("computes_collectives", False),
    )


def _matmul(figures: dict[str, Any]) -> MatmulModel:
    values: dict[str, Any] = figures | {
        "tiles": tuple(map(tuple, figures.get("tiles", ((1, 1),)))),
        "fractions": tuple(figures.get("fractions", {}).items()),
        "product_launch": parse(figures.get("product_launch", "0 us"), Dimension.TIME),
    }
    return MatmulModel(**values)


def _attention(figures: dict[str, Any]) -> AttentionModel:
    values: dict[str, Any] = figures | {"launch": parse(figures.get("launch", "0 us"), Dimension.TIME)}
    return AttentionModel(**values)


@lru_cache(maxsize=256)
def cluster(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
    """Return ``nodes`` nodes of a machine by name.

    Parameters
    ----------
    devices_per_node
        Number of devices per node, with their share of its NICs and hosts; all where ``None``. It may exceed the
        node's own number where devices share a switch (with no more NICs) and for a slice of a torus, whose
        chips come with their hosts and NICs.

    Raises
    ------
    ValueError
        Where there is no such machine, or the devices do not fit into its wiring.

    Examples
    --------
    >>> cluster("tpu-v4", 16).fabric.shape, cluster("gb200-nvl72").first.hosts
    ((4, 4, 4), 18)
    """
    figures = record("clusters", name).figures
    full = figures["devices_per_node"]
    devices = full if devices_per_node is None else devices_per_node
    if min(nodes, devices) < 1:
        raise ValueError(f"nodes and devices_per_node are at least 1, met {nodes} and {devices}")
    nics = ceil(figures["nics_per_node"] * devices / full)
    slices = figures["intra_node"]["kind"] == "torus"
    node = Node(
        accelerator=accelerator(figures["accelerator"]),
        host=_host(figures["host"]),
        devices=devices,
        network=_network(name, figures["intra_node"], devices, full),
        nics=nics if slices else min(figures["nics_per_node"], nics),
        nic=_link(figures["inter_node"]),
        hosts=ceil(devices / figures.get("devices_per_host", devices)),
    )
    fabric = _fabric(figures.get("fabric", {"kind": "crossbar"}), nodes * devices)
    library, guesses = _library(figures.get("library", {})), estimated(figures["accelerator"])
    return Cluster(name, ((node, nodes),), fabric, library=library, estimated=guesses)


def _host(figures: dict[str, Any]) -> Host:
    optional: dict[str, Any] = {key: figures[key] for key in ("cores", "numa_nodes") if key in figures}
    if "memory_bandwidth" in figures:
        optional["memory_bandwidth"] = parse(figures["memory_bandwidth"], Dimension.BANDWIDTH)
    if "pcie" in figures:
        optional["pcie"] = Pcie(_link(figures["pcie"]), figures["pcie"].get("devices_per_switch", 1))
    return Host(figures["name"], parse(figures["memory"], Dimension.SIZE), **optional)


def _link(figures: dict[str, Any]) -> Link:
    delays = (parse(figures[key], Dimension.TIME) if key in figures else 0.0 for key in ("latency", "launch"))
    latency, launch = delays
    return Link(latency, parse(figures["bandwidth"], Dimension.BANDWIDTH), launch)


def _library(figures: dict[str, Any]) -> Library:
    protocols = tuple(Protocol(**each) for each in figures.get("protocols", ()))
    options: dict[str, Any] = {key: figures[key] for key in ("own", "reduction") if key in figures}
    if "reduction_launch" in figures:
        options["reduction_launch"] = parse(figures["reduction_launch"], Dimension.TIME)
    return Library(protocols, **options)


def _network(name: str, figures: dict[str, Any], devices: int, full: int) -> NodeNetwork:
    link, kind = _link(figures), figures["kind"]
    if kind == "switch":
        return Switch(link, figures.get("reduces", False))
    if kind == "ring":
        return Ring(link)
    if kind == "torus":
        shape = slice_shape(devices, figures["pod"], figures["ring"])
        return Mesh(link, slice_pairs(shape, closed_axes(shape, figures["ring"])))
    if devices > full:
        raise ValueError(f"devices_per_node is at most {full} on {name}, met {devices}")
    return Mesh(link, tuple((a, b, links) for a, b, links in figures.get("pairs", ()) if max(a, b) < devices))


def _fabric(figures: dict[str, Any], devices: int) -> Fabric:
    options = {key: value for key, value in figures.items() if key != "kind"}
    if figures["kind"] == "torus":
        shape = slice_shape(devices, figures["pod"], figures["ring"])
        return Torus(shape, _link(figures), all(closed_axes(shape, figures["ring"])))
    if figures["kind"] == "dragonfly":
        return Dragonfly(**options | {key: _link(options[key]) for key in ("local", "group_link")})
    kinds = {"crossbar": Crossbar, "leaf_spine": LeafSpine, "fat_tree": FatTree}
    fabric: Fabric = kinds[figures["kind"]](**options)
    return fabric
