"""Every decision about how a training step is laid out, complete and as plain data."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isqrt
from typing import Any, NamedTuple

from simulator.cluster import Cluster
from simulator.operator_graph import OperatorGraph
from strategies.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh
from strategies.schedule import SCHEDULES, Schedule, schedule
from strategies.sharding import TENSOR_DIMS, OperatorSharding, megatron
from strategies.training import Training

PLAN_VERSION = 1


class Recompute(StrEnum):
    """Which forward activations are dropped and computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be laid out: a network, a machine and a training step."""

    graph: OperatorGraph
    cluster: Cluster
    training: Training


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of the graph, by name, that run together on one pipeline rank."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan as a user writes it: degrees and choices; `complete` makes a `Plan` of it.

    ``stages`` is ``"even"``, ``"balanced"`` or the number of layers of every stage.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    overlap_gradients: bool = True
    scatter_gather: bool = False
    stages: str | tuple[int, ...] = "even"


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan: nothing is left to derive from the problem but sizes.

    Parameters
    ----------
    stages
        Blocks of every stage; stage ``s`` is on pipeline rank ``s % pipeline``.
    shardings
        Which dims of which operators the tensor axis cuts.
    microbatch
        Sequences per microbatch and data-parallel rank.
    overlap_gradients
        Whether gradients are reduced while backward still makes others.
    scatter_gather
        Whether a stage boundary crosses in one slice a tensor rank and is gathered behind it.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    shardings: tuple[OperatorSharding, ...]
    schedule_name: str
    chunks: int
    microbatch: int
    num_microbatches: int
    zero: int
    sequence_parallel: bool
    recompute: Recompute
    overlap_gradients: bool
    scatter_gather: bool = False

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return self.mesh.size(DATA)

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return self.mesh.size(TENSOR)

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel degree."""
        return self.mesh.size(PIPELINE)

    @property
    def schedule(self) -> Schedule:
        """The order of actions on every pipeline rank."""
        return schedule(self.schedule_name, self.pipeline, self.num_microbatches, self.chunks)

    def describe(self) -> str:
        """Return the plan in one line.

        As in ``data 16 x tensor 8 x pipeline 8, interleaved (2 chunks), microbatch 1, ZeRO-1``.
        """
        parts = [f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}"]
        if self.pipeline > 1:
            parts.append(self.schedule_name + (f" ({self.chunks} chunks)" if self.chunks > 1 else ""))
        parts.append(f"{self.num_microbatches} microbatches of {self.microbatch}")
        parts += [f"ZeRO-{self.zero}"] if self.zero else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"{self.recompute} recompute"] if self.recompute is not Recompute.NONE else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data with its version."""
        return {"version": PLAN_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Plan":
        """Return the plan that ``document`` states; ``ValueError`` where it is no plan."""
        if document.get("version") != PLAN_VERSION:
            raise ValueError(f"version: a plan document of this program has version {PLAN_VERSION}")
        try:
            fields = {key: document[key] for key in cls.__dataclass_fields__}
            return cls(
                **fields
                | {
                    "mesh": Mesh(tuple(Axis(name, int(size)) for name, size in document["mesh"]["axes"])),
                    "stages": tuple(Stage(tuple(stage["blocks"])) for stage in document["stages"]),
                    "shardings": tuple(_sharding(item) for item in document["shardings"]),
                    "recompute": Recompute(document["recompute"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a plan document states every field of a plan; {error} is missing or of a wrong kind"
            ) from error


def _sharding(document: dict[str, Any]) -> OperatorSharding:
    return OperatorSharding(document["operator"], tuple((dim, tuple(axes)) for dim, axes in document["cuts"]))


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame and what holds, what was met, what would do."""

    field: str
    message: str


def violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that ``layout`` breaks for ``problem``."""
    degrees = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    small = {
        name: value
        for name, value in (degrees | {"microbatch": layout.microbatch, "chunks": layout.chunks}).items()
        if value < 1
    }
    if small:
        yield from (Violation(name, f"{name} is at least 1, met {value}") for name, value in small.items())
        return
    yield from _device_violations(problem.cluster, layout)
    yield from _tensor_violations(problem.graph, layout)
    yield from _batch_violations(problem.training, layout)
    yield from _pipeline_violations(problem, layout)
    if layout.zero not in (0, 1):
        yield Violation("zero", f"zero is 0 or 1, met {layout.zero}; nearest: 1")


def _device_violations(cluster: Cluster, layout: Layout) -> Iterator[Violation]:
    ranks = layout.data * layout.tensor * layout.pipeline
    if ranks != cluster.num_devices:
        others = layout.tensor * layout.pipeline
        near = f"; data: {cluster.num_devices // others} would do" if cluster.num_devices % others == 0 else ""
        yield Violation(
            "data",
            f"data({layout.data}) * tensor({layout.tensor}) * pipeline({layout.pipeline}) = {ranks} ranks, "
            f"cluster has {cluster.num_devices}{near}",
        )


def _tensor_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        for operator in block.operators:
            sizes |= {dim: size for dim, size in operator.dims if dim in TENSOR_DIMS}
    if layout.sequence_parallel:
        sizes["sequence"] = graph.sequence
    for dim, size in sizes.items():
        if size % layout.tensor:
            yield Violation(
                "tensor", f"tensor divides {dim}({size}), met {layout.tensor}; nearest: {_nearest(size, layout.tensor)}"
            )
    if layout.sequence_parallel and layout.tensor == 1:
        yield Violation(
            "sequence_parallel", "sequence_parallel needs tensor of at least 2, met tensor 1; nearest: false"
        )


def _batch_violations(training: Training, layout: Layout) -> Iterator[Violation]:
    each = layout.data * layout.microbatch
    if training.global_batch % each:
        field = "microbatch" if training.global_batch % layout.data == 0 else "data"
        value = layout.microbatch if field == "microbatch" else layout.data
        whole = training.global_batch // layout.data if field == "microbatch" else training.global_batch
        yield Violation(
            field,
            f"microbatch({layout.microbatch}) * data({layout.data}) = {each} divides "
            f"global_batch({training.global_batch}); nearest {field}: {_nearest(whole, value)}",
        )


def _pipeline_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    layers = num_layers(problem.graph)
    stages = layout.pipeline * layout.chunks
    if layout.schedule not in SCHEDULES:
        yield Violation("schedule", f"schedule is one of {', '.join(SCHEDULES)}, met {layout.schedule}")
        return
    if layout.schedule == "interleaved" and (layout.chunks < 2 or layout.pipeline < 2):
        yield Violation(
            "chunks", f"interleaved has chunks and pipeline of at least 2, met {layout.chunks} and {layout.pipeline}"
        )
    if layout.schedule != "interleaved" and layout.chunks != 1:
        yield Violation("chunks", f"{layout.schedule} has 1 chunk, met {layout.chunks}; nearest: schedule interleaved")
    if isinstance(layout.stages, tuple):
        if len(layout.stages) != stages or sum(layout.stages) != layers or min(layout.stages) < 0:
            yield Violation(
                "stages",
                f"stages are pipeline({layout.pipeline}) * chunks({layout.chunks}) = {stages} counts that add to "
                f"layers({layers}), met {list(layout.stages)} = {sum(layout.stages)}",
            )
    elif layout.stages not in ("even", "balanced"):
        yield Violation("stages", f"stages is even, balanced or a list of layers a stage, met {layout.stages}")
    elif layout.stages == "even" and layers % stages:
        yield Violation(
            "pipeline",
            f"pipeline({layout.pipeline}) * chunks({layout.chunks}) = {stages} stages divide layers({layers}); "
            f"nearest stages: {_nearest(layers, stages)}",
        )
    elif stages > layers:
        yield Violation("pipeline", f"pipeline * chunks = {stages} stages are at most layers({layers})")
    if layout.schedule == "interleaved" and problem.training.global_batch % (layout.data * layout.microbatch) == 0:
        count = problem.training.global_batch // (layout.data * layout.microbatch)
        if count % layout.pipeline:
            yield Violation(
                "schedule", f"interleaved: microbatches({count}) are a multiple of pipeline({layout.pipeline})"
            )


def _nearest(whole: int, value: int) -> int:
    """Return the divisor of ``whole`` nearest to ``value``, the smaller of two."""
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return min(small + [whole // d for d in small], key=lambda d: (abs(d - value), d))


def num_layers(graph: OperatorGraph) -> int:
    """Return how often the graph's repeated blocks occur in all."""
    return sum(block.repeat for block in graph.blocks if block.repeat > 1) or 1


def complete(problem: Problem, layout: Layout) -> Plan:
    """Return the complete plan that ``layout`` means for ``problem``.

    Raises
    ------
    ValueError
        Where the layout breaks a rule; the message is the first violation's.
    """
    broken = next(violations(problem, layout), None)
    if broken is not None:
        raise ValueError(f"{broken.field}: {broken.message}")
    mesh = Mesh((Axis(PIPELINE, layout.pipeline), Axis(DATA, layout.data), Axis(TENSOR, layout.tensor)))
    return Plan(
        mesh=mesh,
        stages=partition(problem.graph, layout.pipeline * layout.chunks, layout.stages),
        shardings=megatron(problem.graph, layout.sequence_parallel) if layout.tensor > 1 else (),
        schedule_name=layout.schedule,
        chunks=layout.chunks,
        microbatch=layout.microbatch,
        num_microbatches=problem.training.global_batch // (layout.data * layout.microbatch),
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        overlap_gradients=layout.overlap_gradients,
        scatter_gather=layout.scatter_gather,
    )


def partition(graph: OperatorGraph, stages: int, how: str | tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the blocks of every stage: layers by ``how``, what comes before and after at the ends.

    ``"balanced"`` evens out forward FLOP, the blocks before and after the layers included.
    """
    names = [name for name, _ in graph.occurrences]
    layers = [name for name, block in graph.occurrences if block.repeat > 1] or names[:1]
    first = names.index(layers[0])
    before, after = names[:first], names[first + len(layers) :]
    counts = _counts(graph, stages, len(layers), how)
    result: list[Stage] = []
    position = 0
    for index, count in enumerate(counts):
        blocks = layers[position : position + count]
        blocks = (before if index == 0 else []) + blocks + (after if index == stages - 1 else [])
        result.append(Stage(tuple(blocks)))
        position += count
    return tuple(result)


def _counts(graph: OperatorGraph, stages: int, layers: int, how: str | tuple[int, ...]) -> list[int]:
    if isinstance(how, tuple):
        return list(how)
    if how == "even":
        return [layers // stages] * stages
    flops = {name: block.flops for name, block in graph.occurrences}
    repeated = [block for block in graph.blocks if block.repeat > 1]
    layer = repeated[0].flops if repeated else 1.0
    ends = [name for name, block in graph.occurrences if block.repeat == 1]
    head = sum(flops[name] for name in ends) / layer if repeated else 0.0
    counts = [1] * stages
    load = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda i: (load[i], i))
        counts[lightest] += 1
        load[lightest] += 1
    return counts
