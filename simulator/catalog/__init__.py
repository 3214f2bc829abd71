"""Accelerators and clusters by name; every figure has a source and a status in the data files."""

from functools import lru_cache
from math import ceil
from typing import Any

from meshwise.simulator.catalog.records import STATUSES, Record, build_link, is_calibrated, list_names, read_record
from meshwise.simulator.catalog.slices import closed_axes, slice_pairs, slice_shape
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, CommunicationLibrary, Node, Protocol
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel
from meshwise.simulator.machine.topology import (
    Crossbar,
    Dragonfly,
    Fabric,
    FatTree,
    LeafSpine,
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
    "cluster",
    "cluster_names",
    "data_sheet_accelerator",
    "describe_estimates",
    "list_assumed_figures",
    "list_timed_products",
    "sources",
    "statuses",
]


def accelerator_names() -> tuple[str, ...]:
    """Return the names of the accelerators that the catalog holds."""
    return list_names("accelerators")


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that the catalog holds."""
    return list_names("clusters")


def sources(name: str) -> dict[str, str]:
    """Return where the figures of an accelerator or cluster come from, by their paths."""
    return {path: text for path, (_, text) in _find_record(name).origins.items()}


def statuses(name: str) -> dict[str, str]:
    """Return how far the figures of an accelerator or cluster can be trusted: one of `STATUSES` by path."""
    return {path: status for path, (status, _) in _find_record(name).origins.items()}


def list_assumed_figures(name: str) -> dict[str, str]:
    """Return the assumed figures (stated in no document) with reasons; a cluster's include its accelerator's."""
    entry = _find_record(name)
    device = entry.figures.get("accelerator")
    inherited = (
        {f"accelerator.{path}": reason for path, reason in list_assumed_figures(device).items()} if device else {}
    )
    return inherited | {path: reason for path, (status, reason) in entry.origins.items() if status == "assumed"}


def _find_record(name: str) -> Record:
    return read_record("accelerators" if name in list_names("accelerators") else "clusters", name)


@lru_cache(maxsize=64)
def accelerator(name: str) -> Accelerator:
    """Return an accelerator by name; ``ValueError`` names the known ones."""
    return _build_accelerator(read_record("accelerators", name).figures)


@lru_cache(maxsize=1)
def list_timed_products() -> frozenset[MatmulModel]:
    """Return the models of matrix products that were fitted to published timings; relatives share them."""
    return frozenset(accelerator(name).matmul for name in accelerator_names() if is_calibrated(name))


def describe_estimates(name: str) -> tuple[str, ...]:
    """Return a remark on where an accelerator's efficiency comes from; nothing where it or a relative was timed."""
    if accelerator(name).matmul in list_timed_products():
        return ()
    entry = read_record("accelerators", name)
    status, source = entry.find_origin("matmul") or ("assumed", "no source")
    return (f"{entry.figures['name']}: nobody timed its kernels; products {status}: {source}",)


def data_sheet_accelerator(name: str) -> Accelerator:
    """Return an accelerator with the figures of its data sheet, without fits to published kernels."""
    figures = read_record("accelerators", name, calibrated=False).figures
    return _build_accelerator(figures | {"training_fractions": {}})


def _build_accelerator(figures: dict[str, Any]) -> Accelerator:
    attention: dict[str, Any] = figures.get("attention", {})
    return Accelerator(
        name=figures["name"],
        peak_flops=tuple((dtype, parse(rate, Dimension.COMPUTE_RATE)) for dtype, rate in figures["peak"].items()),
        memory=parse(figures["reported_memory"], Dimension.SIZE),
        memory_bandwidth=parse(figures["memory_bandwidth"], Dimension.BANDWIDTH),
        launch=parse(figures.get("launch", "0 us"), Dimension.TIME),
        matmul=_build_matmul_model(figures.get("matmul", {}), figures.get("training_fractions", {})),
        attention=AttentionModel(**attention | {"launch": parse(attention.get("launch", "0 us"), Dimension.TIME)}),
        sustained=_find_sustained(figures),
        kernel_bandwidth=tuple(figures.get("kernel_bandwidth", {}).items()),
        kernel_bandwidth_default=figures.get("kernel_bandwidth_default", 1.0),
        reserved=parse(figures["reserved"], Dimension.SIZE) if "reserved" in figures else 0.0,
        computes_collectives=figures.get("computes_collectives", False),
    )


def _find_sustained(figures: dict[str, Any]) -> float:
    """Return the time of products in training over a burst: in steps, and with the power that the device may draw.

    ``clock`` is the clock that this power allows over that of the relative whose products were timed under load.
    """
    slowdown: float = max(figures.get("sustained", 1.0), figures.get("training_sustained", 1.0))
    clock: float = figures.get("clock", 1.0)
    return max(slowdown / clock, 1.0)


def _build_matmul_model(figures: dict[str, Any], training_fractions: dict[str, float]) -> MatmulModel:
    """Return the model of products; fractions of the peak that were timed under load go before those of bursts."""
    values: dict[str, Any] = figures | {
        "tiles": tuple(map(tuple, figures.get("tiles", ((1, 1),)))),
        "fractions": tuple((figures.get("fractions", {}) | training_fractions).items()),
        "product_launch": parse(figures.get("product_launch", "0 us"), Dimension.TIME),
    }
    return MatmulModel(**values)


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
    >>> cluster("tpu-v4", 16).fabric.shape, cluster("gb200-nvl72").first_node.hosts
    ((4, 4, 4), 18)
    """
    figures = read_record("clusters", name).figures
    full_devices = figures["devices_per_node"]
    devices = full_devices if devices_per_node is None else devices_per_node
    if min(nodes, devices) < 1:
        raise ValueError(f"nodes and devices_per_node are at least 1, met {nodes} and {devices}")
    nics = ceil(figures["nics_per_node"] * devices / full_devices)
    is_torus = figures["intra_node"]["kind"] == "torus"
    node = Node(
        accelerator=accelerator(figures["accelerator"]),
        host=_build_host(figures["host"]),
        devices=devices,
        network=_build_network(name, figures["intra_node"], devices, full_devices),
        nics=nics if is_torus else min(figures["nics_per_node"], nics),
        nic=build_link(figures["inter_node"]),
        hosts=ceil(devices / figures.get("devices_per_host", devices)),
    )
    fabric = _build_fabric(figures.get("fabric", {"kind": "crossbar"}), nodes * devices)
    library, estimates = _build_library(figures.get("library", {})), describe_estimates(figures["accelerator"])
    slowdown = read_record("accelerators", figures["accelerator"]).figures.get("overlap_slowdown", 1.0)
    return Cluster(name, ((node, nodes),), fabric, overlap_slowdown=slowdown, library=library, estimated=estimates)


def _build_host(figures: dict[str, Any]) -> Host:
    optional: dict[str, Any] = {key: figures[key] for key in ("cores", "numa_nodes") if key in figures}
    if "memory_bandwidth" in figures:
        optional["memory_bandwidth"] = parse(figures["memory_bandwidth"], Dimension.BANDWIDTH)
    if "pcie" in figures:
        optional["pcie"] = Pcie(build_link(figures["pcie"]), figures["pcie"].get("devices_per_switch", 1))
    return Host(figures["name"], parse(figures["memory"], Dimension.SIZE), **optional)


def _build_library(figures: dict[str, Any]) -> CommunicationLibrary:
    protocols = tuple(Protocol(**fields) for fields in figures.get("protocols", ()))
    options: dict[str, Any] = {key: figures[key] for key in ("own", "reduction") if key in figures}
    if "reduction_launch" in figures:
        options["reduction_launch"] = parse(figures["reduction_launch"], Dimension.TIME)
    return CommunicationLibrary(protocols, **options)


def _build_network(name: str, figures: dict[str, Any], devices: int, full_devices: int) -> NodeNetwork:
    link, kind = build_link(figures), figures["kind"]
    if kind == "switch":
        return Switch(link, figures.get("reduces", False))
    if kind == "ring":
        return Ring(link)
    if kind == "torus":
        shape = slice_shape(devices, figures["pod"], figures["ring"])
        return Mesh(link, slice_pairs(shape, closed_axes(shape, figures["ring"])))
    if devices > full_devices:
        raise ValueError(f"devices_per_node is at most {full_devices} on {name}, met {devices}")
    return Mesh(
        link, tuple((start, end, links) for start, end, links in figures.get("pairs", ()) if max(start, end) < devices)
    )


def _build_fabric(figures: dict[str, Any], devices: int) -> Fabric:
    options = {key: value for key, value in figures.items() if key != "kind"}
    if figures["kind"] == "torus":
        shape = slice_shape(devices, figures["pod"], figures["ring"])
        return Torus(shape, build_link(figures), all(closed_axes(shape, figures["ring"])))
    if figures["kind"] == "dragonfly":
        return Dragonfly(**options | {key: build_link(options[key]) for key in ("local", "group_link")})
    kinds = {"crossbar": Crossbar, "leaf_spine": LeafSpine, "fat_tree": FatTree}
    fabric: Fabric = kinds[figures["kind"]](**options)
    return fabric
