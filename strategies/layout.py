"""The plan as a user writes it, the rules it must keep, and the complete plan it means."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.operator_graph import OperatorGraph
from strategies.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh
from strategies.partition import num_layers, partition
from strategies.plan import Plan, Recompute
from strategies.problem import Problem
from strategies.schedule import SCHEDULES
from strategies.sharding import TENSOR_DIMS, megatron
from strategies.training import Training


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
