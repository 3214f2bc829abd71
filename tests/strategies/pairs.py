"""Pairs of plans of one problem that differ in one field, and in what the rules force to differ with it.

The fields are those of a layout, and those of a plan that no layout has. A pair of layouts is completed: all that
follows from the field differs in the plans too.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import NamedTuple

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.operators.choices import list_choices
from meshwise.strategies.operators.operator_plan import list_operator_violations, operators_by_name
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.mesh import OPERATOR_AXES, PIPELINE, Axis, Mesh
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

from .layouts import WRITTEN, any_layout, any_problem, is_legal
from .operators.operator_plans import random_plan

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
PLAN_FIELDS = tuple(field.name for field in fields(Plan) if field.name not in LAYOUT_FIELDS)
FIELDS = (*LAYOUT_FIELDS, *PLAN_FIELDS)

COMPANIONS: dict[str, tuple[str, ...]] = {
    # degrees multiply to the devices: another degree differs too, or devices idle
    "data": ("placement", "tensor", "pipeline", "context", "tensor_rows"),
    "tensor": ("placement", "data"),
    "pipeline": ("placement", "data"),
    "context": ("placement", "data"),
    "tensor_rows": ("placement", "data"),
    # schedules of one chunk and of several
    "schedule": ("chunks",),
}
"""What else may differ where a field cannot differ alone: one of these."""

MATTERS: dict[str, Callable[[Layout], bool]] = {
    "zero": lambda layout: layout.replicas > 1,
    "reshard_after_forward": lambda layout: layout.zero == 3 and layout.replicas > 1,
    "gradient_reduction": lambda layout: layout.data > 1,
    "schedule": lambda layout: layout.pipeline > 1,
    "order": lambda layout: sum(getattr(layout, name) > 1 for name in DEGREES) > 1,
}
"""Where a field decides anything, of fields whose declaration does not say."""

DRAWS = 2000
"""Problems, each with several layouts, among which a pair has to be found."""
LAYOUTS = 8
"""Layouts that are drawn of one problem."""


class Sample(NamedTuple):
    """A plan with the layout that it completes, or with none where no layout of the problem means it."""

    plan: Plan
    layout: Layout | None = None


class Pair(NamedTuple):
    """A problem and two plans of it."""

    problem: Problem
    first: Sample
    second: Sample


def any_pair(name: str, draw: Random) -> Pair:
    """Return plans that differ in a field, by turns on devices that have room for only one of them.

    Raises
    ------
    LookupError
        Where many draws find none.
    """
    draw_pair = any_layout_pair if name in LAYOUT_FIELDS else any_plan_pair
    for _ in range(DRAWS):
        if pair := draw_pair(name, draw):
            return with_memory_between(pair) if draw.choice([False, True]) else pair
    raise LookupError(f"no legal plans that differ in {name} are drawn: draw it last in any_layout of layouts.py")


def any_layout_pair(name: str, draw: Random) -> Pair | None:
    """Return plans whose layouts differ in a field that matters to one of them; ``None`` where few draws find none."""
    problem = any_problem(draw)
    for _ in range(LAYOUTS):
        first, other = any_layout(problem, draw), any_layout(problem, draw)
        if getattr(first, name) == getattr(other, name) or not is_legal(problem, first):
            continue
        if name == "schedule" and not {first.schedule, other.schedule} <= {*WRITTEN} and draw.random() < 0.7:
            continue  # only written orders place stages otherwise and leave all else as it is
        companions = COMPANIONS.get(name, ())
        for companion in (name, *draw.sample(companions, len(companions))):
            second = replace(first, **{field: getattr(other, field) for field in (name, companion)})
            if is_legal(problem, second) and any(map(MATTERS.get(name, DECISIONS[name].changes), (first, second))):
                samples = [Sample(complete(problem, layout), layout) for layout in (first, second)]
                return Pair(problem, *samples) if samples[0].plan != samples[1].plan else None
    return None


def any_plan_pair(name: str, draw: Random) -> Pair | None:
    """Return plans that differ in a field which no layout has; ``None`` where a draw finds none."""
    return CHANGES[name](draw)


def any_operator_plan(draw: Random) -> tuple[Problem, Plan]:
    """Return a plan that cuts every operator in a way of its own, under any framework and stage of ZeRO."""
    problem, plan = random_plan(draw)
    training = replace(problem.training, framework=draw.choice(sorted(FRAMEWORKS)))
    return replace(problem, training=training), replace(plan, zero=draw.choice([0, 1, 2, 3]))


def pair_operator_plans(problem: Problem, first: Plan, second: Plan) -> Pair | None:
    """Return two plans that cut single operators; ``None`` where they are equal or one is illegal."""
    if first == second or any(any(list_operator_violations(problem, plan)) for plan in (first, second)):
        return None
    return Pair(problem, Sample(first), Sample(second))


def differ_in_mesh(draw: Random) -> Pair | None:
    """Return plans whose operator axes have other sizes or another order.

    The microbatches are as many as the data ranks leave.
    """
    problem, plan = any_operator_plan(draw)
    axes = [axis for axis in plan.mesh.axes if axis.name != PIPELINE]
    if draw.choice([False, True]):
        axes = draw.sample(axes, len(axes))
    else:
        sizes = draw.sample([axis.size for axis in axes], len(axes))
        axes = [Axis(axis.name, size) for axis, size in zip(axes, sizes, strict=True)]
    axes.insert(draw.randint(0, len(axes)), Axis(PIPELINE, plan.pipeline))
    second = replace(plan, mesh=Mesh(tuple(axes)))
    count = problem.training.global_batch // (second.data * second.sequences)
    return pair_operator_plans(problem, plan, replace(second, num_microbatches=count))


def differ_in_shardings(draw: Random) -> Pair | None:
    """Return plans that cut one operator otherwise."""
    problem, plan = any_operator_plan(draw)
    degrees = {name: plan.mesh.size(name) for name in OPERATOR_AXES if plan.mesh.size(name) > 1}
    place = draw.randrange(len(plan.shardings))
    name = plan.shardings[place].operator
    block, operator = operators_by_name(problem)[name]
    choices = list_choices(name.rpartition(".")[0], block, operator, degrees, plan.sequences)
    shardings = (*plan.shardings[:place], draw.choice(choices), *plan.shardings[place + 1 :])
    return pair_operator_plans(problem, plan, replace(plan, shardings=shardings))


def differ_in_num_microbatches(draw: Random) -> Pair | None:
    """Return plans of a short and a long step: the second is one of the problem with another batch."""
    problem = any_problem(draw)
    layout = any_layout(problem, draw)
    if not is_legal(problem, layout):
        return None
    first = complete(problem, layout)
    count = draw.randint(1, 12)
    if count == first.num_microbatches or first.rule.find_violation(first.pipeline, count, first.chunks):
        return None
    return Pair(problem, Sample(first, layout), Sample(replace(first, num_microbatches=count)))


CHANGES: dict[str, Callable[[Random], Pair | None]] = {
    "mesh": differ_in_mesh,
    "shardings": differ_in_shardings,
    "num_microbatches": differ_in_num_microbatches,
}
"""How plans are drawn that differ in a field which no layout has."""


def with_memory_between(pair: Pair) -> Pair:
    """Return a pair on devices that have room for one plan and not for the other, or just for both."""
    problem, *samples = pair
    peaks = [SimulatedCost(problem).peak_memory(sample.plan) for sample in samples]
    device = problem.cluster.accelerator
    margin = (device.memory - device.reserved) / (sum(peaks) / 2 + 1 - device.reserved)
    return Pair(replace(problem, memory_margin=margin), *samples)
