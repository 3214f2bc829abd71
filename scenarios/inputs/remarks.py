"""Remarks on an input: the assumptions that its result rests on, and figures that are probably mistyped.

Assumptions are defaults and catalogue figures that the scenario does not write down. A figure gets a remark where it is
possible but far from what is usual: bits taken for bytes, or three zeros too many.

Mistyped units of a machine (GB/s for TB/s, Gb/s for GB/s, GFLOP/s for TFLOP/s) are found by ratios: rates differ by
factors of thousands, from a CPU core to a GB300, but their ratios to the bandwidth of the device's memory do not. Where
a ratio is outside the range of the catalogue, and one figure times 1000, 1/1000 or 1/8 brings all ratios inside, that
figure gets a remark.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

from pydantic import BaseModel

from meshwise.scenarios.files.errors import Fault
from meshwise.scenarios.files.reader import Document, FieldPath
from meshwise.scenarios.inputs.plan_table import build_layout
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
from meshwise.scenarios.schema.scenario import (
    FileCluster,
    MeasuredTable,
    PresetCluster,
    ScenarioTable,
    TrainingTable,
    build_training,
)
from meshwise.simulator.catalog import accelerator, cluster, cluster_names, list_assumed_figures
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar
from meshwise.simulator.models.model import Model
from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_size, format_time
from meshwise.strategies.plan.layout import DECISIONS

_NEUTRAL_CHOICES = frozenset({"context", "expert", "tensor_rows", "offload"})
"""Choices of a plan whose default does nothing: they need no line among the assumptions."""


def list_assumptions(table: ScenarioTable, spec: Model, plan: Any, cluster: Cluster) -> tuple[str, ...]:
    """Return a line for every default and catalogue figure that the results of a scenario rest on."""
    result = [*list_machine_assumptions(cluster, offloads=plan is not None and bool(plan.offload))]
    for name in ("preset", "hf_config"):
        if (source := getattr(table.model, name)) is not None:
            result.append(f"model.{name} {source} means {_describe_fields(spec)}")
    if table.model.graph is not None:
        result.append(f"model.graph {table.model.graph} means {spec.summary}, as captured")
    elif table.model.transformer is not None:
        transformer = table.model.transformer
        result += _list_defaults("model.transformer", transformer, {"kv_heads": transformer.heads})
        if transformer.experts is not None:
            result += _list_defaults("model.transformer.experts", transformer.experts)
    training = build_training(table.training)
    is_same = training.gradient_bytes == training.parameter_bytes
    result += _list_defaults("training", table.training, {"gradient_precision": "same" if is_same else "fp32"})
    if isinstance(table.cluster, PresetCluster):
        result.append(f"cluster.preset {table.cluster.preset} has the figures of the catalogue")
        for field, reason in list_assumed_figures(table.cluster.preset).items():
            result.append(f"cluster.preset {table.cluster.preset} assumes {field}: {reason}")
    elif isinstance(table.cluster, FileCluster):
        result.append(f"cluster.file {table.cluster.file} has the figures of that file")
    if isinstance(plan, PlanTable):
        neutral_names = _NEUTRAL_CHOICES | {
            name for name, decision in DECISIONS.items() if not decision.changes(build_layout(plan))
        }
        result += [
            line for line in _list_defaults("plan", plan) if line.split()[0].removeprefix("plan.") not in neutral_names
        ]
        if plan.overlap_tensor:
            result.append("chunks of a product beside tensor communication take as long as the whole product")
        if plan.tensor_rows > 1:
            result.append("a product over a grid runs when its operands are gathered: SUMMA's steps do not overlap")
    return tuple(result)


def list_machine_assumptions(cluster: Cluster, *, offloads: bool) -> Iterator[str]:
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


def _describe_fields(spec: Any) -> str:
    """Return in words the names and values of a dataclass's fields that are not None."""
    fields = ((name, getattr(spec, name)) for name in spec.__dataclass_fields__ if name != "name")
    return ", ".join(f"{name} {_format_field(value)}" for name, value in fields if value is not None)


def _list_defaults(section: str, table: BaseModel, derived: dict[str, Any] | None = None) -> list[str]:
    """Return one line for each field with a default, except those whose default is None."""
    defaults = {name: getattr(table, name) for name in type(table).model_fields if name not in table.model_fields_set}
    values = {name: (derived or {}).get(name, value) for name, value in defaults.items()}
    return [
        f"{section}.{name} is {_format_field(value)} (default)" for name, value in values.items() if value is not None
    ]


def _format_field(value: Any) -> str:
    if is_dataclass(value):
        return f"({_describe_fields(value)})"
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


def _find_ranges(figures: Iterable[tuple[str, float]]) -> dict[str, tuple[float, float]]:
    """Return by kind the lowest and highest figure."""
    values: dict[str, list[float]] = defaultdict(list)
    for kind, value in figures:
        values[kind].append(value)
    return {kind: (min(members), max(members)) for kind, members in values.items()}


@lru_cache(maxsize=1)
def _find_catalogue_ranges() -> dict[str, tuple[float, float]]:
    return _find_ranges((rate.kind, rate.value) for machine in _list_machines() for rate in machine)


@lru_cache(maxsize=1)
def _list_machines() -> tuple[tuple[Rate, ...], ...]:
    """Return the rates of every machine of the catalogue."""
    nodes = (cluster(name).first_node for name in cluster_names())
    return tuple(
        (
            Rate(_MEMORY, node.accelerator.memory_bandwidth),
            *(Rate(_PEAK, peak) for _, peak in node.accelerator.peak_flops),
            Rate(_INTRA_NODE, node.network.link.bandwidth),
            Rate(_INTER_NODE, node.nic.bandwidth),
        )
        for node in nodes
    )


def _list_memory_ratios(machine: Iterable[Rate]) -> Iterator[tuple[str, float]]:
    """Return an iterator over the kind of every rate of a machine and its ratio to the memory bandwidth."""
    rates = tuple(machine)
    memory = next(rate.value for rate in rates if rate.kind == _MEMORY)
    return ((rate.kind, rate.value / memory) for rate in rates if rate.kind != _MEMORY)


@lru_cache(maxsize=1)
def _find_usual_ratios() -> dict[str, tuple[float, float]]:
    ranges = _find_ranges(pair for machine in _list_machines() for pair in _list_memory_ratios(machine))
    return {kind: (lowest / _SLACK, highest * _SLACK) for kind, (lowest, highest) in ranges.items()}


def _is_plausible(machine: Iterable[Rate]) -> bool:
    usual_ratios = _find_usual_ratios()
    return all(usual_ratios[kind][0] <= ratio <= usual_ratios[kind][1] for kind, ratio in _list_memory_ratios(machine))


def find_mistyped_units(
    table: ClusterTable | MixedClusterTable | NodeTypeTable, path: FieldPath = ()
) -> Iterator[Slip]:
    """Yield for each kind of node the figure that is unusual and would be usual in another unit, if there is one."""
    if isinstance(table, MixedClusterTable):
        for index, kind in enumerate(table.node_types):
            yield from find_mistyped_units(kind, (*path, "node_types", index))
        return
    machine = tuple(_list_rates(table, path))
    if _is_plausible(machine):
        return
    # several figures may mend the ratios: the likeliest slip is the one that brings the machine nearest to a known one
    candidates = [
        (_find_distance(mended_machine), rate, scale)
        for index, rate in enumerate(machine)
        if rate.path is not None
        for scale in (*_SLIPS, *([_BITS] if rate.kind in (_INTRA_NODE, _INTER_NODE) else []))
        if _is_plausible(
            mended_machine := (*machine[:index], rate._replace(value=rate.value * scale), *machine[index + 1 :])
        )
    ]
    if candidates:
        _, rate, scale = min(candidates, key=lambda item: item[0])
        assert rate.path is not None
        yield Slip(rate.path, _format_message(rate, scale))


def _format_message(rate: Rate, scale: float) -> str:
    formatter = _WORDS[rate.kind]
    lowest, highest = map(formatter, _find_catalogue_ranges()[rate.kind])
    bits = f"{rate.value / 1e9:.4g} Gb/s, which are " if scale == _BITS else ""
    return (
        f"is unusual beside the machine's other figures: {formatter(rate.value)}, the catalogue's machines have "
        f"{lowest} to {highest}; probably {bits}{formatter(rate.value * scale)}"
    )


def _list_rates(table: ClusterTable | NodeTypeTable, path: FieldPath) -> Iterator[Rate]:
    device = table.accelerator
    if device.preset is not None:
        preset_device = accelerator(device.preset)
        yield Rate(_MEMORY, preset_device.memory_bandwidth)
    else:
        assert device.memory_bandwidth and device.peak  # the schema asks for them
        yield Rate(_MEMORY, device.memory_bandwidth, (*path, "accelerator", _MEMORY))
        for dtype, peak in device.peak.items():
            yield Rate(_PEAK, peak, (*path, "accelerator", _PEAK, dtype))
    yield Rate(_INTRA_NODE, table.intra_node.bandwidth, (*path, _INTRA_NODE, "bandwidth"))
    yield Rate(_INTER_NODE, table.inter_node.bandwidth, (*path, _INTER_NODE, "bandwidth"))


def _find_distance(machine: tuple[Rate, ...]) -> float:
    """Return the distance to the nearest machine of the catalogue: the sum over rates of the logarithms of ratios."""
    return min(
        sum(
            min(abs(log(rate.value / known_rate.value)) for known_rate in known_machine if known_rate.kind == rate.kind)
            for rate in machine
        )
        for known_machine in _list_machines()
    )


class UsualRange(NamedTuple):
    """The usual range of a field in SI units, outside of which a value gets a remark."""

    minimum: float
    maximum: float
    formatter: Callable[[float], str] = "{:,.15g}".format


_LATENCY = UsualRange(0, 1e-2, format_time)
_LAUNCH = UsualRange(0, 1e-2, format_time)
_NODE_BANDWIDTH = UsualRange(0.5e9, 2e12, format_bandwidth)
_NETWORK_BANDWIDTH = UsualRange(0.1e9, 200e9, format_bandwidth)
_NODES = UsualRange(1, 100_000)
_USUAL_RANGES: dict[tuple[type[BaseModel], str], UsualRange] = {
    (AcceleratorTable, "memory"): UsualRange(2.0**30, 2.0**40, format_size),
    (AcceleratorTable, "memory_bandwidth"): UsualRange(1e9, 100e12, format_bandwidth),
    (AcceleratorTable, "peak"): UsualRange(1e9, 100e15, format_compute_rate),
    (AcceleratorTable, "launch"): _LAUNCH,
    (HostTable, "memory"): UsualRange(2.0**30, 2.0**47, format_size),
    (HostTable, "memory_bandwidth"): UsualRange(1e9, 10e12, format_bandwidth),
    (HostTable, "launch"): _LAUNCH,
    (HostTable, "pcie"): _NODE_BANDWIDTH,
    (ClusterTable, "intra_node"): _NODE_BANDWIDTH,
    (ClusterTable, "inter_node"): _NETWORK_BANDWIDTH,
    (ClusterTable, "nodes"): _NODES,
    (NodeTypeTable, "intra_node"): _NODE_BANDWIDTH,
    (NodeTypeTable, "inter_node"): _NETWORK_BANDWIDTH,
    (PresetCluster, "nodes"): _NODES,
    (FileCluster, "nodes"): _NODES,
    (TrainingTable, "global_batch"): UsualRange(1, 1_000_000),
    (TrainingTable, "sequence"): UsualRange(1, 10_000_000),
    (TransformerTable, "layers"): UsualRange(1, 1000),
    (TransformerTable, "hidden"): UsualRange(8, 200_000),
    (TransformerTable, "vocab"): UsualRange(2, 5_000_000),
    (MeasuredTable, "step_time"): UsualRange(1e-5, 3600, format_time),
}
"""Ranges by table and field; for a link, of its bandwidth. They exceed the catalogue by a factor of at least 2."""
_MAX_STEP_TOKENS = 1e9
"""Most usual tokens of a step; published steps have less than a tenth of it."""


def list_unusual(table: BaseModel, document: Document, path: FieldPath = ()) -> tuple[Fault, ...]:
    """Return a remark for each unusual figure of a table that stands at ``path`` of a document."""
    slips = {path: document.fault(path, message) for path, message in _list_slips(table, path)}
    faults = [
        fault
        for fault in _list_unusual_fields(table, document, path)
        if fault.field not in {slip.field for slip in slips.values()}
    ]
    faults += slips.values()
    if isinstance(table, ScenarioTable):
        tokens = table.training.global_batch * (table.training.sequence or 1)
        if tokens > _MAX_STEP_TOKENS:
            usual_text = f"usual are up to {_MAX_STEP_TOKENS:.3g}"
            message = f"global_batch * sequence is unusual: {tokens:.3g} tokens a step, {usual_text}"
            faults.append(document.fault(("training", "global_batch"), message))
    return tuple(faults)


def _list_slips(table: BaseModel, path: FieldPath) -> Iterator[Slip]:
    """Yield the figures of a cluster, or of a scenario's cluster, that a mistyped unit explains."""
    if isinstance(table, ScenarioTable):
        table, path = table.cluster, (*path, "cluster")
    if isinstance(table, ClusterTable | MixedClusterTable):
        yield from find_mistyped_units(table, path)


def _list_unusual_fields(table: BaseModel, document: Document, path: FieldPath) -> Iterator[Fault]:
    for name in type(table).model_fields:
        value, field_path = getattr(table, name), (*path, name)
        usual_range = _USUAL_RANGES.get((type(table), name))
        if isinstance(value, LinkTable):
            yield from _check_link(value, usual_range, document, field_path)
        elif usual_range is not None and isinstance(value, dict):
            yield from (
                fault
                for key, item in value.items()
                for fault in _check_range(item, usual_range, document, (*field_path, key))
            )
        elif usual_range is not None and value is not None:
            yield from _check_range(value, usual_range, document, field_path)
        if isinstance(value, BaseModel) and name in table.model_fields_set:
            yield from _list_unusual_fields(value, document, field_path)
        elif name == "node_types":
            for index, kind in enumerate(value):
                yield from _list_unusual_fields(kind, document, (*field_path, index))


def _check_link(
    link: LinkTable, usual_range: UsualRange | None, document: Document, path: FieldPath
) -> Iterator[Fault]:
    yield from _check_range(link.latency, _LATENCY, document, (*path, "latency"))
    yield from _check_range(link.launch, _LAUNCH, document, (*path, "launch"))
    if usual_range is not None:
        yield from _check_range(link.bandwidth, usual_range, document, (*path, "bandwidth"))


def _check_range(value: Any, usual_range: UsualRange, document: Document, path: FieldPath) -> Iterator[Fault]:
    if usual_range.minimum <= value <= usual_range.maximum:
        return
    range_text = (
        f"usual are {usual_range.formatter(usual_range.minimum)} to {usual_range.formatter(usual_range.maximum)}"
        if usual_range.minimum
        else "usual is less"
    )
    is_bits = usual_range.formatter is format_bandwidth and usual_range.minimum <= value / 8 <= usual_range.maximum
    meant_text = f"; {value / 1e9:.4g} Gb/s are {format_bandwidth(value / 8)}" if is_bits else ""
    yield document.fault(path, f"is unusual: {usual_range.formatter(value)}, {range_text}{meant_text}")
