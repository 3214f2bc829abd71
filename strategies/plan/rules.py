"""The rules that a layout must keep: about its mesh, pipeline, states and offloading to host memory."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.operator_graph import OperatorGraph, OperatorKind
from meshwise.strategies.plan.layout import GRADIENT_REDUCTIONS, RANK_DEGREES, ZERO_STAGES, Layout, Violation, listed
from meshwise.strategies.plan.mesh import AXES, DATA, PIPELINE, REPLICA, TENSOR, divisors
from meshwise.strategies.plan.mesh import nearest_divisor as _nearest
from meshwise.strategies.plan.offloading import NOTHING, OFFLOADS, Offloading, StepPlace
from meshwise.strategies.plan.parallelism import EXPERTS, TENSOR_DIMS, Attention, Parallelism, broken_rules, shardings
from meshwise.strategies.plan.partition import most_stages, num_layers, partition
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import FirstLayers, OfStage, PerStage, Recompute, SomeOperators
from meshwise.strategies.schedules.orders import in_order
from meshwise.strategies.schedules.rule import ScheduleRule, WrittenRule, no_pairs
from meshwise.strategies.schedules.schedule import OrderError, rule_of, schedule


class Around(NamedTuple):
    """The properties of a plan on which the rules of offloading depend.

    Parameters
    ----------
    whole_backward
        Whether the schedule makes all gradients of a microbatch in one pass, and runs one pass at a time.
    flushes
        Whether a step ends on all ranks before the next one begins.
    ranks, shards
        The number of data and context ranks together, and over how many of them ZeRO shares states.
    """

    graph: OperatorGraph
    training: Training
    pipeline: int
    schedule: str
    whole_backward: bool
    flushes: bool
    ranks: int
    shards: int
    zero: int


def offload_rules(offload: Offloading, around: Around) -> Iterator[tuple[str, str]]:
    """Yield every rule that offloading breaks: the field to blame, and the message."""
    wrong = [name for name in OFFLOADS if len(getattr(offload, name)) not in (0, 1, around.pipeline)]
    for name in wrong:
        yield (
            f"offload.{name}",
            f"{name} holds one fraction, or one for each of pipeline({around.pipeline}) ranks, met "
            f"{len(getattr(offload, name))}; nearest: {around.pipeline} of them",
        )
    if wrong:
        return  # the checks below index fractions by pipeline position
    if not around.flushes:
        yield from _unflushed_rules(offload, around.schedule)
    if any(offload.activations) and not around.whole_backward:
        yield (
            "offload.activations",
            f"activations on the host move with whole passes, one after another: {around.schedule} splits backward "
            "or runs passes in pairs; nearest: 1f1b",
        )
    if any(offload.activations) and not any(block.layer for block in around.graph.blocks):
        yield (
            "offload.activations",
            "activations on the host are those of layers, the model has none; nearest: leave it out",
        )
    if any(offload.parameters):
        yield from (("offload.parameters", message) for message in _parameter_rules(offload, around))


def _unflushed_rules(offload: Offloading, schedule: str) -> Iterator[tuple[str, str]]:
    """Yield every offload that a schedule without a flush forbids: all but whole optimizer states stepped on hosts."""
    for name in ("parameters", "activations"):
        if any(getattr(offload, name)):
            yield f"offload.{name}", f"{name} on the host need a flush, {schedule} has none; nearest: leave them out"
    if any(offload.optimizer) and (offload.step is StepPlace.DEVICE or any(part < 1 for part in offload.optimizer)):
        yield (
            "offload.optimizer",
            f"without a flush the host makes whole updates, {schedule} has none; nearest: 1.0 with step: host",
        )


def _parameter_rules(offload: Offloading, around: Around) -> Iterator[str]:
    ranks = range(around.pipeline)
    partly = [(offload.at("parameters", p), offload.at("optimizer", p)) for p in ranks]
    met = next((each for each in partly if each[0] > 0 and each[1] < 1), None)
    if met is not None:
        yield (
            "parameters on the host are updated from there and need optimizer: 1.0 on the same pipeline ranks, "
            f"met optimizer: {met[1]:g} with parameters: {met[0]:g}; nearest: optimizer: 1.0"
        )
    if around.ranks > 1 and around.zero < 3:
        yield (
            f"parameters on the host need zero 3 where data * context = {around.ranks} ranks keep the same parameters, "
            f"met zero {around.zero}; nearest: 3"
        )
    if around.zero and around.shards < around.ranks:
        yield (
            "parameters on the host need all ranks to share them, for replicas sum gradients on devices at the end of "
            f"a step, met {around.ranks // around.shards} replicas; nearest: zero_shards: 0"
        )
    if around.training.quantised_bytes:
        yield "parameters on the host leave no copies on devices, and fp8 ones stay there; nearest: precision: bf16"
    whole = all(fraction == 1 for fraction, _ in partly)
    if around.graph.tied and (around.pipeline > 1 or not whole):
        yield (
            "parameters on the host need both ends of a tied one on one rank, and all of them there, "
            f"met pipeline({around.pipeline}) with {'all' if whole else 'a part'} of the parameters; "
            f"nearest: {'pipeline: 1' if whole else 'parameters: 1.0'}"
        )


def violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that ``layout`` breaks for ``problem``."""
    # sizes below 1 first and alone: all later rules divide by them
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
    broken = tuple(pipeline_violations(problem, layout))
    yield from broken
    # the rules of recomputation need the division into stages
    if not broken:
        yield from _recompute_violations(problem.graph, layout)
    yield from _offload_violations(problem, layout)
    yield from _zero_violations(layout)
    yield from _overlap_violations(layout)
    yield from _frozen_violations(problem.training, layout)
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
    others, free = layout.model_ranks, cluster.free_devices
    ranks, used = layout.data * others, len(layout.placement or free)
    if ranks != used:
        near = f"; data: {used // others} would do" if used % others == 0 else ""
        more = {name: getattr(layout, name) for name in RANK_DEGREES if name not in (DATA, TENSOR, PIPELINE)}
        besides = "".join(f" * {name}({degree})" for name, degree in more.items() if degree > 1)
        there = f"cluster has {used}{' free devices' if used < cluster.num_devices else ''}"
        yield Violation(
            "data",
            f"data({layout.data}) * tensor({layout.tensor}) * pipeline({layout.pipeline}){besides} = {ranks} ranks, "
            f"{f'placement names {used} devices' if layout.placement else there}{near}",
        )
    if layout.order != AXES:
        yield from _order_violations(layout)
    if not layout.placement:
        return
    different, known = set(layout.placement), set(free)
    if len(different) < len(layout.placement) or not different <= known:
        wrong = next((device for device in layout.placement if device not in known), None)
        met = f"met {wrong}" if wrong is not None else f"met {len(layout.placement)} devices, some twice"
        yield Violation("placement", f"placement names some of the {len(free)} free devices, each once, {met}")


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


def _overlap_violations(layout: Layout) -> Iterator[Violation]:
    """Yield the rules of tensor-parallel communication beside products.

    Megatron-LM asks for sequence parallelism (``--tp-comm-overlap``, ``megatron/training/arguments.py``), and
    Transformer Engine refuses delayed gradients of weights (``pytorch/module/linear.py``).
    """
    if not layout.overlap_tensor:
        return
    if layout.tensor * layout.tensor_rows == 1:
        yield Violation("overlap_tensor", "overlap_tensor needs tensor of at least 2, met tensor 1; nearest: false")
    elif not layout.sequence_parallel:
        yield Violation(
            "overlap_tensor",
            "overlap_tensor needs sequence_parallel, whose gathers and scatters go chunk by chunk beside products, "
            "met sequence_parallel false; nearest: false",
        )
    rule = known_rule(layout)
    if rule is not None and rule.splits_backward:
        yield Violation(
            "overlap_tensor",
            "overlap_tensor needs schedules that keep backward whole, for the product of a weight's gradient hides "
            f"the scatter of its input's, met {rule.name}; nearest: false",
        )


def _frozen_violations(training: Training, layout: Layout) -> Iterator[Violation]:
    """Yield a violation where a schedule splits backward although frozen weights have no gradients."""
    rule = known_rule(layout)
    if training.frozen and rule is not None and rule.splits_backward:
        yield Violation(
            "schedule",
            f"frozen weights have no gradients that a schedule could run apart, met {rule.name}; nearest: 1f1b",
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
    """Return the sizes of some dims over all operators; the greatest common divisor where a dim has several sizes."""
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
            f"met {len(sizes)}; nearest: {listed(_resized(sizes, layout.data))}",
        )
    elif min(sizes) < 1:
        yield Violation(
            "microbatch",
            f"microbatch is at least 1 on every data rank, met {listed(sizes)}; "
            f"nearest: {listed([max(n, 1) for n in sizes])}",
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
            f"microbatches * sum(microbatch) = global_batch: sum({listed(sizes)}) = {total} divides "
            f"global_batch({batch}){nearest}",
        )
    groups = ((first, sizes[first : first + layout.expert]) for first in range(0, layout.data, layout.expert))
    first, uneven = next(((first, group) for first, group in groups if len(set(group)) > 1), (0, ()))
    if uneven:
        yield Violation(
            "microbatch",
            f"ranks that share experts exchange all their tokens: the expert({layout.expert}) data ranks "
            f"{first} to {first + layout.expert - 1} have equal sizes, met {listed(uneven)}; "
            f"nearest: {listed([round(sum(uneven) / len(uneven))] * len(uneven))}",
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


def _recompute_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    how = layout.recompute
    if isinstance(how, Recompute):
        return  # a word for all layers is always legal
    count = rule_of(layout.schedule).num_stages(layout.pipeline, layout.chunks)
    if isinstance(how, PerStage) and len(how.stages) != count:
        alike = f"; nearest: {how.stages[0]} for all stages alike" if len(set(how.stages)) == 1 else ""
        words = f"recompute of a list has one a stage, of {count} in all, met {len(how.stages)}{alike}"
        yield Violation("recompute", words)
        return
    layers = {name for name, block in graph.occurrences if block.layer}
    stages = partition(graph, count, layout.stages)
    sizes = [sum(name in layers for name in stage.blocks) for stage in stages]
    if isinstance(how, PerStage):
        for stage, each in enumerate(how.stages):
            yield from _stage_recompute_violations(graph, each, sizes[stage], f"stage {stage} has {sizes[stage]}")
    else:
        yield from _stage_recompute_violations(graph, how, max(sizes), f"a stage has at most {max(sizes)}")


def _stage_recompute_violations(graph: OperatorGraph, how: OfStage, most: int, has: str) -> Iterator[Violation]:
    if isinstance(how, SomeOperators):
        blocks = [block for block in graph.blocks if block.layer] or list(graph.blocks)
        known = list(dict.fromkeys(operator.name for block in blocks for operator in block.operators))
        wrong = next((name for name in how.names if name not in known), None)
        if wrong is not None:
            close = [f"; nearest: {name}" for name in get_close_matches(wrong, known, n=1, cutoff=0.3)]
            text = f"recompute names operators of a layer: {', '.join(known)}; met {wrong[:100]}{''.join(close)}"
            yield Violation("recompute", text)
    if isinstance(how, FirstLayers) and how.layers > most:
        yield Violation("recompute", f"{has} layers to recompute, met {how.layers}; nearest: {most or Recompute.NONE}")


def _offload_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    rule = known_rule(layout)
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


def pipeline_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that the stages or the schedule of ``layout`` break."""
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
                f"layers({layers}), met {listed(layout.stages)} = {sum(layout.stages)}",
            )
    elif layout.stages not in ("even", "balanced"):
        yield Violation("stages", f"stages is even, balanced or a list of layers a stage, met {layout.stages}")
    elif layout.stages == "even" and layers % stages:
        yield Violation(
            "pipeline",
            f"{number} stages divide layers({layers}) where stages is even; "
            f"nearest: {_nearest(layers, stages)} stages, or stages: balanced",
        )
    elif stages > most_stages(problem.graph):
        ends = most_stages(problem.graph) - layers
        beside = f" and {ends} for what is around them" if ends else ""
        yield Violation("pipeline", f"{number} stages are at most layers({layers}){beside}")


def known_rule(layout: Layout) -> ScheduleRule | None:
    """Return the rule of a layout's schedule; ``None`` for an unknown or malformed schedule."""
    try:
        return rule_of(layout.schedule)
    except ValueError:
        return None


def chunks_of(layout: Layout, rule: ScheduleRule) -> int:
    """Return the largest number of chunks of a rank; of a written order its own number where ``chunks`` is 1."""
    return rule.chunks[0] if isinstance(rule, WrittenRule) and layout.chunks == 1 else layout.chunks


def _written_violations(problem: Problem, layout: Layout, rule: WrittenRule) -> Iterator[Violation]:
    """Yield the rules that a written order breaks: ranks, chunks, microbatches, or a deadlock of its actions."""
    # one fault at a time: the later checks need an order that is defined for these ranks and microbatches
    wrong = rule.undefined(layout.pipeline, rule.microbatches, chunks_of(layout, rule))
    if wrong is not None:
        yield Violation("chunks" if layout.pipeline == rule.ranks else "pipeline", wrong)
        return
    whole, count = problem.training.global_batch, rule.microbatches
    each = layout.sequences
    if whole % each == 0 and whole // each != count:
        near = f"; nearest microbatch: {whole // (layout.data * count)}" if whole % (layout.data * count) == 0 else ""
        yield Violation(
            "schedule",
            f"global_batch({whole}) / {layout.all_sequences} = {whole // each} "
            f"microbatches, the order has {count}{near}",
        )
        return
    try:  # walking the actions in order of dependence finds a deadlock
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
    """Yield the rules of pipelines without a flush, whose stages update their weights at different times."""
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
