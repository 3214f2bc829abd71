"""The rules of a plan that cuts every operator in a way of its own."""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import zip_longest
from math import prod

from simulator.operator_graph import Block, Operator
from strategies.mesh import DATA, OPERATOR_AXES, PIPELINE
from strategies.operators.choices import Cuts, cuttable, followers, refused
from strategies.operators.complete import operator_plan, operators_by_name
from strategies.parallelism import Parallelism, shardings
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.schedule import SCHEDULES
from strategies.sharding import OperatorSharding
from strategies.violation import Violation


def cuts_operators(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan cuts operators of the model in other ways than layouts of the whole network do."""
    if not plan.shardings:
        return plan.tensor_depth > 1
    by = Parallelism(
        tensor=plan.tensor > 1,
        sequence_parallel=plan.sequence_parallel,
        expert=plan.expert > 1,
        attention=plan.attention,
        rows=plan.tensor_rows > 1,
        gathers_logits=problem.training.gathers_logits,
    )
    usual, met = shardings(problem.graph, by), {sharding.operator for sharding in plan.shardings}
    return plan.shardings != usual and bool(met & set(operators_by_name(problem)))


def operator_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Yield every rule that a plan breaks which cuts operators in ways of its own.

    Besides its mesh, batch, shardings, pipeline and ZeRO stage it is as the searches among shardings make it.
    """
    known = (PIPELINE, DATA, *OPERATOR_AXES)
    unknown = next((axis.name for axis in plan.mesh.axes if axis.name not in known), None)
    if unknown is not None:
        yield Violation(
            "mesh", f"a plan that cuts single operators has the axes {', '.join(known)}, met axis {unknown}"
        )
        return
    if not isinstance(plan.microbatch, int):
        yield Violation("microbatch", "microbatches of a plan that cuts single operators are equal; met several sizes")
        return
    pipeline = list(_pipeline_violations(problem, plan))
    if pipeline:
        yield from pipeline
        return
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    try:
        expected = operator_plan(
            problem,
            degrees,
            plan.microbatch,
            plan.shardings,
            data=plan.data,
            stages=plan.stages,
            schedule=plan.schedule_name,
            chunks=plan.chunks,
        )
    except ValueError as error:
        yield Violation("mesh" if "ranks" in str(error) else "microbatch", str(error))
        return
    expected = replace(expected, mesh=plan.mesh, zero=plan.zero)
    for name in Plan.__dataclass_fields__:
        if getattr(plan, name) != getattr(expected, name):
            yield Violation(name, f"{name} of a plan that cuts single operators follows from its mesh and the scenario")
    yield from _sharding_violations(problem, plan, degrees)


def _pipeline_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Yield every rule of stages and of a published schedule that a plan breaks."""
    names = [name for name, _ in problem.graph.occurrences]
    met = [name for stage in plan.stages for name in stage.blocks]
    if met != names:
        where = next((n for n, (one, other) in enumerate(zip_longest(names, met)) if one != other), 0)
        found = met[where] if where < len(met) else "none"
        wanted = names[where] if where < len(names) else "none"
        yield Violation("stages", f"stages hold every block once and in order; block {where} is {wanted}, met {found}")
    if plan.schedule_name not in SCHEDULES or SCHEDULES[plan.schedule_name].asynchronous:
        flushed = [name for name, rule in SCHEDULES.items() if not rule.asynchronous]
        near = get_close_matches(plan.schedule_name, flushed, 1, 0.0)[0]
        yield Violation(
            "schedule_name", f"stages of single operators run a published schedule with a flush; nearest: {near}"
        )
        return
    rule, count = SCHEDULES[plan.schedule_name], plan.num_microbatches
    if plan.pipeline > 1 and (fault := rule.violation(plan.pipeline, count, plan.chunks)):
        yield Violation("schedule_name", fault)
    elif len(plan.stages) != plan.pipeline * plan.chunks:
        stages = f"pipeline({plan.pipeline}) * chunks({plan.chunks}) = {plan.pipeline * plan.chunks}"
        yield Violation("stages", f"{stages} stages, met {len(plan.stages)}")


def _sharding_violations(problem: Problem, plan: Plan, degrees: dict[str, int]) -> Iterator[Violation]:
    operators = operators_by_name(problem)
    seen: set[str] = set()
    for number, sharding in enumerate(plan.shardings):
        field = f"shardings.{number}"
        if sharding.operator not in operators:
            near = get_close_matches(sharding.operator, operators, 1, 0.0)[0]
            yield Violation(field, f"shardings name operators of the model, met {sharding.operator}; nearest: {near}")
        elif sharding.operator in seen:
            yield Violation(field, f"shardings name an operator once, met {sharding.operator} again")
        else:
            found = _broken(*operators[sharding.operator], sharding, degrees, plan.sequences)
            if found:
                yield Violation(field, f"{sharding.operator}: {found}")
        seen.add(sharding.operator)


def _broken(
    block: Block, operator: Operator, sharding: OperatorSharding, degrees: dict[str, int], microbatch: int
) -> str:
    """Return the first rule that a sharding breaks; empty where it breaks none."""
    legal, own = cuttable(block, operator), dict(operator.dims)
    used = [axis for dim, axes in sharding.cuts if dim in own for axis in axes]
    wrong = next((axis for axis in used if degrees.get(axis, 1) == 1 or used.count(axis) > 1), None)
    if wrong is not None:
        return f"an axis of the mesh cuts one dim, met {wrong}"
    expected: dict[str, tuple[str, ...]] = {}
    following = {each for dim in legal for each in followers(block, operator, dim)}
    for dim, axes in sharding.cuts:
        if dim in following:
            continue
        if dim not in legal:
            return f"may be cut: {', '.join(legal) or 'nothing'}; met {dim}"
        if list(axes) != [axis for axis in degrees if axis in axes]:
            return f"axes that cut {dim} go from the outermost to the innermost, met {', '.join(axes)}"
        fault = refused(block, operator, dim, axes, degrees, microbatch)
        if fault:
            return fault
        expected |= dict.fromkeys((dim, *followers(block, operator, dim)), axes)
    if dict(sharding.cuts) != expected:
        return f"cuts {', '.join(expected) or 'nothing'} together, met {', '.join(dict(sharding.cuts))}"
    return next(filter(None, (_kept_broken(block, operator, *each, degrees) for each in sharding.kept)), "")


def _kept_broken(block: Block, operator: Operator, name: str, cuts: Cuts, degrees: dict[str, int]) -> str:
    if name not in operator.parameters:
        return f"keeps its parameters ({', '.join(operator.parameters) or 'none'}) cut, met {name}"
    tensor = block.tensor[name]
    used = [axis for _, axes in cuts for axis in axes]
    wrong = next((axis for axis in used if degrees.get(axis, 1) == 1 or used.count(axis) > 1), None)
    if wrong is not None:
        return f"an axis of the mesh cuts one dim of {name}, met {wrong}"
    for dim, axes in cuts:
        if dim not in tensor.dims:
            return f"{name} has the dims {', '.join(tensor.dims)}, met {dim}"
        size, ways = tensor.shape[tensor.dims.index(dim)], prod(degrees[axis] for axis in axes)
        if size % ways:
            return f"{' * '.join(axes)}({ways}) divides {dim}({size}) of {name}"
    return ""
