"""The plan of a row: from its stated fields, then its framework's defaults, changed to the nearest legal one."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd
from typing import NamedTuple

from meshwise.scenarios.inputs.plan_table import rule_violations
from meshwise.scenarios.published import words
from meshwise.scenarios.published.frameworks import (
    is_megatron,
    is_xla,
    overlaps_gradients,
    overlaps_tensor,
    sequence_parallel,
    zero_stage,
)
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.scenarios.schema.plan import MAX_BATCH
from meshwise.scenarios.schema.scenario import MAX_SEQUENCE
from meshwise.simulator.operator_graph import OperatorGraph, OperatorKind
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import nearest_divisor
from meshwise.strategies.plan.offloading import NOTHING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import SCHEDULES


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


def degrees(row: Row) -> Degrees:
    """Return the degrees of a row; a missing data degree or number of devices follows from the others."""
    axes = {name: row.count(name, MAX_DEVICES) for name in ("tp", "pp", "cp")}
    for name, degree in axes.items():
        if degree is None:
            row.assume(f"{name} 1 (not stated)")
    tensor, pipeline, context = (degree or 1 for degree in axes.values())
    devices = row.count("n_devices", MAX_DEVICES)
    data = row.optional("dp", MAX_DEVICES) if devices else row.count("dp", MAX_DEVICES)
    others = tensor * pipeline * context
    if devices is None:
        if data is None:
            raise Skip("n_devices is not stated, and neither is dp")
        devices = data * others
        row.assume(f"n_devices {devices} (not stated; dp * tp * pp * cp)")
    if devices % others:
        raise Skip(f"tp({tensor}) * pp({pipeline}) * cp({context}) = {others} divides n_devices, met {devices}")
    if data is None:
        row.assume(f"dp {devices // others} (not stated; n_devices / (tp * pp * cp))")
    elif data * others != devices:
        row.assume(f"dp {devices // others}: the stated {data} * {others} are not n_devices({devices})")
    data = devices // others
    return Degrees(data, tensor, pipeline, context, row.count("ep", MAX_DEVICES) or 1, _chunks(row, pipeline))


def _chunks(row: Row, pipeline: int) -> int:
    chunks = row.count("vpp", 1000)
    if chunks is None and pipeline > 1:
        row.assume("vpp 1 (not stated)")
    return (chunks or 1) if pipeline > 1 else 1


def sequence(row: Row, fixed: bool) -> int:
    """Return the tokens of a sequence; 1 where the model has samples of a ``fixed`` size and the row states none."""
    length = row.count("seq_len", MAX_SEQUENCE)
    if length is None and not fixed:
        tokens, samples = row.number("tokens_per_s_per_device"), row.number("samples_per_s_per_device")
        if tokens is None or samples is None:
            raise Skip("seq_len is not stated")
        length = min(max(1, round(tokens / samples)), MAX_SEQUENCE)
        row.assume(f"seq_len {length} (not stated; tokens over samples a second)")
    return length or 1


def batch(row: Row, at: Degrees, length: int) -> Batch:
    """Return the batch of a row, from whichever fields state it."""
    accumulated = row.count("grad_accum", MAX_BATCH)
    total = None if "token" in row.text("global_batch") else row.count("global_batch", MAX_BATCH)
    micro = row.number("micro_batch")
    if micro is not None and total is not None:
        micro = _of_data_rank(row, at, micro, accumulated, total)
    if total is None:
        total = _total(row, at, length, micro, accumulated)
    if micro is None and accumulated is not None:
        micro = max(1.0, total / (at.data * accumulated))
        row.assume(f"micro_batch {micro:g} (not stated; global_batch / (dp * grad_accum))")
    if micro is not None and micro >= 1 and not micro.is_integer():
        row.assume(f"micro_batch {round(micro)}, for {micro:g} is no whole number")
    return Batch(total, None if micro is None else max(1, round(micro)))


def _of_data_rank(row: Row, at: Degrees, micro: float, accumulated: int | None, total: int) -> float:
    """Return the microbatch of a data rank in sequences, where the row may state it per device.

    MaxText counts sequences per chip (``per_device_batch_size``): a data rank has those of all its tensor ranks.
    """
    a_device, a_rank = (micro * ranks * (accumulated or 1) for ranks in (at.devices, at.data))
    if at.pipeline > 1 or (accumulated is None and not is_xla(row)):
        return micro
    if a_rank == total or a_device != total:
        return micro
    whole = micro * at.devices / at.data
    row.assume(f"micro_batch {whole:g}, for {micro:g} a device make the global_batch({total})")
    return whole


def _total(row: Row, at: Degrees, length: int, micro: float | None, accumulated: int | None) -> int:
    tokens = row.number("global_batch" if "token" in row.text("global_batch") else "global_batch_tokens")
    if tokens is not None:
        total = max(1, round(tokens / length))
    elif micro is not None:
        total = max(1, round(micro * at.data * (accumulated or 1)))
    else:
        total = _from_speed(row, at, length)
    row.assume(f"global_batch {total} (not stated; from the other fields)")
    return min(total, MAX_BATCH)


def _from_speed(row: Row, at: Degrees, length: int) -> int:
    step, samples = row.number("step_time_s"), row.number("samples_per_s_per_device")
    tokens = row.number("tokens_per_s_per_device")
    rate = samples or (tokens / length if tokens else None)
    if step is None or rate is None:
        raise Skip("global_batch is not stated, and neither are micro_batch and grad_accum")
    return max(1, round(step * rate * at.devices))


def fraction_of_sequence(row: Row) -> int:
    """Return how many ranks share one sequence: 1, or more where the microbatch is a fraction of a sequence."""
    micro = row.number("micro_batch")
    if micro is None or micro >= 1:
        return 1
    return max(1, round(min(1 / micro, 1024)))


def shards(row: Row, at: Degrees, zero: int) -> int:
    """Return over how many neighbouring data ranks ZeRO shards the states: 0 for all data ranks."""
    stated = row.optional("fsdp_shards", MAX_DEVICES)
    words = row.text("plan_note", "schedule", "framework")
    if stated is None and zero and re.search(r"hsdp|hybrid[- _]shard|\bmics\b", words):
        stated = min(row.count("devices_per_node") or 8, at.data)
        row.assume(f"fsdp_shards {stated} (hybrid sharding, number not stated: one node)")
    if stated is None or not zero:
        return 0
    own = stated // at.context if stated % at.context == 0 else stated
    return own if 1 < own < at.data else 0


MAX_REPAIRS = 24
"""Number of changes after which a layout is given up."""
MOST_MICRO = 16
"""Largest microbatch, in sequences, that is tried where a row states none."""

_PLAINER = {
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


def layout(row: Row, problem: Problem, at: Degrees, size: Batch) -> Layout:
    """Return the layout that a row states, with a microbatch of 1 where it states none."""
    zero = zero_stage(row)
    name, chunks = words.schedule(row, at.pipeline, at.chunks)
    layers = max(1, num_layers(problem.graph) // (at.pipeline * chunks))
    stages = at.pipeline * chunks
    shared = shards(row, at, zero)
    by_sequence = at.tensor > 1 and sequence_parallel(row)
    if zero and (row.optional("fsdp_shards") or 0) == 1:
        zero = 0
        row.assume("zero_stage 0, for states are shared by 1 rank")
    return Layout(
        data=at.data,
        tensor=at.tensor,
        pipeline=at.pipeline,
        context=at.context,
        expert=at.expert,
        attention=words.attention(row, at.context),
        sequence_parallel=by_sequence,
        overlap_tensor=by_sequence and overlaps_tensor(row),
        microbatch=size.micro or 1,
        schedule=name,
        chunks=chunks,
        zero=zero,
        zero_shards=shared,
        recompute=words.recompute(row, layers) or Recompute.NONE,
        overlap_gradients=overlaps_gradients(row, zero) if at.data * at.context > 1 else True,
        scatter_gather=_scatter_gather(row, at),
        stages=_stages(row, num_layers(problem.graph), stages),
        offload=words.offload(row),
    )


def _stages(row: Row, layers: int, stages: int) -> str | tuple[int, ...]:
    """Return the layers of every stage, or the name of the rule that divides them.

    Where the stages do not divide the layers, Megatron-LM can count the embedding and the loss as one layer each
    (--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split).
    """
    if layers % stages == 0:
        return "even"
    each, rest = divmod(layers + 2, stages)
    if rest or stages < 2 or not is_megatron(row):
        return "balanced"
    row.assume("embedding and loss each take the place of a layer in their stage (layers a stage not stated)")
    return (each - 1, *(each,) * (stages - 2), each - 1)


def _scatter_gather(row: Row, at: Degrees) -> bool:
    if not is_megatron(row) or row.flag("sequence_parallel") is not False or 1 in (at.tensor, at.pipeline):
        return False
    row.assume("stage boundaries cross scattered and are gathered, Megatron-LM's default (not stated)")
    return True


def nearest(row: Row, problem: Problem, wanted: Layout) -> Layout:
    """Return the legal layout that is nearest to a stated one, by repairing one violation at a time.

    Raises
    ------
    Skip
        Where no repair leads to a legal layout.
    """
    for _ in range(MAX_REPAIRS):
        broken = next(iter(rule_violations(problem, wanted)), None)
        if broken is None:
            return wanted
        changed = _repaired(problem, wanted, broken.field.split(".")[0])
        if changed is None or changed == wanted:
            raise Skip(f"plan.{broken.field}: {broken.message}")
        row.assume(f"{_difference(wanted, changed)}, for {broken.message.split(';')[0][:160]}")
        wanted = changed
    raise Skip("no plan near the one stated keeps the simulator's rules")


def _difference(before: Layout, after: Layout) -> str:
    names = (name for name in Layout.__dataclass_fields__ if getattr(before, name) != getattr(after, name))
    return ", ".join(f"{name} {str(getattr(after, name)) or 'nothing'}" for name in names)


def _repaired(problem: Problem, wanted: Layout, field: str) -> Layout | None:
    """Return a layout without the violation in ``field``, or None where no small change removes it."""
    if field in ("schedule", "chunks", "pipeline"):
        return _plainer(problem, wanted)
    if field == "recompute":
        return _shorter(wanted)
    if field == "expert":
        experts = gcd(wanted.expert, wanted.data)
        return replace(wanted, expert=experts if experts < wanted.expert else nearest_divisor(experts, experts // 2))
    if field == "context" and wanted.attention is Attention.ULYSSES:
        return replace(wanted, attention=Attention.RING)
    if field == "attention":
        return replace(wanted, attention=Attention.ALL_GATHER if wanted.attention is Attention.RING else Attention.RING)
    if field in ("tensor", "sequence_parallel") and wanted.sequence_parallel:
        return replace(wanted, sequence_parallel=False)
    if field == "overlap_tensor":
        return replace(wanted, overlap_tensor=False)
    if field == "offload":
        return replace(wanted, offload=NOTHING)
    if field == "zero_shards":
        return replace(wanted, zero_shards=0)
    return replace(wanted, zero=min(wanted.zero, 1)) if field == "zero" else None


def _plainer(problem: Problem, wanted: Layout) -> Layout | None:
    """Return a layout whose stages all have layers, or one with the next simpler schedule; None without one."""
    number, layers = wanted.pipeline * wanted.chunks, num_layers(problem.graph)
    if wanted.stages == "even" and layers % number and number <= layers:
        return replace(wanted, stages="balanced")
    if number > layers >= wanted.pipeline * 2:
        return replace(wanted, chunks=layers // wanted.pipeline, stages="balanced")
    simpler = _PLAINER.get(wanted.schedule)
    if simpler is None:
        return None
    fewest, most = SCHEDULES[simpler].chunks
    chunks = max(fewest, min(wanted.chunks, most or wanted.chunks))
    stages = "balanced" if layers % (wanted.pipeline * chunks) else "even"
    return replace(wanted, schedule=simpler, chunks=chunks, stages=stages)


def _shorter(wanted: Layout) -> Layout | None:
    recompute = wanted.recompute
    if isinstance(recompute, FirstLayers):
        fewer = recompute.layers - 1
        return replace(wanted, recompute=FirstLayers(recompute.layer, fewer) if fewer else recompute.layer)
    return None


def choices(row: Row, wanted: Layout, size: Batch, graph: OperatorGraph) -> Iterator[Layout]:
    """Yield the layouts that a row leaves open: least recomputation first, then the largest microbatch."""
    open_recompute = words.recompute(row, 1) is None
    kinds = _recomputations(wanted, graph) if open_recompute else [wanted.recompute]
    for kind in kinds:
        for micro in _microbatches(wanted, size):
            yield replace(wanted, recompute=kind, microbatch=micro)


def _recomputations(wanted: Layout, graph: OperatorGraph) -> list[Recomputation]:
    """Return the recompute choices, least first: nothing, the cheap operators, or more and more layers of a stage.

    The cheap operators are the attention core where it keeps its scores [1]_; else norms and activations, which
    Megatron-LM selects with ``--recompute-modules``.

    References
    ----------
    .. [1] Korthikanti et al. 2022, section 5.
    """
    layers = num_layers(graph)
    a_stage = -(-layers // (wanted.pipeline * wanted.chunks))
    parts = sorted({ceil(a_stage * quarters / 4) for quarters in (1, 2, 3)} - {a_stage})
    operators = {each.name: each.kind for block in graph.blocks if block.layer for each in block.operators}
    if OperatorKind.ATTENTION not in operators.values():
        cheap: Recomputation = Recompute.SELECTIVE
    else:
        names = (name for name, kind in operators.items() if kind is OperatorKind.NORM or name.endswith("activation"))
        cheap = SomeOperators(tuple(names))
    return [Recompute.NONE, cheap, *(FirstLayers(Recompute.FULL, n) for n in parts), Recompute.FULL]


def _microbatches(wanted: Layout, size: Batch) -> list[int]:
    if size.micro is not None:
        return [size.micro]
    own = size.total // wanted.data
    if wanted.pipeline > 1 or own < 2:
        return [1]
    return [micro for micro in (16, 8, 4, 2, 1) if own % micro == 0 and micro <= MOST_MICRO]
