"""Remarks on an input: the assumptions that its result rests on, and figures that are probably mistyped.

Assumptions are defaults and catalogue figures that the scenario does not write down. A figure gets a remark where it is
possible but far from what is usual: bits taken for bytes, or three zeros too many.

Mistyped units of a machine (GB/s for TB/s, Gb/s for GB/s, GFLOP/s for TFLOP/s) are found by ratios: rates differ by
factors of thousands, from a CPU core to a GB300, but their ratios to the bandwidth of the device's memory do not. Where
a ratio is outside the range of the catalogue, and one figure times 1000, 1/1000 or 1/8 brings all ratios inside, that
figure gets a remark.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

from pydantic import BaseModel

from meshwise.scenarios.files.errors import Fault
from meshwise.scenarios.files.fields import NotYet
from meshwise.scenarios.files.reader import Document, FieldPath
from meshwise.scenarios.inputs.plan_table import layout_in
from meshwise.scenarios.schema.cluster import (
    AcceleratorTable,
    ClusterTable,
    HostTable,
    LinkTable,
    MixedClusterTable,
    NodeTypeTable,
)
from meshwise.scenarios.schema.model import TransformerTable
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.scenarios.schema.scenario import FileCluster, MeasuredTable, PresetCluster, ScenarioTable, TrainingTable
from meshwise.simulator.catalog import accelerator, assumed, cluster, cluster_names
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar
from meshwise.simulator.models.model import Model
from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_size, format_time
from meshwise.strategies.plan.layout import DECISIONS
from meshwise.strategies.plan.problem import Training

_WITHOUT = frozenset({"context", "expert", "tensor_rows", "offload"})
"""Choices of a plan whose default does nothing: they need no line among the assumptions."""


def assumptions(table: ScenarioTable, spec: Model, plan: Any, cluster: Cluster) -> tuple[str, ...]:
    """Return a line for every default and catalogue figure that the results of a scenario rest on."""
    result = [*machine_assumptions(cluster, offloads=plan is not None and bool(plan.offload))]
    if table.model.preset is not None:
        result.append(f"model.preset {table.model.preset} means {_sizes(spec)}")
    elif table.model.hf_config is not None:
        result.append(f"model.hf_config {table.model.hf_config} means {_sizes(spec)}")
    elif table.model.graph is not None:
        result.append(f"model.graph {table.model.graph} means {spec.summary}, as captured")
    elif table.model.transformer is not None:
        written = table.model.transformer
        result += _defaults("model.transformer", written, {"kv_heads": written.heads})
        if written.experts is not None:
            result += _defaults("model.transformer.experts", written.experts)
    training = Training(**table.training.model_dump())
    same = training.gradient_bytes == training.parameter_bytes
    result += _defaults("training", table.training, {"gradient_precision": "same" if same else "fp32"})
    if isinstance(table.cluster, PresetCluster):
        result.append(f"cluster.preset {table.cluster.preset} has the figures of the catalogue")
        found = assumed(table.cluster.preset)
        result += [f"cluster.preset {table.cluster.preset} assumes {field}: {why}" for field, why in found.items()]
    elif isinstance(table.cluster, FileCluster):
        result.append(f"cluster.file {table.cluster.file} has the figures of that file")
    if isinstance(plan, PlanTable):
        without = _WITHOUT | {name for name, item in DECISIONS.items() if not item.changes(layout_in(plan))}
        result += [line for line in _defaults("plan", plan) if line.split()[0].removeprefix("plan.") not in without]
        if plan.overlap_tensor:
            result.append("chunks of a product beside tensor communication take as long as the whole product")
        if plan.tensor_rows > 1:
            result.append("a product over a grid runs when its operands are gathered: SUMMA's steps do not overlap")
    return tuple(result)


def machine_assumptions(cluster: Cluster, *, offloads: bool) -> Iterator[str]:
    """Yield the assumptions about a machine; ``offloads`` says whether the plan offloads anything to hosts."""
    if not cluster.speeds and not cluster.link_speeds:
        yield "every device and link is as good as the next: no stragglers"
    if isinstance(cluster.fabric, Crossbar):
        yield "the fabric between nodes has full bisection bandwidth"
    if not cluster.tenants:
        yield "no other job uses the network"
    if cluster.overlap_slowdown == 1:
        yield "computing is not slowed by communication beneath it"
    if all(node.host.launch == 0 for node, _ in cluster.nodes):
        yield "hosts launch kernels as fast as devices run them"
    if offloads and any(node.host.pcie is None for node, _ in cluster.nodes):
        yield "copies between devices and hosts take no time of PCIe, of which the cluster states none"


def _sizes(spec: Any) -> str:
    """Return in words the names and values of a dataclass's fields that are not None."""
    fields = ((name, getattr(spec, name)) for name in spec.__dataclass_fields__ if name != "name")
    return ", ".join(f"{name} {_text(value)}" for name, value in fields if value is not None)


def _defaults(section: str, table: BaseModel, derived: dict[str, Any] | None = None) -> list[str]:
    """Return one line for each field with a default, except those whose default is None or neutral."""
    lines = []
    for name, info in type(table).model_fields.items():
        neutral = any(isinstance(mark, NotYet) for mark in info.metadata)
        if name not in table.model_fields_set and not neutral:
            value = (derived or {}).get(name, getattr(table, name))
            if value is None:
                continue
            lines.append(f"{section}.{name} is {_text(value)} (default)")
    return lines


def _text(value: Any) -> str:
    if is_dataclass(value):
        return f"({_sizes(value)})"
    return str(value).lower() if isinstance(value, bool) else str(value)


_MEMORY = "memory_bandwidth"
_PEAK, _INTRA_NODE, _INTER_NODE = "peak", "intra_node", "inter_node"
_WORDS = {
    _MEMORY: format_bandwidth,
    _PEAK: format_compute_rate,
    _INTRA_NODE: format_bandwidth,
    _INTER_NODE: format_bandwidth,
}
_SLACK = 4.0
"""Factor by which a ratio may lie beyond the catalogue's range."""
_SLIPS = (1000.0, 1 / 1000.0)
_BITS = 1 / 8
"""The factor that mends Gb/s written as GB/s."""


class Rate(NamedTuple):
    """A rate of a machine in SI units: its kind, and the path of its field where a file states it."""

    kind: str
    value: float
    path: FieldPath | None = None


class Slip(NamedTuple):
    """A remark on a figure that is unusual and would be usual in another unit."""

    path: FieldPath
    message: str


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, tuple[float, float]]:
    """Return by kind the lowest and highest rate in the catalogue."""
    rates: dict[str, list[float]] = {}
    for machine in _machines():
        for rate in machine:
            rates.setdefault(rate.kind, []).append(rate.value)
    return {kind: (min(values), max(values)) for kind, values in rates.items()}


@lru_cache(maxsize=1)
def _machines() -> tuple[tuple[Rate, ...], ...]:
    """Return the rates of every machine of the catalogue."""
    nodes = (cluster(name).first for name in cluster_names())
    return tuple(
        (
            Rate(_MEMORY, node.accelerator.memory_bandwidth),
            *(Rate(_PEAK, peak) for _, peak in node.accelerator.peak_flops),
            Rate(_INTRA_NODE, node.network.link.bandwidth),
            Rate(_INTER_NODE, node.nic.bandwidth),
        )
        for node in nodes
    )


def _beside_memory(machine: Iterable[Rate]) -> Iterator[tuple[str, float]]:
    """Return an iterator over the kind of every rate of a machine and its ratio to the memory bandwidth."""
    rates = tuple(machine)
    memory = next(rate.value for rate in rates if rate.kind == _MEMORY)
    return ((rate.kind, rate.value / memory) for rate in rates if rate.kind != _MEMORY)


@lru_cache(maxsize=1)
def _usual_ratios() -> Mapping[str, tuple[float, float]]:
    ratios: dict[str, list[float]] = {}
    for machine in _machines():
        for kind, ratio in _beside_memory(machine):
            ratios.setdefault(kind, []).append(ratio)
    return {kind: (min(values) / _SLACK, max(values) * _SLACK) for kind, values in ratios.items()}


def _plausible(machine: Iterable[Rate]) -> bool:
    usual = _usual_ratios()
    return all(usual[kind][0] <= ratio <= usual[kind][1] for kind, ratio in _beside_memory(machine))


def mistyped_units(table: ClusterTable | MixedClusterTable | NodeTypeTable, path: FieldPath = ()) -> Iterator[Slip]:
    """Yield for each kind of node the figure that is unusual and would be usual in another unit, if there is one."""
    if isinstance(table, MixedClusterTable):
        for index, kind in enumerate(table.node_types):
            yield from mistyped_units(kind, (*path, "node_types", index))
        return
    machine = tuple(_rates(table, path))
    if _plausible(machine):
        return
    # several figures may mend the ratios: the likeliest slip is the one that brings the machine nearest to a known one
    found = [
        (_distance(mended), rate, scale)
        for index, rate in enumerate(machine)
        if rate.path is not None
        for scale in (*_SLIPS, *([_BITS] if rate.kind in (_INTRA_NODE, _INTER_NODE) else []))
        if _plausible(mended := (*machine[:index], rate._replace(value=rate.value * scale), *machine[index + 1 :]))
    ]
    if found:
        _, rate, scale = min(found, key=lambda item: item[0])
        assert rate.path is not None
        yield Slip(rate.path, _message(rate, scale))


def _message(rate: Rate, scale: float) -> str:
    words = _WORDS[rate.kind]
    least, most = map(words, _catalogue()[rate.kind])
    bits = f"{rate.value / 1e9:.4g} Gb/s, which are " if scale == _BITS else ""
    return (
        f"is unusual beside the machine's other figures: {words(rate.value)}, the catalogue's machines have {least} "
        f"to {most}; probably {bits}{words(rate.value * scale)}"
    )


def _rates(table: ClusterTable | NodeTypeTable, path: FieldPath) -> Iterator[Rate]:
    device = table.accelerator
    if device.preset is not None:
        known = accelerator(device.preset)
        yield Rate(_MEMORY, known.memory_bandwidth)
    else:
        assert device.memory_bandwidth and device.peak  # the schema asks for them
        yield Rate(_MEMORY, device.memory_bandwidth, (*path, "accelerator", _MEMORY))
        for dtype, peak in device.peak.items():
            yield Rate(_PEAK, peak, (*path, "accelerator", _PEAK, dtype))
    yield Rate(_INTRA_NODE, table.intra_node.bandwidth, (*path, _INTRA_NODE, "bandwidth"))
    yield Rate(_INTER_NODE, table.inter_node.bandwidth, (*path, _INTER_NODE, "bandwidth"))


def _distance(machine: tuple[Rate, ...]) -> float:
    """Return the distance to the nearest machine of the catalogue: the sum over rates of the logarithms of ratios."""
    return min(
        sum(min(abs(log(rate.value / other.value)) for other in known if other.kind == rate.kind) for rate in machine)
        for known in _machines()
    )


class Usual(NamedTuple):
    """The usual range of a field in SI units, outside of which a value gets a remark."""

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
"""Ranges by table and field; for a link, of its bandwidth. They exceed the catalogue by a factor of at least 2."""
_LONGEST_STEP = 1e9
"""Most usual tokens of a step; published steps have less than a tenth of it."""


def unusual(table: BaseModel, document: Document, path: FieldPath = ()) -> tuple[Fault, ...]:
    """Return a remark for each unusual figure of a table that stands at ``path`` of a document."""
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
    """Yield the figures of a cluster, or of a scenario's cluster, that a mistyped unit explains."""
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
