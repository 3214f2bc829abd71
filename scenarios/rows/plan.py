"""The plan of a row: what it states, what its framework does by default, and the nearest that is simulated."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd

from scenarios.plan_table import rule_violations
from scenarios.rows import words
from scenarios.rows.degrees import Batch, Degrees, shards
from scenarios.rows.frameworks import is_megatron, overlaps_gradients, overlaps_tensor, sequence_parallel, zero_stage
from scenarios.rows.row import Row, Skip
from simulator.operator_graph import OperatorGraph, OperatorKind
from strategies.divisors import nearest_divisor
from strategies.layout import Layout
from strategies.offloading import NOTHING
from strategies.parallelism import Attention
from strategies.partition import num_layers
from strategies.problem import Problem
from strategies.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators
from strategies.schedule import SCHEDULES

MAX_REPAIRS = 24
"""Changes after which a layout is given up."""
MOST_MICRO = 16
"""Largest microbatch that is tried where a row states none."""

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
"""The next simpler schedule; gpipe takes as long as 1f1b, and needs no more microbatches than one."""


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
    """Return the layers of every stage.

    Where they are not equal, Megatron-LM can count the embedding and the loss as a layer each
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
    """Return the nearest layout to one that is wanted which keeps all rules; raises `Skip` where there is none."""
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
    """Return a layout that breaks one rule less, or None where nothing near does."""
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
    """Return a layout with stages that the layers fill, or with a simpler schedule."""
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
    """Yield the layouts that a row leaves open, the one that computes least and in the largest pieces first."""
    open_recompute = words.recompute(row, 1) is None
    kinds = _recomputations(wanted, graph) if open_recompute else [wanted.recompute]
    for kind in kinds:
        for micro in _microbatches(wanted, size):
            yield replace(wanted, recompute=kind, microbatch=micro)


def _recomputations(wanted: Layout, graph: OperatorGraph) -> list[Recomputation]:
    """Return what may be recomputed, least first: nothing, what is cheap, or ever more layers of a stage.

    Cheap is an attention core that keeps its scores [1]_, and else norms and activations, which Megatron-LM
    names by ``--recompute-modules``.

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
