"""Accelerators and clusters by name, each figure with its source in the data files."""

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from simulator.cluster import Accelerator, Cluster, Host, Link, MatmulModel
from simulator.units import Dimension, parse


@lru_cache(maxsize=2)
def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath(f"{name}.json").read_text("utf-8"))
    return table


def accelerator_names() -> tuple[str, ...]:
    """Return the names of the accelerators that the catalog holds."""
    return tuple(_table("accelerators"))


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that the catalog holds."""
    return tuple(_table("clusters"))


def sources(name: str) -> dict[str, str]:
    """Return where each figure of an accelerator or cluster comes from."""
    table = _table("accelerators") | _table("clusters")
    found: dict[str, str] = table[name]["sources"]
    return found


@lru_cache(maxsize=64)
def accelerator(name: str) -> Accelerator:
    """Return an accelerator by name; ``ValueError`` names the known ones."""
    record = _lookup("accelerators", name)
    matmul = record["matmul"]
    return Accelerator(
        name=record["name"],
        peak_flops=tuple((dtype, parse(rate, Dimension.COMPUTE_RATE)) for dtype, rate in record["peak"].items()),
        memory=parse(record["memory"], Dimension.SIZE),
        memory_bandwidth=parse(record["memory_bandwidth"], Dimension.BANDWIDTH),
        launch=parse(record["launch"], Dimension.TIME),
        matmul=MatmulModel(matmul["fraction"], matmul["half_k"], tuple(matmul["tile"]), matmul["units"]),
        kernel_bandwidth=tuple(record.get("kernel_bandwidth", {}).items()),
        kernel_bandwidth_default=record.get("kernel_bandwidth_default", 1.0),
        reserved=parse(record["reserved"], Dimension.SIZE) if "reserved" in record else 0.0,
        computes_collectives=record.get("computes_collectives", False),
    )


@lru_cache(maxsize=64)
def cluster(name: str, nodes: int = 1) -> Cluster:
    """Return ``nodes`` nodes of a machine by name; ``ValueError`` names the known ones."""
    record = _lookup("clusters", name)
    host = record["host"]
    return Cluster(
        name=name,
        accelerator=accelerator(record["accelerator"]),
        host=Host(host["name"], parse(host["memory"], Dimension.SIZE), cores=host["cores"]),
        nodes=nodes,
        devices_per_node=record["devices_per_node"],
        intra_node=_link(record["intra_node"]),
        inter_node=_link(record["inter_node"]),
        nics_per_node=record["nics_per_node"],
    )


def _link(record: dict[str, str]) -> Link:
    return Link(
        parse(record["latency"], Dimension.TIME),
        parse(record["bandwidth"], Dimension.BANDWIDTH),
        parse(record["launch"], Dimension.TIME),
    )


def _lookup(kind: str, name: str) -> dict[str, Any]:
    table = _table(kind)
    if name not in table:
        raise ValueError(f"{kind[:-1]} is one of {', '.join(table)}, met {name}")
    record: dict[str, Any] = table[name]
    return record
