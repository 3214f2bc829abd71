"""Finds the reasons why the executor cannot run a layout or a plan, before anything starts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from meshwise.simulator.models.attention import UNFUSED
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import build_mesh, layout_without_stages
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.mesh import AXES, CONTEXT, DATA, EXPERT, PIPELINE, REPLICA, TENSOR, nearest_divisor
from meshwise.strategies.plan.parallelism import Attention, Parallelism, shard_operators
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import PerStage, SomeOperators
from meshwise.strategies.schedules.schedule import find_rule

UNFUSED_CORE = ("scores", "softmax", "context")
"""The operators of unfused attention, which the executor runs as one."""


def list_recomputable(spec: Transformer) -> tuple[str, ...]:
    """Return the operators of a layer that the executor can recompute one by one."""
    core_operators = UNFUSED_CORE if spec.attention == UNFUSED else ("attention",)
    return ("input_norm", "qkv", *core_operators, "projection", "feed_forward_norm", "up", "activation", "down")


PRECISIONS = ("fp32", "fp64", "bf16")
OPTIMIZERS = ("adamw", "sgd")
_ABSENT_FIELDS = ("max_positions", "parallel_residual", "latent")
_AXES = (PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, TENSOR)
_DECISIONS = frozenset(
    """data tensor pipeline context expert tensor_rows zero_shards order stages microbatch schedule chunks attention
    zero reshard_after_forward offload gradient_reduction overlap_gradients sequence_parallel overlap_tensor
    scatter_gather recompute placement""".split()  # noqa: SIM905
)
"""The decisions that the executor runs, or refuses below with reasons of their own."""

ALL_REDUCE = "all_reduce"
BYTE_VOCAB = 256
"""Smallest vocabulary of a model that is trained on bytes."""


Rule = Callable[[Layout], Iterator[str]]
"""Yields every reason why the executor cannot run a layout."""


def list_rules(spec: Transformer, training: Training) -> tuple[Rule, ...]:
    """Return the rules that decide which layouts of a model the executor can run."""
    model_reasons = (*find_lacking(spec, training.sequence), *_check_model(spec))
    return (
        lambda layout: iter(model_reasons),
        partial(_check_training, training),
        _check_decisions,
        _check_placement,
        _check_torch,
        *(
            partial(rule, spec, training)
            for rule in (_check_unflushed, _check_operators, _check_expert, _check_context, _check_tensor)
        ),
    )


def find_unsupported(spec: Transformer, training: Training, plan: Plan) -> tuple[str, ...]:
    """Return every reason why the executor cannot run ``plan``; empty where it can."""
    layout = layout_without_stages(plan)
    if plan.attention is None:
        layout = replace(layout, attention=Attention.ALL_GATHER)  # `_check_written` reports that the plan has none
    model_rule, training_rule, *other_rules = list_rules(spec, training)
    layout_reasons = (reason for rule in other_rules for reason in rule(layout))
    return (
        *model_rule(layout),
        *training_rule(layout),
        *_check_batch(training, plan),
        *_check_written(spec, training, plan),
        *layout_reasons,
    )


def find_lacking(spec: Transformer, sequence: int) -> Iterator[str]:
    """Yield every feature of a model that the executor does not build, for sequences of a length."""
    for field in _ABSENT_FIELDS:
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


def _check_model(spec: Transformer) -> Iterator[str]:
    if spec.vocab < BYTE_VOCAB:
        yield f"vocab: the corpus is bytes, so vocab is at least {BYTE_VOCAB}, met {spec.vocab}"


def _check_training(training: Training, layout: Layout) -> Iterator[str]:
    yield from _check_precision(training, layout)
    if training.optimizer not in OPTIMIZERS:
        yield f"optimizer: the executor steps with {' or '.join(OPTIMIZERS)}, met {training.optimizer}"
    if training.frozen:
        yield "frozen: the executor trains all weights, met true; nearest: false"


def _check_batch(training: Training, plan: Plan) -> Iterator[str]:
    sizes = plan.microbatch if isinstance(plan.microbatch, tuple) else (plan.microbatch,) * plan.data
    batch = sum(sizes) * plan.num_microbatches
    if training.global_batch != batch:
        yield (
            f"global_batch: sequences({sum(sizes)}) of a microbatch on all data ranks * microbatches"
            f"({plan.num_microbatches}) = {batch}, met {training.global_batch}"
        )


def _check_precision(training: Training, layout: Layout) -> Iterator[str]:
    gradient_precision = training.gradient_precision
    if training.state_precision != "fp32":
        yield f"state_precision: the executor's moments are fp32, met {training.state_precision}; nearest: fp32"
    if training.precision not in PRECISIONS:
        remark = "; it scales no losses, without which gradients in fp16 vanish" if training.precision == "fp16" else ""
        known_precisions = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        yield f"precision: the executor trains in {known_precisions}, met {training.precision}{remark}; nearest: bf16"
    elif training.precision != "bf16":
        if gradient_precision and training.gradient_bytes != training.parameter_bytes:
            rule = "the executor's gradients are as its parameters"
            yield f"gradient_precision: {rule}, met {gradient_precision}; nearest: same"
    elif gradient_precision == "same" and (layout.zero >= 2 or any(layout.offload.parameters)):
        yield "gradient_precision: torch's shards have gradients as precise as main weights, met same; nearest: fp32"


def _check_written(spec: Transformer, training: Training, plan: Plan) -> Iterator[str]:
    """Yield what the executor cannot run in a plan beyond its layout, as stages or shardings of its own."""
    graph = build(spec, training.sequence, training.precision)
    blocks = [name for stage in plan.stages for name in stage.blocks]
    expected_blocks = [name for name, _ in graph.occurrences]
    if blocks != expected_blocks:
        yield f"stages: the stages hold the blocks {', '.join(expected_blocks)} in order, met {', '.join(blocks)}"
    if len(plan.stages) != plan.actions.num_stages:
        yield f"stages: the schedule has {plan.actions.num_stages} stages, met {len(plan.stages)}"
    if plan.context > 1 and plan.attention is None:
        yield f"attention: context({plan.context}) needs ring, all_gather or ulysses, met none; nearest: ring"
    parallelism = Parallelism(
        tensor=plan.tensor > 1,
        sequence_parallel=plan.sequence_parallel,
        expert=plan.expert > 1,
        attention=plan.attention if plan.context > 1 else None,
    )
    if parallelism and plan.shardings != shard_operators(graph, parallelism):
        yield "shardings: the executor runs the Megatron cut of every operator, met another one"


def _check_decisions(layout: Layout) -> Iterator[str]:
    """Yield every decision that the executor does not know and that is not its default."""
    for name, item in DECISIONS.items():
        if name not in _DECISIONS and getattr(layout, name) != item.default:
            default, value = (str(option).lower() for option in (item.default, getattr(layout, name)))
            yield f"{name}: the executor has no other than {default}, met {value}; nearest: {default}"


def _check_placement(layout: Layout) -> Iterator[str]:
    if layout.order != AXES or layout.tensor_rows > 1:
        axes = build_mesh(layout).axes
        other_axes = [axis.name for axis in axes if axis.name not in _AXES and axis.size > 1]
        if other_axes:
            yield f"mesh: the executor has the axes {', '.join(_AXES)}, met {', '.join(other_axes)}"
        order = [axis.name for axis in axes if axis.name in _AXES]
        usual_order = [name for name in _AXES if name in order]
        if order != usual_order:
            yield f"order: the executor's mesh is {', '.join(usual_order)}, met {', '.join(order)}"
    if layout.placement:
        yield f"placement: the executor runs rank i on device i, met {len(layout.placement)} devices by name"


def _check_torch(layout: Layout) -> Iterator[str]:
    if layout.scatter_gather and DECISIONS["scatter_gather"].changes(layout):
        yield "scatter_gather: torch sends whole boundaries between stages, met true; nearest: false"
    splits_backward = find_rule(layout.schedule).splits_backward
    if splits_backward and any(layout.offload.parameters):
        yield (
            "offload.parameters: torch's pipeline runtime gathers a stage for the whole step where backward is split, "
            f"met {find_rule(layout.schedule).name}; nearest: 1f1b"
        )
    if layout.overlap_tensor:
        yield "overlap_tensor: torch's tensor parallelism runs collectives before and after products; nearest: false"
    if splits_backward and layout.zero == 3 and layout.reshard_after_forward and layout.shards > 1:
        yield (
            "reshard_after_forward: torch's pipeline runtime gathers a stage for the whole step where backward is "
            f"split, met true with {find_rule(layout.schedule).name}; nearest: false"
        )


def _check_expert(spec: Transformer, training: Training, layout: Layout) -> Iterator[str]:
    if layout.expert > 1 and (spec.experts is None or spec.experts.count % layout.expert):
        count = spec.experts.count if spec.experts is not None else 1
        nearest = nearest_divisor(count, layout.expert)
        yield f"expert: expert divides the experts({count}), met {layout.expert}; nearest: {nearest}"


def _check_context(spec: Transformer, training: Training, layout: Layout) -> Iterator[str]:
    if layout.context == 1:
        return
    parts = 2 * layout.context
    if training.sequence % parts:
        nearest = nearest_divisor(training.sequence // 2, layout.context) if training.sequence % 2 == 0 else 1
        yield (
            f"context: each rank has an early and a late part of a sequence, so that causal attention is equal work: "
            f"2 * context({layout.context}) divides sequence({training.sequence}); nearest context: {nearest}"
        )
    if layout.attention is Attention.RING and spec.attention == UNFUSED:
        yield "attention: ring attention keeps no scores, the model's keeps them, met unfused; nearest: all_gather"
    if layout.attention is Attention.ULYSSES and spec.kv_heads % (layout.tensor * layout.context):
        yield (
            f"attention: ulysses: tensor({layout.tensor}) * context({layout.context}) divides the heads of keys"
            f"({spec.kv_heads}); nearest: all_gather"
        )


def _check_operators(spec: Transformer, training: Training, layout: Layout) -> Iterator[str]:
    """Yield every reason against recomputation of single operators."""
    recompute_choices = layout.recompute.stages if isinstance(layout.recompute, PerStage) else (layout.recompute,)
    recompute_choice = next(
        (recompute_choice for recompute_choice in recompute_choices if isinstance(recompute_choice, SomeOperators)),
        None,
    )
    if recompute_choice is None:
        return
    operator_names = list_recomputable(spec)
    met_text = f"met the operators {', '.join(recompute_choice.names)}"
    if not set(recompute_choice.names) <= set(operator_names):
        rule = f"of a layer the executor recomputes {', '.join(operator_names)}"
        yield f"recompute: {rule}, {met_text}; nearest: selective"
    core_operators = set(UNFUSED_CORE) & set(recompute_choice.names)
    if core_operators and len(core_operators) < len(UNFUSED_CORE):
        yield f"recompute: {', '.join(UNFUSED_CORE)} run as one here, {met_text}; nearest: all three"
    if layout.tensor > 1:
        yield f"recompute: operators that tensor ranks share run as torch's own, {met_text}; nearest: selective"
    if any(layout.offload.activations):
        yield f"recompute: activations that go to hosts are not recomputed by operator, {met_text}; nearest: selective"


def _check_unflushed(spec: Transformer, training: Training, layout: Layout) -> Iterator[str]:
    rule = find_rule(layout.schedule)
    if not rule.is_asynchronous:
        return
    name = rule.name
    if spec.tied_embeddings and layout.pipeline > 1:
        yield f"tied_embeddings: both ends have versions of their own with {name}, met true; nearest: false"
    for axis, size in ((CONTEXT, layout.context), (EXPERT, layout.expert)):
        if size > 1:
            yield f"{axis}: stages of {name} are cut by tensor ranks alone here, met {size}; nearest: 1"
    if training.gradient_clipping:
        yield f"gradient_clipping: the stages of {name} update at different times, met true; nearest: false"
    if layout.offload.moves_in_passes:
        yield f"offload: only optimizer states go to hosts with {name}, met {layout.offload}; nearest: [optimizer]"
    if layout.zero:
        yield f"zero: the executor's ranks each keep the states of a stage with {name}, met {layout.zero}; nearest: 0"
    if layout.gradient_reduction != ALL_REDUCE:
        requirement = f"all ranks update versions of weights with {name}"
        yield f"gradient_reduction: {requirement}, met {layout.gradient_reduction}; nearest: {ALL_REDUCE}"


def _check_tensor(spec: Transformer, training: Training, layout: Layout) -> Iterator[str]:
    if layout.tensor == 1:
        return
    if spec.qk_norm:
        yield "qk_norm: torch's tensor parallelism leaves norms of heads' values unsummed, met true; nearest: false"
    sizes = {"kv_heads": spec.kv_heads, "vocab": spec.vocab}
    if spec.experts is None or spec.experts.dense_layers:
        sizes["ffn"] = spec.ffn
    if spec.experts is not None:
        sizes["ffn of an expert"] = spec.experts.ffn
    if layout.sequence_parallel:
        sizes["sequence of a rank" if layout.context > 1 else "sequence"] = training.sequence // layout.context
    for dim, size in sizes.items():
        if size % layout.tensor:
            yield f"tensor: torch needs tensor to divide {dim}({size}), met {layout.tensor}"
