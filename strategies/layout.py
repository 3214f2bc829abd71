"""The plan as a user writes it, the rules it must keep, and the complete plan it means."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.operator_graph import OperatorGraph, OperatorKind
from strategies.divisors import divisors
from strategies.divisors import nearest_divisor as _nearest
from strategies.grid import broken_rules
from strategies.local_batches import Microbatch, microbatch
from strategies.lowering.pipeline import in_order
from strategies.mesh import AXES, DATA, PIPELINE, REPLICA, TENSOR, Axis, Mesh
from strategies.offload_rules import Around, offload_rules
from strategies.offloading import NOTHING, Offloading
from strategies.parallelism import EXPERTS, TENSOR_DIMS, Attention, Parallelism, shardings
from strategies.partition import num_layers, partition
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators
from strategies.schedule import OrderError, rule_of, schedule
from strategies.schedules.rule import ScheduleRule, no_pairs
from strategies.schedules.written import WrittenRule
from strategies.training import Training

ZERO_STAGES = (0, 1, 2, 3)
"""What ZeRO shares over data ranks: nothing, the optimizer's states, gradients too, parameters too."""

GRADIENT_REDUCTIONS = ("all_reduce", "parameter_server")
"""How gradients are summed over the data axis: decentralised, or by a central server."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan as a user writes it: degrees and choices; `complete` makes a `Plan` of it.

    Parameters
    ----------
    microbatch
        Sequences of a microbatch on every data rank, or a size for each of them: data rank ``i`` runs
        microbatches of ``microbatch[i]`` sequences, and all run as many microbatches.
    stages
        ``"even"``, ``"balanced"`` or the number of layers of every stage.
    tensor_rows
        Rows of a grid of tensor-parallel ranks, of which ``tensor`` is the columns (`strategies.grid`).
    context
        Ranks that share the tokens of each sequence.
    attention
        How they compute attention.
    expert
        Ranks, of those along ``data``, that share the experts.
    schedule
        The name of a schedule, or its text form: then ``chunks`` may be left at 1 for what the text says.
    order
        Axes of the mesh from the outermost to the innermost: neighbours along the last one are
        neighbours on the machine. Those of one rank may be left out, and ``replica``, which then lies
        just outside ``data``.
    placement
        The device of every rank, in order of rank; empty for rank ``i`` on the ``i``-th free device.
    offload
        What is kept in host memory.
    zero_shards
        Neighbouring data ranks that ZeRO shares states over, with their context ranks; 0 for all of them.
    reshard_after_forward
        Whether ZeRO 3 gives gathered parameters up after forward and gathers them again for backward.
    gradient_reduction
        How gradients are summed over the data axis: one of `GRADIENT_REDUCTIONS`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatch: Microbatch = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Recomputation = Recompute.NONE
    context: int = 1
    expert: int = 1
    attention: Attention = Attention.RING
    overlap_gradients: bool = True
    scatter_gather: bool = False
    stages: str | tuple[int, ...] = "even"
    order: tuple[str, ...] = AXES
    placement: tuple[int, ...] = ()
    offload: Offloading = NOTHING
    zero_shards: int = 0
    reshard_after_forward: bool = True
    gradient_reduction: str = "all_reduce"
    tensor_rows: int = 1

    @property
    def replica(self) -> int:
        """Groups of data ranks that share states."""
        return self.data // (self.zero_shards or self.data)

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch over all data ranks."""
        return self.data * self.microbatch if isinstance(self.microbatch, int) else sum(self.microbatch)


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame and what holds, what was met, what would do.

    ``schedule.2`` is line 2, from 0, of an order that is written out.
    """

    field: str
    message: str


def violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that ``layout`` breaks for ``problem``."""
    counts = (*(name for name in AXES if name != REPLICA), "chunks")
    small = {name: getattr(layout, name) for name in counts if getattr(layout, name) < 1}
    wrong_sizes = tuple(_size_violations(layout))
    if small or wrong_sizes:
        yield from (Violation(name, f"{name} is at least 1, met {value}") for name, value in small.items())
        yield from wrong_sizes
        return
    yield from _device_violations(problem.cluster, layout)
    yield from _tensor_violations(problem.graph, layout)
    yield from _grid_violations(problem.graph, layout)
    yield from _context_violations(problem.graph, layout)
    yield from _expert_violations(problem.graph, layout)
    yield from _batch_violations(problem.training, layout)
    broken = tuple(_pipeline_violations(problem, layout))
    yield from broken
    if not broken:
        yield from _recompute_violations(problem.graph, layout)
    yield from _offload_violations(problem, layout)
    yield from _zero_violations(layout)
    if layout.gradient_reduction not in GRADIENT_REDUCTIONS:
        known, met = ", ".join(GRADIENT_REDUCTIONS), layout.gradient_reduction
        yield Violation("gradient_reduction", f"gradient_reduction is one of {known}, met {met}")
    elif layout.gradient_reduction == "parameter_server" and layout.zero:
        yield Violation(
            "gradient_reduction",
            f"a parameter_server needs zero 0, for with ZeRO every rank keeps the sum of its share, "
            f"met zero {layout.zero}; nearest: all_reduce",
        )


def _device_violations(cluster: Cluster, layout: Layout) -> Iterator[Violation]:
    others, free = layout.tensor * layout.tensor_rows * layout.pipeline * layout.context, len(cluster.free_devices)
    ranks = layout.data * others
    if ranks != free:
        near = f"; data: {free // others} would do" if free % others == 0 else ""
        more = (("tensor_rows", layout.tensor_rows), ("context", layout.context))
        besides = "".join(f" * {name}({degree})" for name, degree in more if degree > 1)
        yield Violation(
            "data",
            f"data({layout.data}) * tensor({layout.tensor}) * pipeline({layout.pipeline}){besides} = {ranks} ranks, "
            f"cluster has {free}{' free devices' if free < cluster.num_devices else ''}{near}",
        )
    if layout.order != AXES:
        yield from _order_violations(layout)
    if layout.placement and sorted(layout.placement) != sorted(cluster.free_devices):
        wrong = next((d for d in layout.placement if d not in set(cluster.free_devices)), None)
        met = f"met {wrong}" if wrong is not None else f"met {len(layout.placement)} devices, some twice"
        yield Violation("placement", f"placement names each of the {free} free devices once, {met}")


def _order_violations(layout: Layout) -> Iterator[Violation]:
    sizes = {name: getattr(layout, name) for name in AXES if name != REPLICA}
    needed = {name for name, size in sizes.items() if name in (PIPELINE, DATA, TENSOR) or size > 1}
    if len(set(layout.order)) != len(layout.order) or not needed <= set(layout.order) <= set(AXES):
        names = [name for name in AXES if name in needed]
        yield Violation(
            "order", f"order names {', '.join(names[:-1])} and {names[-1]} once each, met {', '.join(layout.order)}"
        )


def _zero_violations(layout: Layout) -> Iterator[Violation]:
    if layout.zero not in ZERO_STAGES:
        near = min(ZERO_STAGES, key=lambda stage: abs(stage - layout.zero))
        yield Violation("zero", f"zero is 0, 1, 2 or 3, met {layout.zero}; nearest: {near}")
    if not layout.reshard_after_forward and layout.zero != 3:
        yield Violation(
            "reshard_after_forward", f"reshard_after_forward: false needs zero 3, met zero {layout.zero}; nearest: true"
        )
    shards = layout.zero_shards
    if shards and not layout.zero:
        yield Violation("zero_shards", f"zero_shards needs zero of at least 1, met {shards} with zero 0; nearest: 0")
    elif shards and (shards < 2 or layout.data % shards):
        near = _nearest(layout.data, shards)
        yield Violation(
            "zero_shards",
            f"zero_shards({shards}) divides data({layout.data}) and is at least 2, or is 0 for all data ranks; "
            f"nearest: {near if near > 1 else 0}",
        )
    elif shards % layout.expert:
        yield Violation(
            "zero_shards",
            f"expert({layout.expert}) divides zero_shards({shards}): ranks that share experts share states; "
            f"nearest: {layout.expert}",
        )


def _tensor_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    sizes = _sizes(graph, TENSOR_DIMS)
    for dim, size in sizes.items():
        if size % layout.tensor:
            yield Violation(
                "tensor", f"tensor divides {dim}({size}), met {layout.tensor}; nearest: {_nearest(size, layout.tensor)}"
            )
    if layout.sequence_parallel and graph.sequence % (layout.tensor * layout.context):
        context = f"context({layout.context}) * " if layout.context > 1 else ""
        yield Violation(
            "tensor",
            f"{context}tensor divides sequence({graph.sequence}), met {layout.tensor}; "
            f"nearest: {_nearest(graph.sequence, layout.tensor)}",
        )
    if layout.sequence_parallel and layout.tensor == 1:
        yield Violation(
            "sequence_parallel", "sequence_parallel needs tensor of at least 2, met tensor 1; nearest: false"
        )


def _grid_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    if layout.tensor_rows == 1:
        return
    if layout.sequence_parallel:
        yield Violation(
            "sequence_parallel",
            f"tensor_rows({layout.tensor_rows}) leaves sequence_parallel nothing to cut: all activations lie "
            "along rows and columns; nearest: false",
        )
    if layout.expert > 1:
        yield Violation(
            "expert",
            f"tensor_rows({layout.tensor_rows}) needs expert 1: tokens sent to experts have no published layout over "
            f"rows, met {layout.expert}; nearest: 1",
        )
    cut = shardings(graph, Parallelism(tensor=layout.tensor > 1, rows=True))
    sizes = (layout.microbatch,) if isinstance(layout.microbatch, int) else layout.microbatch
    odd = next((size for size in sizes if size % layout.tensor_rows), sizes[0])
    yield from (Violation(*each) for each in broken_rules(graph, cut, layout.tensor_rows, layout.tensor, odd))


@lru_cache(maxsize=64)
def _sizes(graph: OperatorGraph, dims: tuple[str, ...]) -> Mapping[str, int]:
    """Return the sizes of some dims of operators, of one that has several their greatest common divisor."""
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        for operator in block.operators:
            for dim, size in operator.dims:
                if dim in dims:
                    sizes[dim] = gcd(sizes.get(dim, 0), size)
    return sizes


def _context_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    if layout.context == 1:
        return
    if graph.sequence % layout.context:
        near = _nearest(graph.sequence, layout.context)
        yield Violation("context", f"context divides sequence({graph.sequence}), met {layout.context}; nearest: {near}")
    heads = _sizes(graph, ("heads",)).get("heads", 1)
    if layout.attention is Attention.ULYSSES and heads % (layout.tensor * layout.context):
        yield Violation(
            "context",
            f"ulysses: tensor({layout.tensor}) * context({layout.context}) divides the heads of keys({heads}); "
            f"nearest context: {_nearest(heads // gcd(heads, layout.tensor), layout.context)}",
        )
    kinds = {operator.kind for block in graph.blocks for operator in block.operators}
    if layout.attention is Attention.RING and OperatorKind.SOFTMAX in kinds:
        yield Violation(
            "attention",
            "ring attention is one kernel over all parts, the model's keeps its scores; nearest: all_gather",
        )


def _expert_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    if layout.expert == 1:
        return
    experts = _sizes(graph, (EXPERTS,)).get(EXPERTS)
    if experts is None:
        yield Violation("expert", f"the model has no experts, met expert {layout.expert}; nearest: 1")
    elif experts % layout.expert:
        near = _nearest(experts, layout.expert)
        yield Violation("expert", f"expert divides the experts({experts}), met {layout.expert}; nearest: {near}")
    if layout.data % layout.expert:
        near = _nearest(layout.data, layout.expert)
        yield Violation("expert", f"expert divides data({layout.data}), met {layout.expert}; nearest: {near}")


def _size_violations(layout: Layout) -> Iterator[Violation]:
    sizes = layout.microbatch
    if isinstance(sizes, int):
        if sizes < 1:
            yield Violation("microbatch", f"microbatch is at least 1, met {sizes}")
    elif len(sizes) != layout.data:
        yield Violation(
            "microbatch",
            f"microbatch is a number or has one size a data rank: data({layout.data}) sizes, "
            f"met {len(sizes)}; nearest: {_resized(sizes, layout.data)}",
        )
    elif min(sizes) < 1:
        yield Violation(
            "microbatch",
            f"microbatch is at least 1 on every data rank, met {list(sizes)}; nearest: {[max(n, 1) for n in sizes]}",
        )


def _resized(sizes: tuple[int, ...], count: int) -> list[int]:
    return [*sizes, *((sizes or (1,))[-1:] * max(count - len(sizes), 0))][: max(count, 1)]


def _local_batch_violations(training: Training, layout: Layout, sizes: tuple[int, ...]) -> Iterator[Violation]:
    total, batch = layout.sequences, training.global_batch
    if batch % total:
        sums = [n for n in divisors(batch) if n >= layout.data]
        near = [n for n in sums if n < total][-1:] + [n for n in sums if n > total][:1]
        nearest = f"; nearest sum: {' or '.join(map(str, near))}" if near else ""
        yield Violation(
            "microbatch",
            f"microbatches * sum(microbatch) = global_batch: sum({list(sizes)}) = {total} divides "
            f"global_batch({batch}){nearest}",
        )
    groups = ((first, sizes[first : first + layout.expert]) for first in range(0, layout.data, layout.expert))
    first, uneven = next(((first, group) for first, group in groups if len(set(group)) > 1), (0, ()))
    if uneven:
        yield Violation(
            "microbatch",
            f"ranks that share experts exchange all their tokens: the expert({layout.expert}) data ranks "
            f"{first} to {first + layout.expert - 1} have equal sizes, met {list(uneven)}; "
            f"nearest: {[round(sum(uneven) / len(uneven))] * len(uneven)}",
        )


def _batch_violations(training: Training, layout: Layout) -> Iterator[Violation]:
    if not isinstance(layout.microbatch, int):
        yield from _local_batch_violations(training, layout, layout.microbatch)
        return
    each = layout.sequences
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
    try:
        rule = rule_of(layout.schedule)
    except ValueError as error:
        yield Violation(f"schedule.{error.rank}" if isinstance(error, OrderError) else "schedule", str(error))
        return
    stages = rule.num_stages(layout.pipeline, layout.chunks)
    number = f"pipeline({layout.pipeline}) * chunks({layout.chunks}) = {stages}"
    if isinstance(rule, WrittenRule):
        number = f"the order's {stages}"
        yield from _written_violations(problem, layout, rule)
    else:
        yield from _schedule_violations(problem, layout, rule)
    if isinstance(layout.stages, tuple):
        if len(layout.stages) != stages or sum(layout.stages) != layers or min(layout.stages) < 0:
            yield Violation(
                "stages",
                f"stages are {number} counts that add to "
                f"layers({layers}), met {list(layout.stages)} = {sum(layout.stages)}",
            )
    elif layout.stages not in ("even", "balanced"):
        yield Violation("stages", f"stages is even, balanced or a list of layers a stage, met {layout.stages}")
    elif layout.stages == "even" and layers % stages:
        yield Violation(
            "pipeline",
            f"{number} stages divide layers({layers}); nearest stages: {_nearest(layers, stages)}",
        )
    elif stages > layers:
        yield Violation("pipeline", f"{number} stages are at most layers({layers})")


def _all_sequences(layout: Layout) -> str:
    """Return the sequences of one microbatch over all data ranks in words."""
    if isinstance(layout.microbatch, int):
        return f"(data({layout.data}) * microbatch({layout.microbatch}))"
    return f"sum(microbatch{list(layout.microbatch)})"


def _rule(layout: Layout) -> ScheduleRule | None:
    """Return the rule of a layout's schedule; None where there is none."""
    try:
        return rule_of(layout.schedule)
    except ValueError:
        return None


def _chunks(layout: Layout, rule: ScheduleRule) -> int:
    """Return the most stages of a rank: of an order that is written out its own number, if none is asked for."""
    return rule.chunks[0] if isinstance(rule, WrittenRule) and layout.chunks == 1 else layout.chunks


def _written_violations(problem: Problem, layout: Layout, rule: WrittenRule) -> Iterator[Violation]:
    """Yield what an order that is written out does not go with, or where it waits for itself for ever."""
    wrong = rule.undefined(layout.pipeline, rule.microbatches, _chunks(layout, rule))
    if wrong is not None:
        yield Violation("chunks" if layout.pipeline == rule.ranks else "pipeline", wrong)
        return
    whole, count = problem.training.global_batch, rule.microbatches
    each = layout.sequences
    if whole % each == 0 and whole // each != count:
        near = f"; nearest microbatch: {whole // (layout.data * count)}" if whole % (layout.data * count) == 0 else ""
        yield Violation(
            "schedule",
            f"global_batch({whole}) / {_all_sequences(layout)} = {whole // each} "
            f"microbatches, the order has {count}{near}",
        )
        return
    try:
        for _ in in_order(schedule(layout.schedule, rule.ranks, count, rule.chunks[0])):
            pass
    except OrderError as error:
        yield Violation(f"schedule.{error.rank}", str(error))


def _schedule_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    each = layout.sequences
    if rule.asynchronous:
        yield from _unflushed_violations(problem, layout, rule)
    fewest, most = rule.chunks
    if layout.chunks < fewest or layout.chunks > (most or layout.chunks):
        broken = rule.violation(layout.pipeline, max(layout.pipeline, 1) * 2, layout.chunks)
        yield Violation("chunks", str(broken))
    elif layout.chunks > 1 and layout.pipeline < 2:
        yield Violation("pipeline", f"{rule.name}: pipeline(1) >= 2 does not hold; nearest: 2")
    elif problem.training.global_batch % each == 0:
        broken = rule.violation(layout.pipeline, problem.training.global_batch // each, layout.chunks)
        if broken is not None:
            yield Violation("schedule", broken)


def _unflushed_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    """Yield what a pipeline cannot have whose stages update their weights at different times."""
    name = layout.schedule
    if layout.zero >= 2:
        shard = "gathered shards of the newest one" if layout.zero == 3 else "a shard of their sum"
        whole = "whole weights of several versions" if layout.zero == 3 else "whole gradients until each update"
        yield Violation(
            "zero",
            f"zero({layout.zero}) <= 1 does not hold for {name}: without a flush a stage keeps {whole}, not {shard}; "
            "nearest: 1",
        )
    if problem.training.gradient_clipping:
        yield Violation(
            "schedule",
            f"{name} has no flush: stages update at different times, gradient_clipping needs the norm of all at once; "
            "nearest: 1f1b, or gradient_clipping: false",
        )
    if rule.updates_every_microbatch and problem.graph.tied and layout.pipeline > 1:
        yield Violation(
            "schedule",
            f"{name} updates every stage as soon as it has gradients, tied embeddings sum those of the first and the "
            "last stage before; nearest: pipedream_2bw, or tied_embeddings: false",
        )


def _recompute_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    if isinstance(layout.recompute, SomeOperators):
        blocks = [block for block in graph.blocks if block.layer] or list(graph.blocks)
        known = list(dict.fromkeys(operator.name for block in blocks for operator in block.operators))
        wrong = next((name for name in layout.recompute.names if name not in known), None)
        if wrong is not None:
            close = [f"; nearest: {name}" for name in get_close_matches(wrong, known, n=1, cutoff=0.3)]
            text = f"recompute names operators of a layer: {', '.join(known)}; met {wrong[:100]}{''.join(close)}"
            yield Violation("recompute", text)
    if isinstance(layout.recompute, FirstLayers):
        layers = {name for name, block in graph.occurrences if block.layer}
        rule = rule_of(layout.schedule)
        stages = partition(graph, rule.num_stages(layout.pipeline, layout.chunks), layout.stages)
        most = max(sum(name in layers for name in stage.blocks) for stage in stages)
        if layout.recompute.layers > most:
            met = layout.recompute.layers
            yield Violation(
                "recompute",
                f"a stage has at most {most} layers to recompute, met {met}; nearest: {most or Recompute.NONE}",
            )


def _offload_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    rule = _rule(layout)
    if layout.offload == NOTHING or rule is None:
        return
    around = Around(
        problem.graph,
        problem.training,
        pipeline=layout.pipeline,
        schedule=rule.name,
        whole_backward=not rule.splits_backward and rule.pairs is no_pairs,
        flushes=not rule.asynchronous,
        ranks=layout.data * layout.context,
        shards=(layout.zero_shards or layout.data) * layout.context,
        zero=layout.zero,
    )
    yield from (Violation(*each) for each in offload_rules(layout.offload, around))


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
    by = Parallelism(
        tensor=layout.tensor > 1,
        sequence_parallel=layout.sequence_parallel,
        expert=layout.expert > 1,
        attention=layout.attention if layout.context > 1 else None,
        rows=layout.tensor_rows > 1,
    )
    rule, free = rule_of(layout.schedule), problem.cluster.free_devices
    placement = layout.placement or (() if len(free) == problem.cluster.num_devices else free)
    return Plan(
        mesh=_mesh(layout),
        stages=partition(problem.graph, rule.num_stages(layout.pipeline, layout.chunks), layout.stages),
        shardings=shardings(problem.graph, by),
        schedule_name=layout.schedule,
        chunks=_chunks(layout, rule),
        microbatch=microbatch(layout.microbatch),
        num_microbatches=problem.training.global_batch // layout.sequences,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        overlap_gradients=layout.overlap_gradients,
        attention=by.attention,
        scatter_gather=layout.scatter_gather,
        placement=placement,
        offload=layout.offload,
        reshard_after_forward=layout.reshard_after_forward,
        gradient_reduction=layout.gradient_reduction,
    )


def _mesh(layout: Layout) -> Mesh:
    """Return the mesh of a layout; where groups of data ranks share states, with an axis for their replicas."""
    sizes = {name: getattr(layout, name) for name in AXES}
    sizes[DATA] //= layout.expert * layout.replica
    return _mesh_of(layout.order, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _mesh_of(order: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the mesh of axes in an order, those of one rank left out where no plan needs them."""
    names, of_axis = list(order), dict(sizes)
    if REPLICA not in names:
        names.insert(names.index(DATA), REPLICA)
    always = (PIPELINE, DATA, TENSOR)
    return Mesh(tuple(Axis(name, of_axis[name]) for name in names if name in always or of_axis[name] > 1))
