"""The techniques of a plan, each in its simplest form, and the plans that combine one, two or three of them.

Techniques come from the registries of schedules, attentions, optimizers and so on, not from a list of what runs. What
the executor learns to run thus appears in the matrix of plans by itself, and what it refuses appears with its reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, NamedTuple

from meshwise.executor.job import Job
from meshwise.executor.supported import find_unsupported
from meshwise.simulator.brief import with_brief_repr
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import GRADIENT_REDUCTIONS, ZERO_STAGES, Layout
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import OPTIMIZERS, Problem, Training
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES, find_rule

LAYERS, SEQUENCE, BATCH, MICROBATCHES = 4, 16, 16, 4
STEPS = 3
SPEC = Transformer(LAYERS, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=256, tied_embeddings=False)
"""The model that every plan of the matrix trains; techniques may change some of its fields."""
SIZES = ("data", "tensor", "tensor_rows", "pipeline", "context", "expert", "chunks")
"""Fields of a layout for which a combination takes the largest value of its techniques."""
_WRITTEN_ORDER = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1I3 1I2 1I1 1I0 1W0 1W1 1W2 1W3"


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique by name, and the fields that select it.

    Parameters
    ----------
    kind
        Group of techniques in the table: ``data``, ``schedule``, ...
    layout
        Fields of a `Layout`; a callable value computes the field from the number of stages.
    model, training
        Fields of the model's sizes and of the training step.
    """

    kind: str
    name: str
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]


@with_brief_repr
class Combination(NamedTuple):
    """A combination of techniques, with the job that runs it, or why it has none.

    ``reasons`` say why the plan is refused; ``clash`` says that two techniques set one field to different values.
    """

    names: tuple[str, ...]
    job: Job | None
    reasons: tuple[str, ...] = ()
    clash: str = ""

    @property
    def name(self) -> str:
        """The techniques in words."""
        return " + ".join(self.names)

    @property
    def ranks(self) -> int:
        """The number of processes that it runs on; 0 without a job."""
        return self.job.plan.mesh.num_ranks if self.job is not None else 0


def techniques() -> tuple[Technique, ...]:
    """Return all techniques: data parallelism first, then those inside layers, of pipelines, memory and training."""
    return (*_list_data(), *_list_inner(), *_list_pipelines(), *_list_memory(), *_list_training(), *_list_models())


def _list_data() -> Iterator[Technique]:
    yield _layout_technique("data", "data", data=2)
    yield _layout_technique("data", "data, no overlap", data=2, overlap_gradients=False)
    yield _layout_technique("data", "uneven batches", data=2, microbatch=(3, 1))
    for reduction in GRADIENT_REDUCTIONS[1:]:
        yield _layout_technique("data", reduction.replace("_", " "), data=2, gradient_reduction=reduction)
    for stage in ZERO_STAGES[1:]:
        yield _layout_technique("ZeRO", f"ZeRO {stage}", data=2, zero=stage)
    yield _layout_technique("ZeRO", "ZeRO 3, kept gathered", data=2, zero=3, reshard_after_forward=False)
    for stage in ZERO_STAGES[1:]:
        yield _layout_technique("ZeRO", f"ZeRO {stage}, hybrid", data=4, zero=stage, zero_shards=2)


def _list_inner() -> Iterator[Technique]:
    yield _layout_technique("tensor", "tensor", tensor=2)
    yield _layout_technique("tensor", "sequence parallel", tensor=2, sequence_parallel=True)
    yield _layout_technique("tensor", "tensor, overlapped", tensor=2, sequence_parallel=True, overlap_tensor=True)
    yield _layout_technique("tensor", "tensor, 2-D", tensor=2, tensor_rows=2)
    for attention in Attention:
        yield _layout_technique("context", f"context, {attention.replace('_', ' ')}", context=2, attention=attention)
    experts = {"experts": Experts(count=4, top_k=2, ffn=32), "ffn_kind": "swiglu"}
    yield Technique("expert", "experts", {}, experts, {})
    yield Technique("expert", "expert parallel", {"data": 2, "expert": 2}, experts, {})


def _list_pipelines() -> Iterator[Technique]:
    for name, rule in SCHEDULES.items():
        chunks = 1 if rule.chunks[1] == 1 else 2
        yield _layout_technique("schedule", name.replace("_", " "), pipeline=2, schedule=name, chunks=chunks)
    yield _layout_technique("schedule", "written order", pipeline=2, schedule=_WRITTEN_ORDER)
    yield _layout_technique("pipeline", "uneven stages", pipeline=2, stages=divide_unevenly)
    yield _layout_technique("pipeline", "scatter and gather", pipeline=2, tensor=2, scatter_gather=True)


def _list_memory() -> Iterator[Technique]:
    for recompute_choice in (Recompute.SELECTIVE, Recompute.FULL):
        yield _layout_technique("recompute", f"{recompute_choice} recompute", recompute=recompute_choice)
    yield _layout_technique("recompute", "first layers", recompute=FirstLayers(Recompute.FULL, 1))
    yield _layout_technique("recompute", "stage by stage", pipeline=2, recompute=_alternate_recompute)
    yield _layout_technique("recompute", "some operators", recompute=SomeOperators(("activation",)))
    yield _layout_technique("offload", "optimizer offload", offload=offloading(["optimizer"]))
    yield _layout_technique("offload", "activation offload", offload=offloading(["activations"]))
    on_host = offloading(["optimizer", "parameters"])  # the host that keeps parameters updates them
    yield _layout_technique("offload", "parameter offload", data=2, zero=3, offload=on_host)


def _list_training() -> Iterator[Technique]:
    yield Technique("training", "clipping", {}, {}, {"gradient_clipping": True})
    for name in OPTIMIZERS:
        if name != Training(1, 1).optimizer:
            yield Technique("training", name, {}, {}, {"optimizer": name})


def _list_models() -> Iterator[Technique]:
    yield Technique("model", "tied ends", {}, {"tied_embeddings": True}, {})
    yield Technique("model", "Llama", {}, {"kv_heads": 2, "ffn_kind": "swiglu", "positions": "rotary"}, {})
    yield Technique("model", "query norms", {}, {"qk_norm": True}, {})
    yield Technique("model", "unfused attention", {}, {"attention": "unfused"}, {})


def _layout_technique(kind: str, name: str, **layout: Any) -> Technique:
    return Technique(kind, name, layout, {}, {})


def divide_unevenly(stages: int) -> tuple[int, ...]:
    """Return uneven stages: the first stage has one layer more than an even share, the last stage one less.

    >>> divide_unevenly(2), divide_unevenly(4)
    ((3, 1), (2, 1, 1, 0))
    """
    even = [LAYERS // stages] * stages
    return (even[0] + 1, *even[1:-1], even[-1] - 1)


def _alternate_recompute(stages: int) -> PerStage:
    return PerStage(tuple((Recompute.FULL, Recompute.SELECTIVE)[stage % 2] for stage in range(stages)))


def combine(chosen: Sequence[Technique]) -> Combination:
    """Return the combination of one or more techniques; those that need no parallel axis run on two data ranks."""
    names = tuple(technique.name for technique in chosen)
    try:
        layout, model, training = (_merge_fields(parts) for parts in zip(*map(_split_fields, chosen), strict=True))
    except _Clash as clash:
        return Combination(names, None, clash=f"a plan has one {clash}")
    full_layout, spec, step = (
        _build_layout(layout),
        replace(SPEC, **model),
        Training(BATCH, SEQUENCE, "fp64", **training),
    )
    problem = Problem(build(spec, SEQUENCE, step.precision), build_machine(_count_ranks(full_layout)), step)
    if violated_rules := tuple(
        f"{violation.field}: {violation.message}" for violation in violations(problem, full_layout)
    ):
        return Combination(names, None, violated_rules)
    plan = complete(problem, full_layout)
    if reasons := find_unsupported(spec, step, plan):
        return Combination(names, None, reasons)
    return Combination(names, Job(spec, step, plan, STEPS, dump=True, profile=False, timeout=300.0))


class _Clash(Exception):
    """Two values of one field."""


def _split_fields(technique: Technique) -> tuple[Mapping[str, Any], ...]:
    return technique.layout, technique.model, technique.training


def _merge_fields(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of all parts in one mapping, with the largest value of every field in `SIZES`."""
    stated: dict[str, Any] = {}
    for field, value in chain.from_iterable(part.items() for part in parts):
        if field in SIZES:
            stated[field] = max(stated.get(field, 1), value)
        elif stated.setdefault(field, value) != value:
            raise _Clash(field)
    return stated


def _build_layout(fields: Mapping[str, Any]) -> Layout:
    """Return a layout with at least 2 ranks and, where the data degree allows it, `MICROBATCHES` microbatches."""
    layout_fields = dict(fields)
    if all(layout_fields.get(axis, 1) == 1 for axis in SIZES):
        layout_fields["data"] = 2
    if "microbatch" in layout_fields:
        layout_fields["microbatch"] *= layout_fields["data"] // len(layout_fields["microbatch"])
    else:
        layout_fields["microbatch"] = max(BATCH // (MICROBATCHES * layout_fields.get("data", 1)), 1)
    rule = find_rule(layout_fields.get("schedule", Layout().schedule))
    stages = rule.count_stages(layout_fields.get("pipeline", 1), layout_fields.get("chunks", 1))
    return Layout(**{name: value(stages) if callable(value) else value for name, value in layout_fields.items()})


def _count_ranks(layout: Layout) -> int:
    return layout.ranks


def build_machine(devices: int) -> Cluster:
    """Return a machine large enough for a tiny model; no run depends on its figures."""
    core = Accelerator("core", (("fp64", 5e10),), memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    return build_homogeneous("machine", core, Host("host", 2.0**34), 1, devices, link, link)


TRIPLES = (
    "data",
    "ZeRO 3",
    "sequence parallel",
    "context, ring",
    "expert parallel",
    "interleaved",
    "zbv",
    "full recompute",
    "clipping",
    "Llama",
)
"""Techniques that are combined in threes."""


def list_plans() -> Iterator[Combination]:
    """Yield every technique, every pair, and every three of `TRIPLES`, always in the same order."""
    all_techniques = techniques()
    yield from (combine([technique]) for technique in all_techniques)
    yield from map(combine, combinations(all_techniques, 2))
    yield from map(combine, combinations([technique for technique in all_techniques if technique.name in TRIPLES], 3))
