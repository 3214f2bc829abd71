"""Complete plans from a sharding for every operator, and the rules that such plans obey."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby, zip_longest
from math import prod

from meshwise.simulator.operator_graph import BATCH, Block, Operator
from meshwise.strategies.operators.choices import Cuts, choices, cuttable, followers, refused, ways_to_keep
from meshwise.strategies.plan.layout import Violation
from meshwise.strategies.plan.mesh import DATA, OPERATOR_AXES, PIPELINE, TENSOR, Axis, Mesh
from meshwise.strategies.plan.parallelism import Parallelism, shardings
from meshwise.strategies.plan.partition import Stage, partition
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec
from meshwise.strategies.schedules.schedule import SCHEDULES

Degrees = Mapping[str, int]
"""Ranks along each operator axis."""


def operator_plan(
    problem: Problem,
    degrees: Degrees,
    microbatch: int,
    shardings: Iterable[OperatorSharding] = (),
    *,
    data: int = 1,
    stages: tuple[Stage, ...] = (),
    schedule: str = "1f1b",
    chunks: int = 1,
) -> Plan:
    """Return the complete plan with the given shardings of operators; other operators are whole.

    Parameters
    ----------
    degrees
        Ranks along each operator axis.
    microbatch
        Sequences of a microbatch on all ranks along the operator axes together.
    stages
        The blocks of every pipeline stage, ``chunks`` stages a rank; by default one stage of all blocks.
    shardings
        Named ``block.operator``, or ``layers.3.operator`` for one occurrence of a repeated block.

    Raises
    ------
    ValueError
        Where the ranks are not as many as the free devices, or microbatches do not divide the batch.
    """
    axes = [Axis(name, degrees.get(name, 1)) for name in OPERATOR_AXES]
    mesh = Mesh(
        (
            Axis(PIPELINE, max(len(stages) // chunks, 1)),
            Axis(DATA, data),
            *(a for a in axes if a.size > 1 or a.name == TENSOR),
        )
    )
    free, batch = problem.cluster.free_devices, problem.training.global_batch
    if mesh.num_ranks != len(free):
        product_of = " * ".join(
            f"{axis.name}({axis.size})" for axis in mesh.axes if axis.size > 1 or axis.name != PIPELINE
        )
        raise ValueError(f"{product_of} = {mesh.num_ranks} ranks, cluster has {len(free)}")
    if batch % (data * microbatch):
        raise ValueError(f"data({data}) * microbatch({microbatch}) divides global_batch({batch})")
    return Plan(
        mesh=mesh,
        stages=stages or partition(problem.graph, 1, "even"),
        shardings=tuple(shardings),
        num_microbatches=batch // (data * microbatch),
        microbatch=microbatch,
        schedule=schedule,
        chunks=chunks,
        attention=None,
        placement=tuple(() if len(free) == problem.cluster.num_devices else free),
    )


def shared(problem: Problem, chosen: Mapping[str, OperatorSharding]) -> tuple[OperatorSharding, ...]:
    """Return the shardings of a plan: for each block that of its first occurrence, and those that differ from it."""
    result: list[OperatorSharding] = []
    for block in problem.graph.blocks:
        for operator in block.operators:
            own = {name: chosen[f"{name}.{operator.name}"] for name in block.names()}
            usual = next(iter(own.values()))
            result.append(replace(usual, operator=f"{block.name}.{operator.name}"))
            result += [each for each in own.values() if (each.cuts, each.kept) != (usual.cuts, usual.kept)]
    return tuple(result)


def with_data(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with axes that cut the batch of every operator, and nothing else, turned into data parallelism.

    It is ZeRO 3 where every parameter is kept cut along them. Other plans are returned unchanged.
    """
    if plan.data > 1 or not isinstance(plan.microbatch, int):
        return plan
    names = [axis.name for axis in plan.mesh.axes if axis.size > 1]
    for keeps in (False, True):
        fit = [name for name in names if name in OPERATOR_AXES and _is_data(problem, plan, name, keeps=keeps)]
        moved = next((tuple(run) for same, run in groupby(names, fit.__contains__) if same), ())
        if moved:
            return _said_once(_moved(plan, moved, zero=3 if keeps else 0))
    return plan


def nearly_data(problem: Problem, plan: Plan) -> tuple[Plan, ...]:
    """Return a plan, and variants in which an axis that cuts the batch of most operators cuts that of all.

    Data parallelism hides the sums of gradients under backward, which a sum of operators' times cannot show: so the
    variants are worth a simulation.
    """
    found = [with_data(problem, plan)]
    for axis in (axis.name for axis in plan.mesh.axes if axis.name in OPERATOR_AXES and axis.size > 1):
        cut = sum(axis in dict(sharding.cuts).get(BATCH, ()) for sharding in plan.shardings)
        if 2 * cut > len(plan.shardings):
            whole = _with_batch(problem, plan, axis)
            if whole is not None:
                found.append(with_data(problem, whole))
    return tuple(dict.fromkeys(found))


def agreeing(problem: Problem, plan: Plan) -> Plan:
    """Return the plan in which the first user of every tied parameter keeps it in the layout of the second.

    The first user gets the legal sharding with that layout that is most like its present one.
    """
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    operators, found = operators_by_name(problem), {each.operator: each for each in plan.shardings}
    for (block, name), (other, same) in problem.graph.tied:
        first, second = (_user(problem, *end) for end in ((block, name), (other, same)))
        if first not in found or second not in found:
            continue
        owner, operator = operators[first]
        wanted = dict(found[second].of_kept(operators[second][0].tensor[same]).cuts)
        legal = choices(block, owner, operator, degrees, plan.sequences)
        fit = [each for each in legal if dict(each.of_kept(owner.tensor[name]).cuts) == wanted]
        own = set(found[first].cuts)
        found[first] = max(fit, key=lambda each: (len(own & set(each.cuts)), not each.kept), default=found[first])
    return replace(plan, shardings=tuple(found.values()))


def _user(problem: Problem, block: str, parameter: str) -> str:
    """Return the name of the operator of a block that uses a parameter."""
    owner = dict(problem.graph.occurrences)[block]
    return next(f"{block}.{operator.name}" for operator in owner.operators if parameter in operator.parameters)


def all_kept(problem: Problem, plan: Plan) -> Plan:
    """Return the plan that keeps every parameter cut along all axes that cut none of its dims, as ZeRO 3 does."""
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    operators, result = operators_by_name(problem), []
    for sharding in plan.shardings:
        block, operator = operators[sharding.operator]
        own = tuple((dim, axes) for dim, axes in sharding.cuts if dim in dict(operator.dims))
        *_, kept = ways_to_keep(block, operator, own, degrees)
        result.append(replace(sharding, kept=kept))
    return replace(plan, shardings=tuple(result))


def _with_batch(problem: Problem, plan: Plan, axis: str) -> Plan | None:
    """Return the plan in which an axis cuts the batch of every operator that has one; None where it does not divide."""
    order = [each.name for each in plan.mesh.axes]
    operators = operators_by_name(problem)
    result = []
    for sharding in plan.shardings:
        _, operator = operators[sharding.operator]
        cuts = dict(_left(sharding.cuts, (axis,)))
        if BATCH in dict(operator.dims):
            cuts[BATCH] = tuple(sorted((*cuts.get(BATCH, ()), axis), key=order.index))
        if plan.sequences % prod(plan.mesh.size(each) for each in cuts.get(BATCH, ())):
            return None
        kept = ((name, _left(each, (axis,))) for name, each in sharding.kept)
        wider = tuple((name, each) for name, each in kept if _wider(each, tuple(cuts.items())))
        result.append(OperatorSharding(sharding.operator, tuple(cuts.items()), wider))
    return replace(plan, shardings=tuple(result))


def operators_by_name(problem: Problem) -> dict[str, tuple[Block, Operator]]:
    """Return every operator, with its block, by each name that a plan may use for it."""
    return {
        f"{name}.{operator.name}": (block, operator)
        for occurrence, block in problem.graph.occurrences
        for name in (block.name, occurrence)
        for operator in block.operators
    }


def _said_once(plan: Plan) -> Plan:
    """Return the plan without its shardings if none of them cuts anything, as plans of layouts have none."""
    return plan if any(each.cuts or each.kept for each in plan.shardings) else replace(plan, shardings=())


def _is_data(problem: Problem, plan: Plan, axis: str, *, keeps: bool) -> bool:
    """Return whether an axis cuts the batch of all operators that have one, and nothing else.

    With ``keeps_cut`` it also keeps all their parameters cut, otherwise none.
    """
    operators = operators_by_name(problem)
    for sharding in plan.shardings:
        block, operator = operators[sharding.operator]
        cut = [dim for dim, axes in sharding.cuts if axis in axes]
        if cut != ([BATCH] if BATCH in dict(operator.dims) else []):
            return False
        kept = [axis in _axes(sharding.of_kept(block.tensor[name])) for name in operator.parameters]
        if any(kept) if not keeps else bool(cut) and not all(kept):
            return False
    return True


def _axes(spec: ShardingSpec) -> set[str]:
    """Return the axes that cut any dim of a tensor."""
    return {axis for _, axes in spec.cuts for axis in axes}


def _moved(plan: Plan, axes: tuple[str, ...], zero: int) -> Plan:
    """Return the plan with adjacent axes replaced by one data axis, at their position in the mesh."""
    ways = prod(plan.mesh.size(axis) for axis in axes)
    assert isinstance(plan.microbatch, int)
    left = [axis for axis in plan.mesh.axes if axis.name not in (*axes[1:], DATA)]
    mesh = [Axis(DATA, ways) if axis.name == axes[0] else axis for axis in left]
    if TENSOR in axes:
        mesh.append(Axis(TENSOR, 1))
    return replace(
        plan,
        mesh=Mesh(tuple(mesh)),
        shardings=tuple(_without(sharding, axes) for sharding in plan.shardings),
        microbatch=plan.microbatch // ways,
        zero=zero,
    )


def _without(sharding: OperatorSharding, axes: tuple[str, ...]) -> OperatorSharding:
    """Return a sharding without some axes; parameters that it then keeps as it reads them are not named."""
    cuts = _left(sharding.cuts, axes)
    kept = ((name, _left(each, axes)) for name, each in sharding.kept)
    return OperatorSharding(sharding.operator, cuts, tuple((name, each) for name, each in kept if _wider(each, cuts)))


def _wider(kept: tuple[tuple[str, tuple[str, ...]], ...], cuts: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Return whether a parameter is kept in another layout than the operator reads."""
    return any(dict(cuts).get(dim, ()) != axes for dim, axes in kept)


def _left(
    cuts: tuple[tuple[str, tuple[str, ...]], ...], axes: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return cuts without some axes; dims that no other axis cuts are left out."""
    found = ((dim, tuple(axis for axis in each if axis not in axes)) for dim, each in cuts)
    return tuple((dim, each) for dim, each in found if each)


def cuts_operators(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan has shardings of single operators that no layout of the whole network means."""
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
    """Yield every rule that a plan with shardings of single operators breaks.

    All its fields but mesh, batch, shardings, pipeline and ZeRO stage must be those of `build_operator_plan`.
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
            schedule=plan.schedule,
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
    """Yield every rule of stages and schedules that a plan of single operators breaks."""
    names = [name for name, _ in problem.graph.occurrences]
    met = [name for stage in plan.stages for name in stage.blocks]
    if met != names:
        where = next((n for n, (one, other) in enumerate(zip_longest(names, met)) if one != other), 0)
        found = met[where] if where < len(met) else "none"
        wanted = names[where] if where < len(names) else "none"
        yield Violation("stages", f"stages hold every block once and in order; block {where} is {wanted}, met {found}")
    if plan.schedule not in SCHEDULES or SCHEDULES[plan.schedule].asynchronous:
        flushed = [name for name, rule in SCHEDULES.items() if not rule.asynchronous]
        near = get_close_matches(plan.schedule, flushed, 1, 0.0)[0]
        yield Violation(
            "schedule", f"stages of single operators run a published schedule with a flush; nearest: {near}"
        )
        return
    rule, count = SCHEDULES[plan.schedule], plan.num_microbatches
    if plan.pipeline > 1 and (fault := rule.violation(plan.pipeline, count, plan.chunks)):
        yield Violation("schedule", fault)
    elif len(plan.stages) != plan.pipeline * plan.chunks:
        stages = f"pipeline({plan.pipeline}) * chunks({plan.chunks}) = {plan.pipeline * plan.chunks}"
        yield Violation("stages", f"{stages} stages, met {len(plan.stages)}")


def _sharding_violations(problem: Problem, plan: Plan, degrees: dict[str, int]) -> Iterator[Violation]:
    """Yield the first broken rule of every sharding of a plan."""
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
    """Return the first rule that a sharding of an operator breaks; empty where it breaks none."""
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
    """Return the first rule that the layout of a kept parameter breaks; empty where it breaks none."""
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
