"""From plan tables to layouts, the rules of a problem that a layout breaks, and pins of operators.

A scenario writes pins as ``{layers.attention: {heads: tensor}}``, or with a list of axes in the order of the dims.
"""

from typing import Any

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.schema.plan import MAX_MICROBATCHES, PlanTable
from meshwise.scenarios.schema.scenario import MAX_ACTIONS, MIN_STEADY_STEPS
from meshwise.strategies.operators.choices import Pin
from meshwise.strategies.operators.operator_plan import cuts_operators, list_operator_violations
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import DECISIONS, STEP_DECISIONS, Layout, Violation
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import recomputation
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES

PLAN_KEYS = dict.fromkeys(DECISIONS, "mesh") | {item.name: item.key for item in STEP_DECISIONS} | {"stages": "stages"}
"""The key of a plan document by decision of a layout."""


def build_layout(table: PlanTable) -> Layout:
    """Return the layout of a plan table."""
    choices = {"recompute": recomputation(table.recompute), "offload": table.offload, "embeddings": table.embeddings}
    return Layout(**table.model_dump() | choices | {"attention": Attention(table.attention)})


def list_rule_violations(problem: Problem, layout: Layout) -> list[Violation]:
    """Return every rule that a layout breaks; only the broken limit where its schedule is too long to simulate."""
    training = problem.training
    microbatches = training.global_batch // max(layout.sequences, 1)  # fewer sequences than 1 break a rule below
    actions = layout.pipeline * layout.chunks * microbatches
    rule = SCHEDULES.get(layout.schedule)
    max_actions = MAX_ACTIONS // (MIN_STEADY_STEPS if rule is not None and rule.is_asynchronous else 1)
    if microbatches > MAX_MICROBATCHES:
        met_text = f"global_batch / (data * microbatch) = {microbatches}"
        return [Violation("microbatch", f"a step has at most {MAX_MICROBATCHES} microbatches, met {met_text}")]
    if actions > max_actions:
        met_text = f"pipeline * chunks * microbatches = {actions}"
        return [
            Violation("pipeline", f"a schedule has at most {max_actions} stages times microbatches, met {met_text}")
        ]
    return list(violations(problem, layout))


def list_plan_violations(problem: Problem, plan: Plan) -> list[Violation]:
    """Return every reason why a complete plan is none of a problem: a broken rule, or a field that does not follow.

    A plan may have been edited, or be of another model: every field has to follow from its layout and the problem.

    Raises
    ------
    ValueError
        Where the stages do not have every block of the graph once.
    """
    if cuts_operators(problem, plan):
        return list(list_operator_violations(problem, plan))
    layout = recover_layout(problem, plan)
    if broken_rules := list_rule_violations(problem, layout):
        return broken_rules
    expected_plan, mismatches = complete(problem, layout), []
    for name in Plan.__dataclass_fields__:
        expected, value = getattr(expected_plan, name), getattr(plan, name)
        if expected != value:
            mismatches.append(Violation(name, _describe_mismatch(PLAN_KEYS.get(name, name), expected, value)))
    return mismatches


def _describe_mismatch(name: str, expected: Any, value: Any) -> str:
    if isinstance(value, int | str):
        return f"{name} follows from the scenario: {format_value(expected)}, met {format_value(value)}"
    return f"{name} is that of the scenario's model and mesh; met one of another model or mesh"


MAX_PINS = 10_000
"""Most operators that a scenario may pin."""


def to_pins(values: dict[str, Any]) -> tuple[tuple[Pin, ...], list[tuple[str, str]]]:
    """Return the valid pins of a scenario by operator, and the name and a message for each invalid one."""
    pins, pin_errors = [], []
    for name, value in list(values.items())[:MAX_PINS]:
        pin = _build_pin(name, value)
        if pin is None:
            rule_text = (
                "a pin is a mapping from dim to axis, or a list of axes in the order of the dims that may be cut"
            )
            pin_errors.append(
                (name, f"{rule_text}; an axis is a name, a list of names, or null; met {format_value(value)}")
            )
        else:
            pins.append(pin)
    if len(values) > MAX_PINS:
        pin_errors.append((list(values)[MAX_PINS], f"pin names at most {MAX_PINS} operators, met {len(values)}"))
    return tuple(pins), pin_errors


def _build_pin(name: str, value: Any) -> Pin | None:
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else None
    )
    if pairs is None:
        return None
    cuts = [(dim, _parse_axes(axes)) for dim, axes in pairs]
    if any(axes is None for _, axes in cuts):
        return None
    return Pin(name, tuple((dim, axes) for dim, axes in cuts if axes is not None))


def _parse_axes(value: Any) -> tuple[str, ...] | None:
    """Return the axes of a value: a name, a list of names or null; ``None`` where it is something else."""
    if value is None:
        return ()
    names = value if isinstance(value, list) else [value]
    return tuple(names) if all(isinstance(name, str) for name in names) else None
