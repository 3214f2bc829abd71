"""What the executor cannot run, said before anything starts."""

from collections.abc import Iterator

from simulator.models.attention import UNFUSED
from simulator.models.transformer import Transformer, build
from strategies.divisors import nearest_divisor
from strategies.mesh import AXES, TENSOR_ROWS
from strategies.parallelism import Attention, Parallelism, shardings
from strategies.plan import Plan
from strategies.recomputation import SomeOperators, of_stage
from strategies.training import Training

PRECISIONS = ("fp32", "fp64")
OPTIMIZERS = ("adamw", "sgd")
_ABSENT = ("max_positions", "parallel_residual", "latent")
_AXES = tuple(name for name in AXES if name != TENSOR_ROWS)
BYTES = 256
"""The smallest vocabulary for a corpus of bytes."""


def unsupported(spec: Transformer, training: Training, plan: Plan) -> tuple[str, ...]:
    """Return every reason why the executor cannot run ``plan``; empty where it can."""
    model = (*lacking(spec, training.sequence), *_model(spec))
    return (*model, *_training(training, plan), *_plan(spec, training, plan))


def lacking(spec: Transformer, sequence: int) -> Iterator[str]:
    """Yield what a model has that is not built here, for sequences of a length."""
    for field in _ABSENT:
        if getattr(spec, field):
            yield f"{field}: the executor's model has none, met {getattr(spec, field)}"
    if spec.window is not None and spec.window < sequence:
        yield f"window: the executor's model sees all tokens, met {spec.window} of {sequence}"
    if spec.dropout:
        yield "dropout: the executor trains without dropout, met true; a rank's random masks differ from one process's"
    if spec.experts is not None and spec.experts.score_bias:
        yield "experts: score_bias: nothing balances the load of the executor's experts, met true; nearest: false"
    if spec.positions == "rotary" and spec.head_dim % 2:
        yield f"positions: rotary turns pairs of a head's values, met head_dim({spec.head_dim})"


def _model(spec: Transformer) -> Iterator[str]:
    if spec.vocab < BYTES:
        yield f"vocab: the corpus is bytes, so vocab is at least {BYTES}, met {spec.vocab}"


def _training(training: Training, plan: Plan) -> Iterator[str]:
    if training.precision not in PRECISIONS:
        yield f"precision: the executor on gloo trains in {' or '.join(PRECISIONS)}, met {training.precision}"
    if training.optimizer not in OPTIMIZERS:
        yield f"optimizer: the executor steps with {' or '.join(OPTIMIZERS)}, met {training.optimizer}"
    if training.gradient_precision and training.gradient_bytes != training.parameter_bytes:
        yield f"gradient_precision: the executor's gradients are as its parameters, met {training.gradient_precision}"
    if training.frozen:
        yield "frozen: the executor trains all weights, met true; nearest: false"
    sizes = plan.microbatch if isinstance(plan.microbatch, tuple) else (plan.microbatch,) * plan.data
    batch = sum(sizes) * plan.num_microbatches
    if training.global_batch != batch:
        yield (
            f"global_batch: sequences({sum(sizes)}) of a microbatch on all data ranks * microbatches"
            f"({plan.num_microbatches}) = {batch}, met {training.global_batch}"
        )


def _plan(spec: Transformer, training: Training, plan: Plan) -> Iterator[str]:
    graph = build(spec, training.sequence, training.precision)
    blocks = [name for stage in plan.stages for name in stage.blocks]
    expected = [name for name, _ in graph.occurrences]
    if blocks != expected:
        yield f"stages: the stages hold the blocks {', '.join(expected)} in order, met {', '.join(blocks)}"
    if len(plan.stages) != plan.schedule.num_stages:
        yield f"stages: the schedule has {plan.schedule.num_stages} stages, met {len(plan.stages)}"
    other = [axis.name for axis in plan.mesh.axes if axis.name not in _AXES and axis.size > 1]
    if other:
        yield f"mesh: the executor has the axes {', '.join(_AXES)}, met {', '.join(other)}"
    order = [axis.name for axis in plan.mesh.axes if axis.name in _AXES]
    usual = [name for name in _AXES if name in order]
    if order != usual:
        yield f"order: the executor's mesh is {', '.join(usual)}, met {', '.join(order)}"
    if plan.rule.asynchronous:
        yield f"schedule: the executor runs schedules with a flush, met {plan.rule.name}; nearest: 1f1b"
    if plan.placement:
        yield f"placement: the executor runs rank i on device i, met {len(plan.placement)} devices by name"
    if plan.offload:
        yield f"offload: the executor keeps everything on devices, met {plan.offload}"
    if plan.overlap_tensor:
        yield "overlap_tensor: torch's tensor parallelism runs collectives before and after products; nearest: false"
    if plan.zero == 3 and plan.shards > 1 and plan.splits_backward and plan.reshard_after_forward:
        yield (
            "reshard_after_forward: torch's pipeline runtime gathers a stage for the whole step where backward is "
            f"split, met true with {plan.rule.name}; nearest: false"
        )
    hows = (of_stage(plan.recompute, stage) for stage in range(len(plan.stages)))
    operators = next((how for how in hows if isinstance(how, SomeOperators)), None)
    if operators is not None:
        met = f"met the operators {', '.join(operators.names)}"
        yield f"recompute: the executor recomputes the attention core or whole layers, {met}; nearest: selective"
    if plan.expert > 1 and (spec.experts is None or spec.experts.count % plan.expert):
        count = spec.experts.count if spec.experts is not None else 1
        near = nearest_divisor(count, plan.expert)
        yield f"expert: expert divides the experts({count}), met {plan.expert}; nearest: {near}"
    if plan.context > 1:
        yield from _context(spec, training, plan)
    if plan.tensor > 1:
        yield from _tensor(spec, training, plan)
    by = Parallelism(
        tensor=plan.tensor > 1,
        sequence_parallel=plan.sequence_parallel,
        expert=plan.expert > 1,
        attention=plan.attention if plan.context > 1 else None,
    )
    if by and plan.shardings != shardings(graph, by):
        yield "shardings: the executor runs the Megatron cut of every operator, met another one"


def _context(spec: Transformer, training: Training, plan: Plan) -> Iterator[str]:
    parts = 2 * plan.context
    if training.sequence % parts:
        near = nearest_divisor(training.sequence // 2, plan.context) if training.sequence % 2 == 0 else 1
        yield (
            f"context: each rank has an early and a late part of a sequence, so that causal attention is equal work: "
            f"2 * context({plan.context}) divides sequence({training.sequence}); nearest context: {near}"
        )
    if plan.attention is None:
        yield f"attention: context({plan.context}) needs ring, all_gather or ulysses, met none; nearest: ring"
    if plan.attention is Attention.RING and spec.attention == UNFUSED:
        yield "attention: ring attention keeps no scores, the model's keeps them, met unfused; nearest: all_gather"
    if plan.attention is Attention.ULYSSES and spec.kv_heads % (plan.tensor * plan.context):
        yield (
            f"attention: ulysses: tensor({plan.tensor}) * context({plan.context}) divides the heads of keys"
            f"({spec.kv_heads}); nearest: all_gather"
        )


def _tensor(spec: Transformer, training: Training, plan: Plan) -> Iterator[str]:
    if spec.qk_norm:
        yield "qk_norm: torch's tensor parallelism leaves norms of heads' values unsummed, met true; nearest: false"
    sizes = {"kv_heads": spec.kv_heads, "vocab": spec.vocab}
    if spec.experts is None or spec.experts.dense_layers:
        sizes["ffn"] = spec.ffn
    if spec.experts is not None:
        sizes["ffn of an expert"] = spec.experts.ffn
    if plan.sequence_parallel:
        sizes["sequence of a rank" if plan.context > 1 else "sequence"] = training.sequence // plan.context
    for dim, size in sizes.items():
        if size % plan.tensor:
            yield f"tensor: torch needs tensor to divide {dim}({size}), met {plan.tensor}"
