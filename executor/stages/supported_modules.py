"""What a plan says of a user's module, and why a run of that module cannot follow a layout or a plan.

Plans come from a search for the captured graph of the module, or from a plan file. Where they have stages, these begin
at blocks of the graph, whose modules a capture finds (`meshwise.executor.cut_modules.plan_stages`).
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshwise.executor.modules.layout import OFFLOADS, RECOMPUTES, ModuleLayout, find_whole
from meshwise.executor.supported import ALL_REDUCE, PRECISIONS, Rule
from meshwise.strategies.plan.completion import layout_without_stages
from meshwise.strategies.plan.layout import STEP_DECISIONS, Decision, Layout
from meshwise.strategies.plan.mesh import AXES, DATA, OPERATOR_AXES, PIPELINE, REPLICA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import PerStage, Recompute, SomeOperators, find_stage_recompute
from meshwise.strategies.schedules.schedule import find_rule

CHECKED_SAMPLES = 2
"""Samples on which the program of a module is compared with it; a capture does not know the dim of one sample."""

_KNOWN_AXES = (PIPELINE, REPLICA, DATA, *OPERATOR_AXES)
_TOLD = frozenset(
    ("zero", "reshard_after_forward", "microbatch", "recompute", "offload", "gradient_reduction", "schedule", "chunks")
)
_SILENT = frozenset(("placement", "overlap_gradients"))
"""Decisions that say nothing of a module; which device a rank is on is the launcher's."""


def read_plan(path: Path) -> Plan:
    """Return the plan in a file as ``meshwise search --out`` writes it; ``ValueError`` for other files."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return Plan.from_json(document.get("plan", document))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: a plan file as `meshwise search --out` writes it, met {error}") from error


def find_module_layout(plan: Plan) -> ModuleLayout:
    """Return what a plan says of a user's module.

    Where it has stages or cuts operators, the layout has the plan too: its blocks and shardings name those of the
    captured module.

    Raises
    ------
    ValueError
        With every reason where a run of a module cannot follow the plan.
    """
    if reasons := tuple(dict.fromkeys(_list_plan_refusals(plan))):
        raise ValueError("a user's module does not run so: " + "; ".join(reasons))
    is_whole = plan.pipeline == plan.operator_ranks == 1
    return ModuleLayout(
        plan.data,
        plan.zero,
        plan.shards if plan.zero and plan.replica > 1 else 0,
        plan.zero < 3 or plan.reshard_after_forward,
        plan.num_microbatches,
        plan.recompute if plan.pipeline > 1 else find_stage_recompute(plan.recompute, 0),
        plan.pipeline,
        plan.schedule if plan.pipeline > 1 else "1f1b",
        plan.chunks if plan.pipeline > 1 else 1,
        tensor=plan.operator_ranks,
        plan=None if is_whole else plan,
        offload=plan.offload,
    )


def list_refusals(training: Training, plan: Plan) -> Iterator[str]:
    """Yield every reason why a run of a user's module cannot follow a plan for a training step."""
    yield from _check_training(training)
    yield from _list_plan_refusals(plan)


def _list_plan_refusals(plan: Plan) -> Iterator[str]:
    if plan.operator_ranks > 1 and not plan.shardings:
        yield f"tensor({plan.operator_ranks}): a plan says how operators are cut, met no shardings"
    layout = layout_without_stages(plan)
    for rule in _LAYOUT_RULES:
        yield from rule(layout)
    order = [axis.name for axis in plan.mesh.axes if axis.size > 1]
    usual = [name for name in (PIPELINE, REPLICA, DATA, *OPERATOR_AXES) if name in order]
    if plan.pipeline > 1 and order != usual and set(order) <= set(_KNOWN_AXES):
        yield f"order: ranks of a module in stages are numbered along {', '.join(usual)}, met {', '.join(order)}"


def list_rules(training: Training) -> tuple[Rule, ...]:
    """Return the rules that decide which layouts a run of a user's module can follow.

    Which batch a module divides, and whether it has stages at all, only a run of its file shows.
    """
    reasons = tuple(_check_training(training))
    return (lambda layout: iter(reasons), *_LAYOUT_RULES)


def _check_training(training: Training) -> Iterator[str]:
    if training.precision not in PRECISIONS:
        known = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        yield f"precision: modules are trained in {known}, met {training.precision}; nearest: bf16"
    if training.state_precision != "fp32":
        yield f"state_precision: states of optimizers are fp32, met {training.state_precision}; nearest: fp32"


def _check_axes(layout: Layout) -> Iterator[str]:
    for name in AXES:
        if name not in _KNOWN_AXES and getattr(layout, name) > 1:
            yield f"{name}: met {getattr(layout, name)}; nearest: 1"
    if not isinstance(layout.microbatch, int):
        nearest = max(layout.microbatch)
        yield f"microbatch: one size on all data ranks, met {list(layout.microbatch)}; nearest: {nearest}"
    elif layout.tensor > 1 and layout.microbatch < CHECKED_SAMPLES:
        rule = f"microbatch: at least {CHECKED_SAMPLES} samples where operators are cut"
        yield f"{rule}, met {layout.microbatch}; nearest: {CHECKED_SAMPLES}"


def _check_schedule(layout: Layout) -> Iterator[str]:
    rule = find_rule(layout.schedule)
    if rule.is_asynchronous:
        yield f"schedule: a step ends before the next begins, met {layout.schedule}; nearest: 1f1b"
    if layout.pipeline > 1 and rule.splits_backward and layout.zero:
        needs = "gradients of inputs and weights apart need whole states"
        yield f"schedule: {needs}, met {layout.schedule} with zero {layout.zero}; nearest: 1f1b"
    if layout.pipeline > 1 and rule.splits_backward and layout.recompute is not Recompute.NONE:
        needs = "gradients of inputs and weights apart need kept activations"
        yield f"schedule: {needs}, met {layout.schedule} with recompute {layout.recompute}; nearest: 1f1b"


def _check_recompute(layout: Layout) -> Iterator[str]:
    recompute = layout.recompute
    choices = recompute.stages if isinstance(recompute, PerStage) else (recompute,)
    # selective of a simulated graph is attention alone, that of a run all but products and attention
    if any(isinstance(choice, SomeOperators) or choice.layer not in RECOMPUTES for choice in choices):
        yield f"recompute: a block is computed again whole or not at all, met {recompute}; nearest: full"


def _check_offload(layout: Layout) -> Iterator[str]:
    whole = find_whole(layout.offload)
    if layout.offload != whole:
        rule = f"offload: all {' or '.join(OFFLOADS)} of a module, stepped on the host"
        yield f"{rule}, met {layout.offload}; nearest: {whole or 'none'}"
    if layout.offload.activations and layout.pipeline > 1 and find_rule(layout.schedule).splits_backward:
        yield f"offload: activations on the host move with whole passes, met {layout.schedule}; nearest: 1f1b"


def _check_reduction(layout: Layout) -> Iterator[str]:
    if layout.gradient_reduction != ALL_REDUCE:
        yield f"gradient_reduction: all ranks update, met {layout.gradient_reduction}; nearest: {ALL_REDUCE}"


def _check_decision(decision: Decision, layout: Layout) -> Iterator[str]:
    value: Any = getattr(layout, decision.name)
    if value != decision.default and decision.changes(layout):
        yield f"{decision.name}: met {value}; nearest: {decision.default}"


_LAYOUT_RULES: tuple[Rule, ...] = (
    _check_axes,
    _check_schedule,
    _check_recompute,
    _check_offload,
    _check_reduction,
    # a rule each: what a rule reads is tried in all combinations
    *(partial(_check_decision, decision) for decision in STEP_DECISIONS if decision.name not in _TOLD | _SILENT),
)
