"""The techniques of a plan, each in its simplest form, and the plans that combine one, two or three of them.

Techniques come from the registries of schedules, attentions, optimizers and so on, not from a list of what runs. What
the executor learns to run thus appears in the matrix of plans by itself, and what it refuses appears with its reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, NamedTuple

from meshwise.executor.job import Job
from meshwise.executor.supported import unsupported
from meshwise.simulator.brief import in_brief
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, homogeneous
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
from meshwise.strategies.schedules.schedule import SCHEDULES, rule_of

LAYERS, SEQUENCE, BATCH, MICROBATCHES = 4, 16, 16, 4
STEPS = 3
SPEC = Transformer(LAYERS, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=256, tied_embeddings=False)
"""The model that every plan of the matrix trains; techniques may change some of its fields."""
SIZES = ("data", "tensor", "tensor_rows", "pipeline", "context", "expert", "chunks")
"""Fields of a layout for which a combination takes the largest value of its techniques."""
_WRITTEN = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1I3 1I2 1I1 1I0 1W0 1W1 1W2 1W3"


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


@in_brief
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
    return (*_data(), *_inside(), *_pipelines(), *_memory(), *_training(), *_models())


def _data() -> Iterator[Technique]:
    yield _technique("data", "data", data=2)
    yield _technique("data", "data, no overlap", data=2, overlap_gradients=False)
    yield _technique("data", "uneven batches", data=2, microbatch=(3, 1))
    for reduction in GRADIENT_REDUCTIONS[1:]:
        yield _technique("data", reduction.replace("_", " "), data=2, gradient_reduction=reduction)
    for stage in ZERO_STAGES[1:]:
        yield _technique("ZeRO", f"ZeRO {stage}", data=2, zero=stage)
    yield _technique("ZeRO", "ZeRO 3, kept gathered", data=2, zero=3, reshard_after_forward=False)
    for stage in ZERO_STAGES[1:]:
        yield _technique("ZeRO", f"ZeRO {stage}, hybrid", data=4, zero=stage, zero_shards=2)


def _inside() -> Iterator[Technique]:
    yield _technique("tensor", "tensor", tensor=2)
    yield _technique("tensor", "sequence parallel", tensor=2, sequence_parallel=True)
    yield _technique("tensor", "tensor, overlapped", tensor=2, sequence_parallel=True, overlap_tensor=True)
    yield _technique("tensor", "tensor, 2-D", tensor=2, tensor_rows=2)
    for how in Attention:
        yield _technique("context", f"context, {how.replace('_', ' ')}", context=2, attention=how)
    experts = {"experts": Experts(count=4, top_k=2, ffn=32), "ffn_kind": "swiglu"}
    yield Technique("expert", "experts", {}, experts, {})
    yield Technique("expert", "expert parallel", {"data": 2, "expert": 2}, experts, {})


def _pipelines() -> Iterator[Technique]:
    for name, rule in SCHEDULES.items():
        chunks = 1 if rule.chunks[1] == 1 else 2
        yield _technique("schedule", name.replace("_", " "), pipeline=2, schedule=name, chunks=chunks)
    yield _technique("schedule", "written order", pipeline=2, schedule=_WRITTEN)
    yield _technique("pipeline", "uneven stages", pipeline=2, stages=uneven)
    yield _technique("pipeline", "scatter and gather", pipeline=2, tensor=2, scatter_gather=True)


def _memory() -> Iterator[Technique]:
    for how in (Recompute.SELECTIVE, Recompute.FULL):
        yield _technique("recompute", f"{how} recompute", recompute=how)
    yield _technique("recompute", "first layers", recompute=FirstLayers(Recompute.FULL, 1))
    yield _technique("recompute", "stage by stage", pipeline=2, recompute=_alternating)
    yield _technique("recompute", "some operators", recompute=SomeOperators(("activation",)))
    yield _technique("offload", "optimizer offload", offload=offloading(["optimizer"]))
    yield _technique("offload", "activation offload", offload=offloading(["activations"]))
    on_host = offloading(["optimizer", "parameters"])  # the host that keeps parameters updates them
    yield _technique("offload", "parameter offload", data=2, zero=3, offload=on_host)


def _training() -> Iterator[Technique]:
    yield Technique("training", "clipping", {}, {}, {"gradient_clipping": True})
    for name in OPTIMIZERS:
        if name != Training(1, 1).optimizer:
            yield Technique("training", name, {}, {}, {"optimizer": name})


def _models() -> Iterator[Technique]:
    yield Technique("model", "tied ends", {}, {"tied_embeddings": True}, {})
    yield Technique("model", "Llama", {}, {"kv_heads": 2, "ffn_kind": "swiglu", "positions": "rotary"}, {})
    yield Technique("model", "query norms", {}, {"qk_norm": True}, {})
    yield Technique("model", "unfused attention", {}, {"attention": "unfused"}, {})


def _technique(kind: str, name: str, **layout: Any) -> Technique:
    return Technique(kind, name, layout, {}, {})


def uneven(stages: int) -> tuple[int, ...]:
    """Return uneven stages: the first stage has one layer more than an even share, the last stage one less.

    >>> uneven(2), uneven(4)
    ((3, 1), (2, 1, 1, 0))
    """
    even = [LAYERS // stages] * stages
    return (even[0] + 1, *even[1:-1], even[-1] - 1)


def _alternating(stages: int) -> PerStage:
    return PerStage(tuple((Recompute.FULL, Recompute.SELECTIVE)[stage % 2] for stage in range(stages)))


def combine(chosen: Sequence[Technique]) -> Combination:
    """Return the combination of one or more techniques; those that need no parallel axis run on two data ranks."""
    names = tuple(technique.name for technique in chosen)
    try:
        layout, model, training = (_together(parts) for parts in zip(*map(_parts, chosen), strict=True))
    except _Clash as clash:
        return Combination(names, None, clash=f"a plan has one {clash}")
    asked, spec, step = _layout(layout), replace(SPEC, **model), Training(BATCH, SEQUENCE, "fp64", **training)
    problem = Problem(build(spec, SEQUENCE, step.precision), machine(_ranks(asked)), step)
    if broken := tuple(f"{each.field}: {each.message}" for each in violations(problem, asked)):
        return Combination(names, None, broken)
    plan = complete(problem, asked)
    if reasons := unsupported(spec, step, plan):
        return Combination(names, None, reasons)
    return Combination(names, Job(spec, step, plan, STEPS, dump=True, profile=False, timeout=300.0))


class _Clash(Exception):
    """Two values of one field."""


def _parts(technique: Technique) -> tuple[Mapping[str, Any], ...]:
    return technique.layout, technique.model, technique.training


def _together(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of all parts in one mapping, with the largest value of every field in `SIZES`."""
    met: dict[str, Any] = {}
    for field, value in chain.from_iterable(part.items() for part in parts):
        if field in SIZES:
            met[field] = max(met.get(field, 1), value)
        elif met.setdefault(field, value) != value:
            raise _Clash(field)
    return met


def _layout(fields: Mapping[str, Any]) -> Layout:
    """Return a layout with at least 2 ranks and, where the data degree allows it, `MICROBATCHES` microbatches."""
    chosen = dict(fields)
    if all(chosen.get(axis, 1) == 1 for axis in SIZES):
        chosen["data"] = 2
    if "microbatch" in chosen:
        chosen["microbatch"] *= chosen["data"] // len(chosen["microbatch"])
    else:
        chosen["microbatch"] = max(BATCH // (MICROBATCHES * chosen.get("data", 1)), 1)
    rule = rule_of(chosen.get("schedule", Layout().schedule))
    stages = rule.num_stages(chosen.get("pipeline", 1), chosen.get("chunks", 1))
    return Layout(**{name: value(stages) if callable(value) else value for name, value in chosen.items()})


def _ranks(layout: Layout) -> int:
    return layout.ranks


def machine(devices: int) -> Cluster:
    """Return a machine large enough for a tiny model; no run depends on its figures."""
    core = Accelerator("core", (("fp64", 5e10),), memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    return homogeneous("machine", core, Host("host", 2.0**34), 1, devices, link, link)


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


def plans() -> Iterator[Combination]:
    """Yield every technique, every pair, and every three of `TRIPLES`, always in the same order."""
    every = techniques()
    yield from (combine([technique]) for technique in every)
    yield from map(combine, combinations(every, 2))
    yield from map(combine, combinations([technique for technique in every if technique.name in TRIPLES], 3))
