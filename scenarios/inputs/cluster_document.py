"""Parts of a cluster from the tables of a cluster file, and back to their data, with exact figures and units.

A part and its table have fields of the same names, and a table says how its fields are written; a part's ``link`` is
written as fields of the part itself.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin

from meshwise.scenarios.files.fields import Quantity, Table
from meshwise.scenarios.schema import cluster as schema
from meshwise.simulator import units
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.machine import topology
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, CommunicationLibrary, Node, Protocol, Tenant
from meshwise.simulator.machine.factors import RunCalibration
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel
from meshwise.simulator.units import Dimension

Data = dict[str, Any]

_PARTS: dict[type[Table], type] = {
    schema.LinkTable: topology.Link,
    schema.RingNetwork: topology.Ring,
    schema.SwitchNetwork: topology.Switch,
    schema.MeshNetwork: topology.Mesh,
    schema.PcieNetwork: topology.PcieTree,
    schema.CrossbarFabric: topology.Crossbar,
    schema.LeafSpineFabric: topology.LeafSpine,
    schema.FatTreeFabric: topology.FatTree,
    schema.DragonflyFabric: topology.Dragonfly,
    schema.TorusFabric: topology.Torus,
    schema.GraphFabric: topology.Graph,
    schema.MatmulTable: MatmulModel,
    schema.AttentionTable: AttentionModel,
    schema.AcceleratorTable: Accelerator,
    schema.HostTable: Host,
    schema.PcieTable: Pcie,
    schema.ProtocolTable: Protocol,
    schema.LibraryTable: CommunicationLibrary,
    schema.TenantTable: Tenant,
    schema.CurveTable: CollectiveCurve,
    schema.RunCalibrationTable: RunCalibration,
}
_TABLES = {part: table for table, part in _PARTS.items()}
_KEYS = {"peak_flops": "peak"}
"""Names in files of the fields that parts call otherwise."""


def build_part(table: Table) -> Any:
    """Return the part of a cluster that a table describes; ``ValueError`` where its figures contradict each other."""
    return _PARTS[type(table)](**build_fields(table))


def build_fields(table: Table) -> Data:
    """Return the fields of the part that a table describes; those without a figure are left to their defaults."""
    values = {field.name: _build_field(table, field.name) for field in fields(_PARTS[type(table)])}
    return {name: value for name, value in values.items() if value is not None}


def _build_field(table: Table, name: str) -> Any:
    if name == "link":
        assert isinstance(table, schema.LinkTable)  # tables of parts with a link extend its table
        return build_link(table)
    if isinstance(table, schema.GraphFabric):
        return tuple(_list_edges(table))
    value = getattr(table, _KEYS.get(name, name))
    return Collective(value) if name == "collective" else _freeze(value)


def _freeze(value: Any) -> Any:
    """Return a value of a table as parts have it: tuples of parts in the place of lists of tables, pairs for keys."""
    if isinstance(value, Table):
        return build_part(value)
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


def build_link(table: "schema.LinkTable") -> topology.Link:
    """Return the link of a table, which may have more fields than those of a link."""
    return topology.Link(table.latency, table.bandwidth, table.launch)


def _list_edges(table: "schema.GraphFabric") -> Iterator[tuple[str, str, topology.Link]]:
    for edge in table.edges:
        ends: Data = dict(edge)
        link = build_link(edge)
        yield ends["from"], ends["to"], link
        if ends["both"]:
            yield ends["to"], ends["from"], link


def build_cluster_document(cluster: Cluster) -> Data:
    """Return ``cluster`` as the data of a cluster file; most values that equal their defaults are left out."""
    conditions = {
        field.name: _dump_field(schema.ConditionsTable, field.name, getattr(cluster, field.name))
        for field in fields(cluster)
        if field.name in schema.ConditionsTable.model_fields and getattr(cluster, field.name) != field.default
    }
    return {
        "name": cluster.name,
        **_dump_nodes(cluster),
        **conditions,
        "collectives": [_dump_curve(curve) for curve in cluster.collectives],
        **({"estimated": list(cluster.estimated)} if cluster.estimated else {}),
        **({"calibration": _dump_part(cluster.calibration)} if cluster.calibration is not None else {}),
    }


def _dump_nodes(cluster: Cluster) -> Data:
    if len(cluster.nodes) > 1:
        return {"node_types": [{"count": count, **_dump_node(node)} for node, count in cluster.nodes]}
    node, count = cluster.nodes[0]
    return {"nodes": count, **_dump_node(node, "_per_node")}


def _dump_node(node: Node, suffix: str = "") -> Data:
    return {
        f"devices{suffix}": node.devices,
        **({f"hosts{suffix}": node.hosts} if node.hosts > 1 else {}),
        f"nics{suffix}": node.nics,
        "accelerator": _dump_accelerator(node.accelerator),
        "host": _dump_host(node.host),
        "intra_node": _dump_part(node.network),
        "inter_node": _dump_part(node.nic),
    }


def _dump_accelerator(device: Accelerator) -> Data:
    data = _dump_part(device)
    matmul = data["matmul"]
    for name in ("tiles", "sharpness", "fractions"):  # the last ones in a file
        if name in matmul:
            matmul[name] = matmul.pop(name)
    return {name: data[name] for name in schema.AcceleratorTable.model_fields if name in data}


def _dump_host(host: Host) -> Data:
    data = _dump_part(host)
    optional = {field.name for field in fields(host) if getattr(host, field.name) == field.default} - {"cores"}
    return {name: value for name, value in data.items() if name not in optional}


def _dump_part(part: Any) -> Data:
    """Return a part as the data of its table, in which a figure without a limit is left out."""
    table = _TABLES[type(part)]
    data: Data = {"kind": get_args(table.model_fields["kind"].annotation)[0]} if "kind" in table.model_fields else {}
    for name in (field.name for field in fields(part)):
        value = getattr(part, name)
        if name == "link":
            data |= _dump_part(value)
        elif value not in (None, math.inf):
            data[_KEYS.get(name, name)] = _dump_field(table, name, value)
    return data


def _dump_field(table: type[Table], name: str, value: Any) -> Any:
    if isinstance(value, topology.Graph):
        return {"kind": "graph", "edges": list(_dump_edges(value))}
    is_mapping, dimension = _find_format(table, _KEYS.get(name, name))
    return {str(key): _thaw(item, dimension) for key, item in value} if is_mapping else _thaw(value, dimension)


def _thaw(value: Any, dimension: Dimension | None) -> Any:
    """Return a value of a part as data; ``dimension`` is that of its numbers."""
    if isinstance(value, tuple):
        return [_thaw(item, dimension) for item in value]
    if type(value) in _TABLES:
        return _dump_part(value)
    if dimension is not None:
        return format_exact(value, dimension)
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _find_format(table: type[Table], name: str) -> tuple[bool, Dimension | None]:
    """Return whether a field of a table is a mapping, and the dimension of its quantities; None where it has none."""
    annotations = list(_walk_annotation(table.model_fields[name].rebuild_annotation()))
    dimensions = (mark.dimension for mark in annotations if isinstance(mark, Quantity))
    return any(get_origin(part) is dict for part in annotations), next(dimensions, None)


def _walk_annotation(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all that it consists of."""
    yield annotation
    for argument in get_args(annotation):
        yield from _walk_annotation(argument)


def _dump_edges(graph: topology.Graph) -> Iterator[Data]:
    """Yield the edges of a graph; an edge that is followed by its reverse is written once, with ``both``."""
    has_reverse = False
    for (start, end, link), following in zip(graph.edges, (*graph.edges[1:], None), strict=True):
        if has_reverse:  # this edge is the reverse of the one before
            has_reverse = False
            continue
        has_reverse = following == (end, start, link)
        yield {"from": start, "to": end, **_dump_part(link), **({"both": True} if has_reverse else {})}


def _dump_curve(curve: CollectiveCurve) -> Data:
    points = [
        [int(size) if size == int(size) else size, format_exact(time, Dimension.TIME)] for size, time in curve.points
    ]
    return {"collective": str(curve.collective), "ranks": curve.ranks, "points": points}


_UNITS = {
    Dimension.TIME: ("s", "ms", "us"),
    Dimension.SIZE: ("TiB", "GiB", "GB", "MiB", "KiB"),
    Dimension.BANDWIDTH: ("TB/s", "GB/s", "MB/s"),
    Dimension.COMPUTE_RATE: ("TFLOP/s", "GFLOP/s"),
}
_BASE_UNITS = {Dimension.TIME: "s", Dimension.SIZE: "B", Dimension.BANDWIDTH: "B/s", Dimension.COMPUTE_RATE: "FLOP/s"}


def format_exact(value: float, dimension: Dimension) -> str:
    """Return a value in SI units as the shortest text with a unit that reads back as the very same number.

    >>> format_exact(80 * 2.0**30, Dimension.SIZE)
    '80 GiB'
    """
    value = float(value)
    # repr reads back equal always; fewer digits or another unit give shorter text where they do too
    candidates = [f"{value:.15g} {_BASE_UNITS[dimension]}", f"{value!r} {_BASE_UNITS[dimension]}"]
    for unit in _UNITS[dimension]:
        scaled = value / units.UNITS[dimension][unit]
        if 0.1 <= scaled < 100_000:
            candidates.append(f"{scaled:.12g} {unit}")
            candidates.append(f"{scaled:.15g} {unit}")
    exact_texts = [text for text in candidates if units.parse(text, dimension) == value]
    return min(exact_texts, key=len)
