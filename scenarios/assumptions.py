"""What a result rests on that the scenario's author did not write down."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel

from scenarios.fields import NotYet
from scenarios.schema import FileCluster, PlanTable, PresetCluster, ScenarioTable
from simulator.catalog import assumed
from simulator.cluster import Cluster
from simulator.interconnect.kinds import Crossbar
from simulator.models.model import Model
from strategies.training import Training

_WITHOUT = frozenset({"context", "expert", "tensor_rows", "offload"})
"""Choices of a plan that, left out, mean that nothing of the kind is done."""


def assumptions(table: ScenarioTable, spec: Model, plan: Any, cluster: Cluster) -> tuple[str, ...]:
    """Return every default and catalogue figure that a result of the scenario rests on."""
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
        without = {*_WITHOUT, *_idle(plan)}
        result += [line for line in _defaults("plan", plan) if line.split()[0].removeprefix("plan.") not in without]
        if plan.overlap_tensor:
            result.append("chunks of a product beside tensor communication take as long as the whole product")
        if plan.tensor_rows > 1:
            result.append("a product over a grid runs when its operands are gathered: SUMMA's steps do not overlap")
    return tuple(result)


def _idle(plan: PlanTable) -> Iterator[str]:
    """Yield the fields that mean nothing beside others of the plan."""
    if plan.context == 1:
        yield "attention"
    if not plan.sequence_parallel:
        yield "overlap_tensor"
    if plan.zero < 1:
        yield "zero_shards"
    if plan.zero < 3:
        yield "reshard_after_forward"


def machine_assumptions(cluster: Cluster, *, offloads: bool) -> Iterator[str]:
    """Yield what is taken to be ideal about a machine, under a plan that ``offloads`` to hosts or does not."""
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
    """Return the fields of a dataclass that are not None as words."""
    fields = ((name, getattr(spec, name)) for name in spec.__dataclass_fields__ if name != "name")
    return ", ".join(f"{name} {_text(value)}" for name, value in fields if value is not None)


def _defaults(section: str, table: BaseModel, derived: dict[str, Any] | None = None) -> list[str]:
    """Return one line for each field that was left out and matters: one that means nothing when left out does not."""
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
