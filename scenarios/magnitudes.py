"""Figures that are possible and yet probably mistyped: a unit of bits taken for bytes, or three zeros too many."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from scenarios.cluster_schema import AcceleratorTable, ClusterTable, HostTable, MixedClusterTable, NodeTypeTable
from scenarios.errors import Fault
from scenarios.fabric_schema import LinkTable
from scenarios.mistyped_units import Slip, mistyped_units
from scenarios.model_schema import TransformerTable
from scenarios.reader import Document, FieldPath
from scenarios.schema import FileCluster, MeasuredTable, PresetCluster, ScenarioTable, TrainingTable
from simulator.units import format_bandwidth, format_compute_rate, format_size, format_time


class Usual(NamedTuple):
    """The range of a field in SI units: beyond it stands a remark."""

    least: float
    most: float
    words: Callable[[float], str] = "{:,.15g}".format


_LATENCY = Usual(0, 1e-2, format_time)
_LAUNCH = Usual(0, 1e-2, format_time)
_INSIDE = Usual(0.5e9, 2e12, format_bandwidth)
_BETWEEN = Usual(0.1e9, 200e9, format_bandwidth)
_NODES = Usual(1, 100_000)
_USUAL: dict[tuple[type[BaseModel], str], Usual] = {
    (AcceleratorTable, "memory"): Usual(2.0**30, 2.0**40, format_size),
    (AcceleratorTable, "memory_bandwidth"): Usual(1e9, 100e12, format_bandwidth),
    (AcceleratorTable, "peak"): Usual(1e9, 100e15, format_compute_rate),
    (AcceleratorTable, "launch"): _LAUNCH,
    (HostTable, "memory"): Usual(2.0**30, 2.0**47, format_size),
    (HostTable, "memory_bandwidth"): Usual(1e9, 10e12, format_bandwidth),
    (HostTable, "launch"): _LAUNCH,
    (HostTable, "pcie"): _INSIDE,
    (ClusterTable, "intra_node"): _INSIDE,
    (ClusterTable, "inter_node"): _BETWEEN,
    (ClusterTable, "nodes"): _NODES,
    (NodeTypeTable, "intra_node"): _INSIDE,
    (NodeTypeTable, "inter_node"): _BETWEEN,
    (PresetCluster, "nodes"): _NODES,
    (FileCluster, "nodes"): _NODES,
    (TrainingTable, "global_batch"): Usual(1, 1_000_000),
    (TrainingTable, "sequence"): Usual(1, 10_000_000),
    (TransformerTable, "layers"): Usual(1, 1000),
    (TransformerTable, "hidden"): Usual(8, 200_000),
    (TransformerTable, "vocab"): Usual(2, 5_000_000),
    (MeasuredTable, "step_time"): Usual(1e-5, 3600, format_time),
}
"""By table and field; of links it is the bandwidth. Ranges hold every machine of the catalogue twice over, at least."""
_LONGEST_STEP = 1e9
"""Tokens of a step: published ones are below a tenth of it."""


def unusual(table: BaseModel, document: Document, path: FieldPath = ()) -> tuple[Fault, ...]:
    """Return a remark for each figure of a table, at ``path`` of a document, that is far from what is usual."""
    slips = {path: document.fault(path, message) for path, message in _slips(table, path)}
    found = [fault for fault in _unusual(table, document, path) if fault.field not in {f.field for f in slips.values()}]
    found += slips.values()
    if isinstance(table, ScenarioTable):
        tokens = table.training.global_batch * table.training.sequence
        if tokens > _LONGEST_STEP:
            message = (
                f"global_batch * sequence is unusual: {tokens:.3g} tokens a step, usual are up to {_LONGEST_STEP:.3g}"
            )
            found.append(document.fault(("training", "global_batch"), message))
    return tuple(found)


def _slips(table: BaseModel, path: FieldPath) -> Iterator[Slip]:
    """Yield the figures of a cluster, or of that of a scenario, that only a mistyped unit explains."""
    if isinstance(table, ScenarioTable):
        table, path = table.cluster, (*path, "cluster")
    if isinstance(table, ClusterTable | MixedClusterTable):
        yield from mistyped_units(table, path)


def _unusual(table: BaseModel, document: Document, path: FieldPath) -> Iterator[Fault]:
    for name in type(table).model_fields:
        value, place = getattr(table, name), (*path, name)
        usual = _USUAL.get((type(table), name))
        if isinstance(value, LinkTable):
            yield from _of_link(value, usual, document, place)
        elif usual is not None and isinstance(value, dict):
            yield from (fault for key, each in value.items() for fault in _of(each, usual, document, (*place, key)))
        elif usual is not None and value is not None:
            yield from _of(value, usual, document, place)
        if isinstance(value, BaseModel) and name in table.model_fields_set:
            yield from _unusual(value, document, place)
        elif name == "node_types":
            for index, kind in enumerate(value):
                yield from _unusual(kind, document, (*place, index))


def _of_link(link: LinkTable, usual: Usual | None, document: Document, path: FieldPath) -> Iterator[Fault]:
    yield from _of(link.latency, _LATENCY, document, (*path, "latency"))
    yield from _of(link.launch, _LAUNCH, document, (*path, "launch"))
    if usual is not None:
        yield from _of(link.bandwidth, usual, document, (*path, "bandwidth"))


def _of(value: Any, usual: Usual, document: Document, path: FieldPath) -> Iterator[Fault]:
    if usual.least <= value <= usual.most:
        return
    range_ = f"usual are {usual.words(usual.least)} to {usual.words(usual.most)}" if usual.least else "usual is less"
    bits = usual.words is format_bandwidth and usual.least <= value / 8 <= usual.most
    meant = f"; {value / 1e9:.4g} Gb/s are {format_bandwidth(value / 8)}" if bits else ""
    yield document.fault(path, f"is unusual: {usual.words(value)}, {range_}{meant}")
