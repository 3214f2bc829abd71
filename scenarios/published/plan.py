"""The plan of a row: from its stated fields, then its framework's defaults, changed to the nearest legal one."""

import re
from dataclasses import replace
from itertools import chain
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from meshwise.scenarios.inputs.plan_table import list_rule_violations
from meshwise.scenarios.intervals import GUESSED
from meshwise.scenarios.published.frameworks import (
    find_entry,
    is_megatron,
    is_sequence_parallel,
    is_torchtitan,
    overlaps_gradients,
    overlaps_tensor,
    selects_products,
    zero_stage,
)
from meshwise.scenarios.published.recompute import keeps_every_second_product, keeps_products, read_recompute
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.published.words import read_attention, read_offload, read_schedule
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.scenarios.schema.loads import MAX_SEQUENCE
from meshwise.scenarios.schema.plan import MAX_BATCH
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import GATES, Block, OperatorGraph, OperatorKind
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import nearest_divisor
from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import HALF, FirstLayers, Recomputation, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import SCHEDULES, build_schedule, is_text


class Degrees(NamedTuple):
    """The number of ranks along each axis, and the model chunks of a pipeline rank."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    chunks: int

    @property
    def devices(self) -> int:
        """The number of all ranks."""
        return self.data * self.tensor * self.pipeline * self.context


class Batch(NamedTuple):
    """Sequences of a step, and of one microbatch; ``micro`` is None where it is not known."""

    total: int
    micro: int | None


def read_degrees(row: Row) -> Degrees:
    """Return the degrees of a row; a missing data degree or number of devices follows from the others."""
    axes = {name: row.count(name, MAX_DEVICES) for name in ("tp", "pp", "cp")}
    for name, degree in axes.items():
        if degree is None:
            row.assume(f"{name} 1 (not stated)")
    tensor, pipeline, context = (degree or 1 for degree in axes.values())
    devices = (row.optional_count if row.states("dp") else row.count)("n_devices", MAX_DEVICES)
    data = row.optional_count("dp", MAX_DEVICES) if devices else row.count("dp", MAX_DEVICES)
    model_ranks = tensor * pipeline * context
    if devices is None:
        if data is None:
            raise Skip("n_devices is not stated, and neither is dp")
        devices = data * model_ranks
        row.assume(f"n_devices {devices} (not stated; dp * tp * pp * cp)")
    if devices % model_ranks:
        raise Skip(f"tp({tensor}) * pp({pipeline}) * cp({context}) = {model_ranks} divides n_devices, met {devices}")
    if data is None:
        row.assume(f"dp {devices // model_ranks} (not stated; n_devices / (tp * pp * cp))")
    elif data * model_ranks != devices:
        row.assume(f"dp {devices // model_ranks}: the stated {data} * {model_ranks} are not n_devices({devices})")
    data = devices // model_ranks
    return Degrees(
        data, tensor, pipeline, context, row.optional_count("ep", MAX_DEVICES) or 1, _count_chunks(row, pipeline)
    )


def _count_chunks(row: Row, pipeline: int) -> int:
    chunks = row.optional_count("vpp", 1000)
    if chunks is None and pipeline > 1:
        row.assume("vpp 1 (not stated)")
    return (chunks or 1) if pipeline > 1 else 1


COMMON_LENGTH = 4096
"""Tokens of a sequence where a row states nothing of them: those of most pretraining recipes of 2023 to 2025."""


def read_sequence(row: Row, has_fixed_size: bool) -> int:
    """Return the tokens of a sequence; 1 where the model has samples of a fixed size and the row states none."""
    length = row.optional_count("seq_len", MAX_SEQUENCE)
    if length is None and not has_fixed_size:
        tokens, samples = (
            row.optional_number("tokens_per_s_per_device"),
            row.optional_number("samples_per_s_per_device"),
        )
        if tokens is None or samples is None:
            row.assume(f"seq_len {COMMON_LENGTH} ({GUESSED})")
            return COMMON_LENGTH
        length = min(max(1, round(tokens / samples)), MAX_SEQUENCE)
        row.assume(f"seq_len {length} (not stated; tokens over samples a second)")
    return length or 1


def read_batch(row: Row, degrees: Degrees, length: int) -> Batch:
    """Return the batch of a row, from whichever fields state it."""
    accumulation_steps = row.optional_count("grad_accum", MAX_BATCH)
    total = None if "token" in row.text("global_batch") else row.optional_count("global_batch", MAX_BATCH)
    micro = row.optional_number("micro_batch")
    if micro is not None and total is not None:
        micro = _scale_to_rank(row, degrees, micro, accumulation_steps, total)
    if total is None:
        total = _count_sequences(row, degrees, length, micro, accumulation_steps)
    if (
        micro is None
        and accumulation_steps is None
        and degrees.pipeline > 1
        and find_entry(row).defaults.microbatches == "stages"
    ):
        accumulation_steps = degrees.pipeline
        row.assume(f"grad_accum {degrees.pipeline} (not stated; {find_entry(row).name}: as many as ranks)")
    if micro is None and accumulation_steps is not None:
        micro = max(1.0, total / (degrees.data * accumulation_steps))
        row.assume(f"micro_batch {micro:g} (not stated; global_batch / (dp * grad_accum))")
    if micro is not None and micro >= 1 and not micro.is_integer():
        row.assume(f"micro_batch {round(micro)}, for {micro:g} is no whole number")
    return Batch(total, None if micro is None else max(1, round(micro)))


def _scale_to_rank(row: Row, degrees: Degrees, micro: float, accumulation_steps: int | None, total: int) -> float:
    """Return the microbatch of a data rank in sequences, where the row may state it per device.

    MaxText counts sequences per chip (``per_device_batch_size``): a data rank has those of all its tensor ranks.
    """
    device_total, rank_total = (micro * ranks * (accumulation_steps or 1) for ranks in (degrees.devices, degrees.data))
    if degrees.pipeline > 1 or (accumulation_steps is None and find_entry(row).defaults.microbatch_of != "chip"):
        return micro
    if rank_total == total or device_total != total:
        return micro
    rank_microbatch = micro * degrees.devices / degrees.data
    row.assume(f"micro_batch {rank_microbatch:g}, for {micro:g} a device make the global_batch({total})")
    return rank_microbatch


def _count_sequences(
    row: Row, degrees: Degrees, length: int, micro: float | None, accumulation_steps: int | None
) -> int:
    tokens = row.optional_number("global_batch" if "token" in row.text("global_batch") else "global_batch_tokens")
    if tokens is not None:
        total = max(1, round(tokens / length))
    elif micro is not None:
        total = max(1, round(micro * degrees.data * (accumulation_steps or 1)))
    else:
        total = _infer_batch(row, degrees, length)
    row.assume(f"global_batch {total} (not stated; from the other fields)")
    return min(total, MAX_BATCH)


def _infer_batch(row: Row, degrees: Degrees, length: int) -> int:
    step, samples = row.optional_number("step_time_s"), row.optional_number("samples_per_s_per_device")
    tokens = row.optional_number("tokens_per_s_per_device")
    rate = samples or (tokens / length if tokens else None)
    if step is None or rate is None:
        row.assume(f"one sequence a data rank and pipeline rank: global_batch is {GUESSED}")
        return degrees.data * degrees.pipeline
    return max(1, round(step * rate * degrees.devices))


def count_sequence_parts(row: Row) -> int:
    """Return how many ranks share one sequence: 1, or more where the microbatch is a fraction of a sequence."""
    micro = row.optional_number("micro_batch")
    if micro is None or micro >= 1:
        return 1
    return max(1, round(min(1 / micro, 1024)))


_INSTANCES = re.compile(r"num-distributed-optimizer-instances=([1-9]\d{0,3})")
"""Megatron-LM's word for how many groups of data ranks share the states, each in itself."""


def count_shards(row: Row, degrees: Degrees, zero: int) -> int:
    """Return over how many neighbouring data ranks ZeRO shards the states: 0 for all data ranks."""
    stated_shards = row.optional_count("fsdp_shards", MAX_DEVICES)
    if stated_shards is None and zero and (match := _INSTANCES.search(row.text("plan_note"))):
        stated_shards = degrees.data * degrees.context // int(match[1])
    if stated_shards is None and zero and row.says("hybrid_shards", "plan_note", "schedule", "framework"):
        stated_shards = min(row.optional_count("devices_per_node") or 8, degrees.data)
        row.assume(f"fsdp_shards {stated_shards} (hybrid sharding, number not stated: one node)")
    if stated_shards is None or not zero:
        return 0
    data_shards = stated_shards // degrees.context if stated_shards % degrees.context == 0 else stated_shards
    return data_shards if 1 < data_shards < degrees.data else 0


MAX_REPAIRS = 24
"""Number of changes after which a layout is given up."""
MAX_MICROBATCH = 16
"""Largest microbatch, in sequences, that is tried where a row states none."""

_SIMPLER_SCHEDULES = {
    "dualpipev": "interleaved",
    "zbv": "interleaved_zero_bubble",
    "interleaved_zero_bubble": "interleaved",
    "interleaved": "1f1b",
    "looped_bfs": "1f1b",
    "zb2p": "zb1p",
    "zb1p": "1f1b",
    "pipedream": "1f1b",
    "pipedream_2bw": "1f1b",
    "1f1b": "gpipe",
    "gpipe": "naive",
}
"""The next simpler schedule of each; gpipe takes as long as 1f1b and runs with a single microbatch."""


def read_layout(row: Row, problem: Problem, degrees: Degrees, batch: Batch) -> Layout:
    """Return the layout that a row states, with a microbatch of 1 where it states none."""
    zero = zero_stage(row)
    name, chunks = read_schedule(row, degrees.pipeline, degrees.chunks)
    layers = max(1, num_layers(problem.graph) // (degrees.pipeline * chunks))
    stages = degrees.pipeline * chunks
    zero_shards = count_shards(row, degrees, zero)
    shards_sequence = degrees.tensor > 1 and is_sequence_parallel(row)
    if zero and (row.optional_count("fsdp_shards") or 0) == 1:
        zero = 0
        row.assume("zero_stage 0, for states are shared by 1 rank")
    if zero == 3 and degrees.pipeline > 1 and is_torchtitan(row):
        # distributed/fsdp.py, get_fsdp_reshard_after_forward_policy: it reshards without a pipeline alone;
        # torch/distributed/pipelining/stage.py, backward_maybe_with_nosync: the last microbatch sums over ranks
        zero = 1
        row.assume("zero_stage 1: fully_shard in a pipeline keeps whole parameters and gradients through the step")
    return Layout(
        data=degrees.data,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        context=degrees.context,
        expert=degrees.expert,
        attention=read_attention(row, degrees.context),
        sequence_parallel=shards_sequence,
        overlap_tensor=shards_sequence and overlaps_tensor(row),
        microbatch=batch.micro or 1,
        schedule=name,
        chunks=chunks,
        zero=zero,
        zero_shards=zero_shards,
        recompute=_read_recompute(row, problem.graph, layers),
        overlap_gradients=overlaps_gradients(row, zero) if degrees.data * degrees.context > 1 else True,
        scatter_gather=_uses_scatter_gather(row, degrees),
        stages=_divide_stages(row, num_layers(problem.graph), stages),
        offload=read_offload(row),
    )


def _read_recompute(row: Row, graph: OperatorGraph, layers: int) -> Recomputation:
    """Return the recompute choice of a row, nothing where it states none; ``layers`` are those of a stage."""
    if keeps_products(row):
        blocks = [block for block in graph.blocks if block.layer]
        operators = dict.fromkeys(
            operator.name for block in blocks for operator in block.operators if operator.kind not in PRODUCTS
        )
        row.assume(f"recompute of {' + '.join(operators)}: the results of products are kept")
        return SomeOperators(tuple(operators))
    if not (keeps_every_second_product(row) or selects_products(row)):
        return read_recompute(row, layers) or Recompute.NONE
    layer_names = (list_unkept_operators(block) for block in graph.blocks if block.layer)
    names = tuple(dict.fromkeys(chain.from_iterable(layer_names)))
    row.assume(f"recompute of {' + '.join(names)}: attention and every second product are kept")
    return SomeOperators(names)


def list_unkept_operators(layer: Block) -> tuple[str, ...]:
    """Return the operators that run again where attention and every second product of a layer are kept.

    The first product is kept, the second is not, and so on; queries, keys, values, gates and their factors are products
    of their own there. Of an operator of several products all, half or none run again, whichever is nearest.
    """
    names, is_kept = [], False
    for operator in layer.operators:
        if operator.kind in PRODUCTS:
            sizes = [prod(layer.tensor[name].shape) for name in operator.outputs]
            if any(GATES in layer.tensor[name].dims for name in operator.outputs):
                sizes = [size for size in sizes for _ in range(2)]
            first_unkept = int(not is_kept)
            share = sum(sizes[first_unkept::2]) / sum(sizes)
            is_kept ^= len(sizes) % 2 == 1
            names += ([], [f"{operator.name}{HALF}"], [operator.name])[round(2 * share)]
        elif operator.kind is not OperatorKind.ATTENTION:
            names.append(operator.name)
    return tuple(names)


def _divide_stages(row: Row, layers: int, stages: int) -> str | tuple[int, ...]:
    """Return the layers of every stage, or the name of the rule that divides them.

    Where the stages do not divide the layers, Megatron-LM can count the embedding and the loss as one layer each
    (--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split).
    """
    if (sizes := _read_stage_sizes(row, layers, stages)) is not None:
        return sizes
    if layers % stages == 0:
        return "even"
    stage_layers, remainder = divmod(layers + 2, stages)
    if remainder or stages < 2 or not is_megatron(row):
        return "balanced"
    row.assume("embedding and loss each take the place of a layer in their stage (layers a stage not stated)")
    return (stage_layers - 1, *(stage_layers,) * (stages - 2), stage_layers - 1)


_END_STAGES = re.compile(r"decoder-(first|last)-pipeline-num-layers=(\d{1,4})")
"""Megatron-LM's layers of the first and of the last pipeline rank, in ``plan_note``."""


def _read_stage_sizes(row: Row, layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the layers of every stage that ``plan_note`` states by Megatron-LM's arguments; None where it does not."""
    ends = {name: int(count) for name, count in _END_STAGES.findall(row.text("plan_note"))}
    for name, word in (("first", "stage_embedding"), ("last", "stage_loss")):
        if name not in ends and row.says(word, "plan_note") and (layers + 2) % stages == 0:
            ends[name] = (layers + 2) // stages - 1
    middle_stages, middle_layers = stages - len(ends), layers - sum(ends.values())
    if not ends or middle_stages < 1 or middle_layers < middle_stages or 0 in ends.values():
        return None
    share, remainder = divmod(middle_layers, middle_stages)
    if remainder:
        return None
    first, last = (tuple(count for end, count in ends.items() if end == name) for name in ("first", "last"))
    row.assume(f"from plan_note: {', '.join(f'{count} layers in the {name} stage' for name, count in ends.items())}")
    return (*first, *(share,) * middle_stages, *last)


def _uses_scatter_gather(row: Row, degrees: Degrees) -> bool:
    if not is_megatron(row) or row.flag("sequence_parallel") is not False or 1 in (degrees.tensor, degrees.pipeline):
        return False
    row.assume("stage boundaries cross scattered and are gathered, Megatron-LM's default (not stated)")
    return True


def find_nearest(row: Row, problem: Problem, layout: Layout) -> Layout:
    """Return the legal layout that is nearest to a stated one, by repairing one violation at a time.

    Raises
    ------
    Skip
        Where no repair leads to a legal layout.
    """
    for _ in range(MAX_REPAIRS):
        violation = next(iter(list_rule_violations(problem, layout)), None)
        if violation is None:
            return layout
        repaired_layout = _repair_layout(problem, layout, violation.field.split(".")[0])
        if repaired_layout is None or repaired_layout == layout:
            raise Skip(f"plan.{violation.field}: {violation.message}")
        row.assume(f"{_describe_difference(layout, repaired_layout)}, for {violation.message.split(';')[0][:160]}")
        layout = repaired_layout
    raise Skip("no plan near the one stated keeps the simulator's rules")


def _describe_difference(before: Layout, after: Layout) -> str:
    if is_text(after.schedule) and not is_text(before.schedule):
        return "1f1b as Megatron-LM runs it with fewer microbatches than stages"
    names = (name for name in Layout.__dataclass_fields__ if getattr(before, name) != getattr(after, name))
    return ", ".join(f"{name} {str(getattr(after, name)) or 'nothing'}" for name in names)


def _repair_layout(problem: Problem, layout: Layout, field: str) -> Layout | None:
    """Return a layout without the violation in ``field``, or None where no small change removes it."""
    if field in ("schedule", "chunks", "pipeline"):
        return _simplify_schedule(problem, layout)
    if field == "recompute":
        return _shorten_recompute(layout)
    if field == "expert":
        degree = gcd(layout.expert, layout.data)
        return replace(layout, expert=degree if degree < layout.expert else nearest_divisor(degree, degree // 2))
    if field == "context" and layout.attention is Attention.ULYSSES:
        return replace(layout, attention=Attention.RING)
    if field == "attention":
        return replace(layout, attention=Attention.ALL_GATHER if layout.attention is Attention.RING else Attention.RING)
    if field in ("tensor", "sequence_parallel") and layout.sequence_parallel:
        return replace(layout, sequence_parallel=False)
    if field == "stages" and layout.stages != "balanced":
        return replace(layout, stages="balanced")
    simplest: dict[str, Any] = {"overlap_tensor": False, "offload": NO_OFFLOADING, "zero_shards": 0}
    simplest["zero"] = min(layout.zero, 1)
    return replace(layout, **{field: simplest[field]}) if field in simplest else None


def _simplify_schedule(problem: Problem, layout: Layout) -> Layout | None:
    """Return a layout whose stages all have layers, or one with the next simpler schedule; None without one."""
    num_stages, layers = layout.pipeline * layout.chunks, num_layers(problem.graph)
    if layout.schedule == "1f1b" and (order := _write_one_forward_one_backward(problem, layout)):
        return replace(layout, schedule=order)
    if layout.stages == "even" and layers % num_stages and num_stages <= layers:
        return replace(layout, stages="balanced")
    if num_stages > layers >= layout.pipeline * 2:
        return replace(layout, chunks=layers // layout.pipeline, stages="balanced")
    simpler_schedule = _SIMPLER_SCHEDULES.get(layout.schedule)
    if simpler_schedule is None:
        return None
    min_chunks, max_chunks = SCHEDULES[simpler_schedule].chunks
    chunks = max(min_chunks, min(layout.chunks, max_chunks or layout.chunks))
    stages: str | tuple[int, ...] = "balanced" if layers % (layout.pipeline * chunks) else "even"
    if chunks == layout.chunks:
        stages = layout.stages
    return replace(layout, schedule=simpler_schedule, chunks=chunks, stages=stages)


MAX_WRITTEN_ACTIONS = 20_000
"""Most actions of a written schedule."""


def _write_one_forward_one_backward(problem: Problem, layout: Layout) -> str | None:
    """Return the order of 1F1B with fewer microbatches than ranks; None where there are as many, or too many actions.

    torch refuses it and Megatron-LM runs it, with ``min(p - rank - 1, m)`` forwards to warm up
    (``schedules.py``, ``forward_backward_pipelining_without_interleaving``).
    """
    num_microbatches = problem.training.global_batch // layout.sequences
    too_many = 2 * layout.pipeline * num_microbatches > MAX_WRITTEN_ACTIONS
    if layout.chunks > 1 or not 0 < num_microbatches < layout.pipeline or too_many:
        return None
    return str(build_schedule("1f1b", layout.pipeline, num_microbatches))


def _shorten_recompute(layout: Layout) -> Layout | None:
    recompute = layout.recompute
    if not isinstance(recompute, FirstLayers):
        return None
    fewer = FirstLayers(recompute.layer, recompute.layers - 1) if recompute.layers > 1 else recompute.layer
    return replace(layout, recompute=fewer)


LEVELS = 6
"""Number of recompute choices: nothing, the cheap operators, a quarter, half, three quarters and all of the layers."""


def find_recomputation(level: int, layout: Layout, graph: OperatorGraph) -> Recomputation:
    """Return the recompute choice of a level from 0 to `LEVELS` - 1, least first.

    The cheap operators are the attention core where it keeps its scores [1]_; else norms and activations, which
    Megatron-LM selects with ``--recompute-modules``.

    References
    ----------
    .. [1] Korthikanti et al. 2022, section 5.
    """
    if level in (0, LEVELS - 1):
        return Recompute.FULL if level else Recompute.NONE
    if level > 1:
        stage_layers = -(-num_layers(graph) // (layout.pipeline * layout.chunks))
        count = ceil(stage_layers * (level - 1) / 4)
        return FirstLayers(Recompute.FULL, count) if count < stage_layers else Recompute.FULL
    operators = {operator.name: operator.kind for block in graph.blocks if block.layer for operator in block.operators}
    if OperatorKind.ATTENTION not in operators.values():
        return Recompute.SELECTIVE
    names = (name for name, kind in operators.items() if kind is OperatorKind.NORM or name.endswith("activation"))
    return SomeOperators(tuple(names))


def list_microbatches(layout: Layout, batch: Batch) -> tuple[int, ...]:
    """Return the microbatches that a row leaves open, in sequences and the largest first; one where it states it."""
    if batch.micro is not None:
        return (batch.micro,)
    rank_batch = batch.total // layout.data
    if layout.pipeline > 1 or rank_batch < 2:
        return (1,)
    return tuple(micro for micro in (16, 8, 4, 2, 1) if rank_batch % micro == 0 and micro <= MAX_MICROBATCH)
