"""The rules that a layout must keep: about its mesh, pipeline, states and offloading to host memory."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from math import gcd

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import OperatorGraph, OperatorKind
from meshwise.strategies.plan.layout import (
    GRADIENT_REDUCTIONS,
    RANK_DEGREES,
    STEP_DECISIONS,
    ZERO_STAGES,
    Layout,
    StepDecisions,
    Violation,
    format_numbers,
)
from meshwise.strategies.plan.mesh import AXES, DATA, PIPELINE, REPLICA, TENSOR, divisors
from meshwise.strategies.plan.mesh import nearest_divisor as _nearest
from meshwise.strategies.plan.offloading import NO_OFFLOADING, OFFLOADS, Offloading, StepPlace
from meshwise.strategies.plan.parallelism import (
    EXPERTS,
    TENSOR_DIMS,
    Attention,
    Parallelism,
    check_grid,
    shard_operators,
)
from meshwise.strategies.plan.partition import count_possible_stages, num_layers, partition_layers
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import (
    HALF,
    FirstLayers,
    PerStage,
    Recomputation,
    Recompute,
    SomeOperators,
    StageRecompute,
)
from meshwise.strategies.plan.table_rules import table_violations
from meshwise.strategies.schedules.orders import order_actions
from meshwise.strategies.schedules.rule import ScheduleRule, WrittenRule, list_no_pairs
from meshwise.strategies.schedules.schedule import OrderError, build_schedule, find_rule


def violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that ``layout`` breaks for ``problem``."""
    # sizes below 1 first and alone: all later rules divide by them
    degree_names = (*(name for name in AXES if name != REPLICA), "chunks")
    small_values = {name: getattr(layout, name) for name in degree_names if getattr(layout, name) < 1}
    size_violations = tuple(_size_violations(layout))
    if small_values or size_violations:
        yield from (Violation(name, f"{name} is at least 1, met {value}") for name, value in small_values.items())
        yield from size_violations
        return
    yield from _device_violations(problem.cluster, layout)
    yield from _tensor_violations(problem.graph, layout)
    yield from _grid_violations(problem.graph, layout)
    yield from _context_violations(problem.graph, layout)
    yield from _expert_violations(problem.graph, layout)
    yield from _batch_violations(problem, layout)
    stage_violations = tuple(pipeline_violations(problem, layout))
    yield from stage_violations
    # the rules of recomputation need the division into stages
    if not stage_violations:
        yield from _recompute_violations(problem.graph, layout)
    yield from offload_violations(problem, layout)
    yield from _zero_violations(layout)
    yield from pass_violations(layout)
    yield from _frozen_violations(problem.training, layout)
    yield from table_violations(problem, layout)
    if layout.gradient_reduction not in GRADIENT_REDUCTIONS:
        known_names, reduction = ", ".join(GRADIENT_REDUCTIONS), layout.gradient_reduction
        yield Violation("gradient_reduction", f"gradient_reduction is one of {known_names}, met {reduction}")


def need_violations(layout: StepDecisions) -> Iterator[Violation]:
    """Yield a violation for every decision of a step that is not its default and lacks what that needs."""
    for item in STEP_DECISIONS:
        if item.needs is None or (value := getattr(layout, item.name)) == item.default or item.is_free(layout):
            continue
        if item.values and value not in item.values:  # another rule says so
            continue
        (name, values), value_text = item.needs, str(value).lower() if isinstance(value, bool) else value
        yield Violation(
            item.name,
            f"{item.name}: {value_text} needs {name} {' or '.join(map(str, values))}{item.because}, "
            f"met {name} {getattr(layout, name)}; nearest: {str(item.default).lower()}",
        )


def _device_violations(cluster: Cluster, layout: Layout) -> Iterator[Violation]:
    model_ranks, free_devices = layout.model_ranks, cluster.free_devices
    ranks, num_devices = layout.data * model_ranks, len(layout.placement or free_devices)
    if ranks != num_devices:
        hint = f"; data: {num_devices // model_ranks} would do" if num_devices % model_ranks == 0 else ""
        other_degrees = {name: getattr(layout, name) for name in RANK_DEGREES if name not in (DATA, TENSOR, PIPELINE)}
        degrees_text = "".join(f" * {name}({degree})" for name, degree in other_degrees.items() if degree > 1)
        cluster_text = f"cluster has {num_devices}{' free devices' if num_devices < cluster.num_devices else ''}"
        devices_text = f"placement names {num_devices} devices" if layout.placement else cluster_text
        yield Violation(
            "data",
            f"data({layout.data}) * tensor({layout.tensor}) * pipeline({layout.pipeline}){degrees_text} = "
            f"{ranks} ranks, {devices_text}{hint}",
        )
    if layout.order != AXES:
        yield from _order_violations(layout)
    if not layout.placement:
        return
    placed_devices, known_devices = set(layout.placement), set(free_devices)
    if len(placed_devices) < len(layout.placement) or not placed_devices <= known_devices:
        unknown_device = next((device for device in layout.placement if device not in known_devices), None)
        met_text = (
            f"met {unknown_device}"
            if unknown_device is not None
            else f"met {len(layout.placement)} devices, some twice"
        )
        yield Violation(
            "placement", f"placement names some of the {len(free_devices)} free devices, each once, {met_text}"
        )


def _order_violations(layout: Layout) -> Iterator[Violation]:
    sizes = {name: getattr(layout, name) for name in AXES if name != REPLICA}
    needed_axes = {name for name, size in sizes.items() if name in (PIPELINE, DATA, TENSOR) or size > 1}
    if len(set(layout.order)) != len(layout.order) or not needed_axes <= set(layout.order) <= set(AXES):
        names = [name for name in AXES if name in needed_axes]
        yield Violation(
            "order", f"order names {', '.join(names[:-1])} and {names[-1]} once each, met {', '.join(layout.order)}"
        )


def _zero_violations(layout: Layout) -> Iterator[Violation]:
    if layout.zero not in ZERO_STAGES:
        nearest = min(ZERO_STAGES, key=lambda stage: abs(stage - layout.zero))
        yield Violation("zero", f"zero is 0, 1, 2 or 3, met {layout.zero}; nearest: {nearest}")
    yield from need_violations(layout)
    shards = layout.zero_shards
    if shards and not layout.zero:
        yield Violation("zero_shards", f"zero_shards needs zero of at least 1, met {shards} with zero 0; nearest: 0")
    elif shards and (shards < 2 or layout.data % shards):
        nearest = _nearest(layout.data, shards)
        yield Violation(
            "zero_shards",
            f"zero_shards({shards}) divides data({layout.data}) and is at least 2, or is 0 for all data ranks; "
            f"nearest: {nearest if nearest > 1 else 0}",
        )
    elif shards % layout.expert:
        yield Violation(
            "zero_shards",
            f"expert({layout.expert}) divides zero_shards({shards}): ranks that share experts share states; "
            f"nearest: {layout.expert}",
        )


def _tensor_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    sizes = find_dim_sizes(graph, TENSOR_DIMS)
    for dim, size in sizes.items():
        if size % layout.tensor:
            yield Violation(
                "tensor", f"tensor divides {dim}({size}), met {layout.tensor}; nearest: {_nearest(size, layout.tensor)}"
            )
    if layout.sequence_parallel and graph.sequence % (layout.tensor * layout.context):
        context_text = f"context({layout.context}) * " if layout.context > 1 else ""
        yield Violation(
            "tensor",
            f"{context_text}tensor divides sequence({graph.sequence}), met {layout.tensor}; "
            f"nearest: {_nearest(graph.sequence, layout.tensor)}",
        )
    if layout.sequence_parallel and layout.tensor == 1:
        yield Violation(
            "sequence_parallel", "sequence_parallel needs tensor of at least 2, met tensor 1; nearest: false"
        )


def pass_violations(layout: Layout) -> Iterator[Violation]:
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
    operator_shardings = shard_operators(graph, Parallelism(tensor=layout.tensor > 1, rows=True))
    sizes = (layout.microbatch,) if isinstance(layout.microbatch, int) else layout.microbatch
    bad_size = next((size for size in sizes if size % layout.tensor_rows), sizes[0])
    yield from (
        Violation(*fault)
        for fault in check_grid(graph, operator_shardings, layout.tensor_rows, layout.tensor, bad_size)
    )


@lru_cache(maxsize=64)
def find_dim_sizes(graph: OperatorGraph, dims: tuple[str, ...]) -> Mapping[str, int]:
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
        nearest = _nearest(graph.sequence, layout.context)
        yield Violation(
            "context", f"context divides sequence({graph.sequence}), met {layout.context}; nearest: {nearest}"
        )
    heads = find_dim_sizes(graph, ("heads",)).get("heads", 1)
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
    experts = find_dim_sizes(graph, (EXPERTS,)).get(EXPERTS)
    if experts is None and layout.embeddings:
        return
    if experts is None:
        yield Violation("expert", f"the model has no experts, met expert {layout.expert}; nearest: 1")
    elif experts % layout.expert:
        nearest = _nearest(experts, layout.expert)
        yield Violation("expert", f"expert divides the experts({experts}), met {layout.expert}; nearest: {nearest}")
    if layout.data % layout.expert:
        nearest = _nearest(layout.data, layout.expert)
        yield Violation("expert", f"expert divides data({layout.data}), met {layout.expert}; nearest: {nearest}")


def _size_violations(layout: Layout) -> Iterator[Violation]:
    sizes = layout.microbatch
    if isinstance(sizes, int):
        if sizes < 1:
            yield Violation("microbatch", f"microbatch is at least 1, met {sizes}")
    elif len(sizes) != layout.data:
        yield Violation(
            "microbatch",
            f"microbatch is a number or has one size a data rank: data({layout.data}) sizes, "
            f"met {len(sizes)}; nearest: {format_numbers(_resize_sizes(sizes, layout.data))}",
        )
    elif min(sizes) < 1:
        yield Violation(
            "microbatch",
            f"microbatch is at least 1 on every data rank, met {format_numbers(sizes)}; "
            f"nearest: {format_numbers([max(n, 1) for n in sizes])}",
        )


def _resize_sizes(sizes: tuple[int, ...], count: int) -> list[int]:
    return [*sizes, *((sizes or (1,))[-1:] * max(count - len(sizes), 0))][: max(count, 1)]


def _local_batch_violations(training: Training, layout: Layout, sizes: tuple[int, ...]) -> Iterator[Violation]:
    total, batch = layout.sequences, training.global_batch
    if batch % total:
        legal_sums = [n for n in divisors(batch) if n >= layout.data]
        nearest_sums = [n for n in legal_sums if n < total][-1:] + [n for n in legal_sums if n > total][:1]
        hint = f"; nearest sum: {' or '.join(map(str, nearest_sums))}" if nearest_sums else ""
        yield Violation(
            "microbatch",
            f"microbatches * sum(microbatch) = global_batch: sum({format_numbers(sizes)}) = {total} divides "
            f"global_batch({batch}){hint}",
        )
    groups = (
        (first_rank, sizes[first_rank : first_rank + layout.expert])
        for first_rank in range(0, layout.data, layout.expert)
    )
    first_rank, uneven_sizes = next(
        ((first_rank, group) for first_rank, group in groups if len(set(group)) > 1), (0, ())
    )
    if uneven_sizes:
        yield Violation(
            "microbatch",
            f"ranks that share experts exchange all their tokens: the expert({layout.expert}) data ranks "
            f"{first_rank} to {first_rank + layout.expert - 1} have equal sizes, met {format_numbers(uneven_sizes)}; "
            f"nearest: {format_numbers([round(sum(uneven_sizes) / len(uneven_sizes))] * len(uneven_sizes))}",
        )


def _batch_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    training = problem.training
    if not isinstance(layout.microbatch, int):
        yield from _local_batch_violations(training, layout, layout.microbatch)
        return
    total = layout.sequences
    if training.global_batch % total:
        nearest_values = _suggest_batch(problem, layout, layout.microbatch)
        hint = " with ".join(f"{name}: {value}" for name, value in nearest_values.items())
        yield Violation(
            "microbatch" if "microbatch" in nearest_values else "data",
            f"microbatch({layout.microbatch}) * data({layout.data}) = {total} divides "
            f"global_batch({training.global_batch}); nearest {hint}",
        )


def _suggest_batch(problem: Problem, layout: Layout, microbatch: int) -> dict[str, int]:
    """Return the nearest values with which every device has a rank, and data ranks divide the batch.

    The other degrees decide the data degree. Where it does not divide the batch, the batch has to change.
    """
    batch, num_devices = problem.training.global_batch, len(layout.placement or problem.cluster.free_devices)
    data, num_idle = divmod(num_devices, layout.model_ranks)
    if num_idle or not data:  # another rule says so, and no data degree would do
        data = layout.data
    result = {} if data == layout.data else {"data": data}
    if batch % data == 0:
        nearest = _nearest(batch // data, microbatch)
        return result if nearest == microbatch else result | {"microbatch": nearest}
    sequences = data * microbatch
    below = batch // sequences * sequences
    is_below_nearer = below and batch - below <= below + sequences - batch
    return result | {"global_batch": below if is_below_nearer else below + sequences}


def _recompute_violations(graph: OperatorGraph, layout: Layout) -> Iterator[Violation]:
    if isinstance(layout.recompute, Recompute):
        return  # a word for all layers is always legal
    count = find_rule(layout.schedule).count_stages(layout.pipeline, layout.chunks)
    if isinstance(layout.recompute, PerStage) and len(layout.recompute.stages) != count:
        yield from recompute_violations(graph, layout.recompute, (0,) * count)  # such stages need not exist
        return
    layers = {name for name, block in graph.occurrences if block.layer}
    stages = partition_layers(graph, count, layout.stages)
    yield from recompute_violations(
        graph, layout.recompute, tuple(sum(name in layers for name in stage.blocks) for stage in stages)
    )


def recompute_violations(
    graph: OperatorGraph, recompute_choice: Recomputation, layers: tuple[int, ...]
) -> Iterator[Violation]:
    """Yield every rule that the recomputation of stages breaks that have so many layers each."""
    if not isinstance(recompute_choice, PerStage):
        yield from _stage_recompute_violations(
            graph, recompute_choice, max(layers), f"a stage has at most {max(layers)}"
        )
    elif len(recompute_choice.stages) != len(layers):
        hint = (
            f"; nearest: {recompute_choice.stages[0]} for all stages alike"
            if len(set(recompute_choice.stages)) == 1
            else ""
        )
        message = f"recompute of a list has one a stage, of {len(layers)} in all"
        yield Violation("recompute", f"{message}, met {len(recompute_choice.stages)}{hint}")
    else:
        for stage, stage_choice in enumerate(recompute_choice.stages):
            yield from _stage_recompute_violations(
                graph, stage_choice, layers[stage], f"stage {stage} has {layers[stage]}"
            )


def _stage_recompute_violations(
    graph: OperatorGraph, recompute_choice: StageRecompute, max_layers: int, stage_text: str
) -> Iterator[Violation]:
    if isinstance(recompute_choice, SomeOperators):
        blocks = [block for block in graph.blocks if block.layer] or list(graph.blocks)
        known_names = list(dict.fromkeys(operator.name for block in blocks for operator in block.operators))
        unknown_name = next(
            (name for name in recompute_choice.names if name.removesuffix(HALF) not in known_names), None
        )
        if unknown_name is not None:
            hints = [f"; nearest: {name}" for name in get_close_matches(unknown_name, known_names, n=1, cutoff=0.3)]
            rule = f"recompute names operators of a layer: {', '.join(known_names)}"
            yield Violation("recompute", f"{rule}; met {unknown_name[:100]}{''.join(hints)}")
        products = list(
            dict.fromkeys(
                operator.name for block in blocks for operator in block.operators if operator.kind in PRODUCTS
            )
        )
        halved_name = next((name for name in sorted(recompute_choice.halved_operators) if name not in products), None)
        if halved_name in known_names:
            rule = f"half of a result is computed again (/2) of products: {', '.join(products)}"
            yield Violation("recompute", f"{rule}; met {halved_name}{HALF}; nearest: {halved_name}")
    if isinstance(recompute_choice, FirstLayers) and recompute_choice.layers > max_layers:
        yield Violation(
            "recompute",
            f"{stage_text} layers to recompute, met {recompute_choice.layers}; nearest: {max_layers or Recompute.NONE}",
        )


def offload_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that the offloading of a layout breaks."""
    offload, rule = layout.offload, known_rule(layout)
    if offload == NO_OFFLOADING or rule is None:
        return
    wrong_names = [name for name in OFFLOADS if len(getattr(offload, name)) not in (0, 1, layout.pipeline)]
    for name in wrong_names:
        yield Violation(
            f"offload.{name}",
            f"{name} holds one fraction, or one for each of pipeline({layout.pipeline}) ranks, met "
            f"{len(getattr(offload, name))}; nearest: {layout.pipeline} of them",
        )
    if wrong_names:
        return  # the checks below index fractions by pipeline position
    if rule.is_asynchronous:
        yield from _unflushed_offload_violations(offload, rule.name)
    if any(offload.activations) and (rule.splits_backward or rule.pairs is not list_no_pairs):
        yield Violation(
            "offload.activations",
            f"activations on the host move with whole passes, one after another: {rule.name} splits backward "
            "or runs passes in pairs; nearest: 1f1b",
        )
    if any(offload.activations) and not any(block.layer for block in problem.graph.blocks):
        yield Violation(
            "offload.activations",
            "activations on the host are those of layers, the model has none; nearest: leave it out",
        )
    if any(offload.parameters):
        messages = _list_parameter_offload_messages(problem, layout)
        yield from (Violation("offload.parameters", message) for message in messages)


def _unflushed_offload_violations(offload: Offloading, schedule: str) -> Iterator[Violation]:
    """Yield every offload that a schedule without a flush forbids: all but whole optimizer states stepped on hosts."""
    for name in ("parameters", "activations"):
        if any(getattr(offload, name)):
            message = f"{name} on the host need a flush, {schedule} has none; nearest: leave them out"
            yield Violation(f"offload.{name}", message)
    if any(offload.optimizer) and (
        offload.step is StepPlace.DEVICE or any(fraction < 1 for fraction in offload.optimizer)
    ):
        yield Violation(
            "offload.optimizer",
            f"without a flush the host makes whole updates, {schedule} has none; nearest: 1.0 with step: host",
        )


def _list_parameter_offload_messages(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield the message of every rule that parameters on the host break."""
    offload, ranks = layout.offload, range(layout.pipeline)
    fractions = [
        (offload.fraction_at("parameters", position), offload.fraction_at("optimizer", position)) for position in ranks
    ]
    conflict = next((pair for pair in fractions if pair[0] > 0 and pair[1] < 1), None)
    if conflict is not None:
        yield (
            "parameters on the host are updated from there and need optimizer: 1.0 on the same pipeline ranks, "
            f"met optimizer: {conflict[1]:g} with parameters: {conflict[0]:g}; nearest: optimizer: 1.0"
        )
    if layout.replicas > 1 and layout.zero < 3:
        yield (
            f"parameters on the host need zero 3 where data * context = {layout.replicas} ranks keep the same "
            f"parameters, met zero {layout.zero}; nearest: 3"
        )
    if layout.zero and layout.shards < layout.replicas:
        yield (
            "parameters on the host need all ranks to share them, for replicas sum gradients on devices at the end of "
            f"a step, met {layout.replicas // layout.shards} replicas; nearest: zero_shards: 0"
        )
    if problem.training.quantised_bytes:
        yield "parameters on the host leave no copies on devices, and fp8 ones stay there; nearest: precision: bf16"
    is_whole = all(fraction == 1 for fraction, _ in fractions)
    if problem.graph.tied and (layout.pipeline > 1 or not is_whole):
        yield (
            "parameters on the host need both ends of a tied one on one rank, and all of them there, "
            f"met pipeline({layout.pipeline}) with {'all' if is_whole else 'a part'} of the parameters; "
            f"nearest: {'pipeline: 1' if is_whole else 'parameters: 1.0'}"
        )


def pipeline_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that the stages or the schedule of ``layout`` break."""
    layers = num_layers(problem.graph)
    try:
        rule = find_rule(layout.schedule)
    except ValueError as error:
        yield Violation(f"schedule.{error.rank}" if isinstance(error, OrderError) else "schedule", str(error))
        return
    stages = rule.count_stages(layout.pipeline, layout.chunks)
    count_text = f"pipeline({layout.pipeline}) * chunks({layout.chunks}) = {stages}"
    if isinstance(rule, WrittenRule):
        count_text = f"the order's {stages}"
        yield from _written_violations(problem, layout, rule)
    else:
        yield from _schedule_violations(problem, layout, rule)
    if isinstance(layout.stages, tuple):
        if len(layout.stages) != stages or sum(layout.stages) != layers or min(layout.stages) < 0:
            yield Violation(
                "stages",
                f"stages are {count_text} counts that add to "
                f"layers({layers}), met {format_numbers(layout.stages)} = {sum(layout.stages)}",
            )
    elif layout.stages not in ("even", "balanced"):
        yield Violation("stages", f"stages is even, balanced or a list of layers a stage, met {layout.stages}")
    elif layout.stages == "even" and layers % stages:
        yield Violation(
            "pipeline",
            f"{count_text} stages divide layers({layers}) where stages is even; "
            f"nearest: {_nearest(layers, stages)} stages, or stages: balanced",
        )
    elif stages > count_possible_stages(problem.graph):
        num_ends = count_possible_stages(problem.graph) - layers
        ends_text = f" and {num_ends} for what is around them" if num_ends else ""
        yield Violation("pipeline", f"{count_text} stages are at most layers({layers}){ends_text}")


def known_rule(layout: Layout) -> ScheduleRule | None:
    """Return the rule of a layout's schedule; ``None`` for an unknown or malformed schedule."""
    try:
        return find_rule(layout.schedule)
    except ValueError:
        return None


def count_chunks(layout: Layout, rule: ScheduleRule) -> int:
    """Return the largest number of chunks of a rank; of a written order its own number where ``chunks`` is 1."""
    return rule.chunks[0] if isinstance(rule, WrittenRule) and layout.chunks == 1 else layout.chunks


def _written_violations(problem: Problem, layout: Layout, rule: WrittenRule) -> Iterator[Violation]:
    """Yield the rules that a written order breaks: ranks, chunks, microbatches, or a deadlock of its actions."""
    # one fault at a time: the later checks need an order that is defined for these ranks and microbatches
    fault = rule.explain_undefined(layout.pipeline, rule.num_microbatches, count_chunks(layout, rule))
    if fault is not None:
        yield Violation("chunks" if layout.pipeline == rule.num_ranks else "pipeline", fault)
        return
    batch, num_microbatches = problem.training.global_batch, rule.num_microbatches
    sequences = layout.sequences
    if batch % sequences == 0 and batch // sequences != num_microbatches:
        hint = (
            f"; nearest microbatch: {batch // (layout.data * num_microbatches)}"
            if batch % (layout.data * num_microbatches) == 0
            else ""
        )
        yield Violation(
            "schedule",
            f"global_batch({batch}) / {layout.sequences_text} = {batch // sequences} "
            f"microbatches, the order has {num_microbatches}{hint}",
        )
        return
    try:  # walking the actions in order of dependence finds a deadlock
        for _ in order_actions(build_schedule(layout.schedule, rule.num_ranks, num_microbatches, rule.chunks[0])):
            pass
    except OrderError as error:
        yield Violation(f"schedule.{error.rank}", str(error))


def _schedule_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    sequences = layout.sequences
    if rule.is_asynchronous:
        yield from _unflushed_violations(problem, layout, rule)
    min_chunks, max_chunks = rule.chunks
    if layout.chunks < min_chunks or layout.chunks > (max_chunks or layout.chunks):
        fault = rule.find_violation(layout.pipeline, max(layout.pipeline, 1) * 2, layout.chunks)
        yield Violation("chunks", str(fault))
    elif layout.chunks > 1 and layout.pipeline < 2:
        yield Violation("pipeline", f"{rule.name}: pipeline(1) >= 2 does not hold; nearest: 2")
    elif problem.training.global_batch % sequences == 0:
        fault = rule.find_violation(layout.pipeline, problem.training.global_batch // sequences, layout.chunks)
        if fault is not None:
            yield Violation("schedule", fault)


def _unflushed_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    """Yield the rules of pipelines without a flush, whose stages update their weights at different times."""
    name = layout.schedule
    if layout.zero >= 2:
        shard_text = "gathered shards of the newest one" if layout.zero == 3 else "a shard of their sum"
        whole_text = "whole weights of several versions" if layout.zero == 3 else "whole gradients until each update"
        yield Violation(
            "zero",
            f"zero({layout.zero}) <= 1 does not hold for {name}: without a flush a stage keeps {whole_text}, "
            f"not {shard_text}; nearest: 1",
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
