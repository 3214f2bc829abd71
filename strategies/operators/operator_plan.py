"""Complete plans from a sharding for every operator, and the rules that such plans obey."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, groupby, zip_longest
from math import prod

from meshwise.simulator.operator_graph import BATCH, Block, Operator
from meshwise.strategies.operators.choices import (
    Cuts,
    find_cut_violation,
    list_aliases,
    list_choices,
    list_cuttable_dims,
    list_kept_cuts,
)
from meshwise.strategies.plan.layout import ZERO_STAGES, Violation
from meshwise.strategies.plan.mesh import DATA, EXPERT, OPERATOR_AXES, PIPELINE, TENSOR, Axis, Mesh
from meshwise.strategies.plan.parallelism import Parallelism, shard_operators
from meshwise.strategies.plan.partition import Stage, partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import need_violations, recompute_violations
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.schedules.schedule import SCHEDULES

FREE_DECISIONS = ("zero", "reshard_after_forward", "overlap_gradients", "overlap_tensor", "recompute")
"""Decisions of a step that a plan that cuts single operators takes as any plan does."""

Degrees = Mapping[str, int]
"""Ranks along each operator axis."""


def build_operator_plan(
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

    A microbatch has ``microbatch`` sequences on all ranks along the operator axes together. ``stages`` are the blocks
    of every pipeline stage, ``chunks`` stages a rank; by default one stage of all blocks. ``shardings`` are named
    ``block.operator``, or ``layers.3.operator`` for one occurrence of a repeated block.

    Raises
    ------
    ValueError
        Where the ranks are not as many as the free devices, or microbatches do not divide the batch.
    """
    axes = [Axis(name, degrees.get(name, 1)) for name in OPERATOR_AXES]
    operator_axes = [axis for axis in axes if axis.size > 1 or axis.name == TENSOR]
    mesh = Mesh((Axis(PIPELINE, max(len(stages) // chunks, 1)), Axis(DATA, data), *operator_axes))
    free_devices, batch = problem.cluster.free_devices, problem.training.global_batch
    if mesh.num_ranks != len(free_devices):
        shown_axes = [axis for axis in mesh.axes if axis.size > 1 or axis.name != PIPELINE]
        product_text = " * ".join(f"{axis.name}({axis.size})" for axis in shown_axes)
        raise ValueError(f"{product_text} = {mesh.num_ranks} ranks, cluster has {len(free_devices)}")
    if batch % (data * microbatch):
        raise ValueError(f"data({data}) * microbatch({microbatch}) divides global_batch({batch})")
    return Plan(
        mesh=mesh,
        stages=stages or partition_layers(problem.graph, 1, "even"),
        shardings=tuple(shardings),
        num_microbatches=batch // (data * microbatch),
        microbatch=microbatch,
        schedule=schedule,
        chunks=chunks,
        attention=None,
        placement=tuple(() if len(free_devices) == problem.cluster.num_devices else free_devices),
    )


def merge_shardings(problem: Problem, named_shardings: Mapping[str, OperatorSharding]) -> tuple[OperatorSharding, ...]:
    """Return the shardings of a plan: for each block that of its first occurrence, and those that differ from it."""
    result: list[OperatorSharding] = []
    for block in problem.graph.blocks:
        for operator in block.operators:
            block_shardings = {name: named_shardings[f"{name}.{operator.name}"] for name in block.names()}
            common_sharding = next(iter(block_shardings.values()))
            result.append(replace(common_sharding, operator=f"{block.name}.{operator.name}"))
            result += [
                sharding
                for sharding in block_shardings.values()
                if (sharding.cuts, sharding.kept) != (common_sharding.cuts, common_sharding.kept)
            ]
    return tuple(result)


def with_data(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with axes that cut the batch of every operator, and nothing else, turned into data parallelism.

    It is ZeRO 3 where every parameter is kept cut along them. Other plans are returned unchanged.
    """
    if plan.data > 1 or not isinstance(plan.microbatch, int):
        return plan
    names = [axis.name for axis in plan.mesh.axes if axis.size > 1]
    for keeps_cut in (False, True):
        is_data_axis = {
            name: name in OPERATOR_AXES and _is_data(problem, plan, name, keeps_cut=keeps_cut) for name in names
        }
        runs = (tuple(run) for is_data, run in groupby(names, is_data_axis.__getitem__) if is_data)
        moved_axes = next(runs, ())
        if moved_axes:
            data_plan = _move_axes(plan, moved_axes, zero=3 if keeps_cut else 0)
            cuts_any = any(sharding.cuts or sharding.kept for sharding in data_plan.shardings)
            return data_plan if cuts_any else replace(data_plan, shardings=())  # as plans of layouts have none
    return plan


def list_data_variants(problem: Problem, plan: Plan) -> tuple[Plan, ...]:
    """Return a plan, and variants in which an axis that cuts the batch of most operators cuts that of all.

    Data parallelism hides the sums of gradients under backward, which a sum of operators' times cannot show: so the
    variants are worth a simulation.
    """
    plans = [with_data(problem, plan)]
    for axis in (axis.name for axis in plan.mesh.axes if axis.name in OPERATOR_AXES and axis.size > 1):
        num_cut = sum(axis in dict(sharding.cuts).get(BATCH, ()) for sharding in plan.shardings)
        if 2 * num_cut > len(plan.shardings):
            batch_plan = _with_batch(problem, plan, axis)
            if batch_plan is not None:
                plans.append(with_data(problem, batch_plan))
    return tuple(dict.fromkeys(plans))


def with_tied_layouts(problem: Problem, plan: Plan) -> Plan:
    """Return the plan in which the first user of every tied parameter keeps it in the layout of the second.

    The first user gets the legal sharding with that layout that is most like its present one.
    """
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    operators = operators_by_name(problem)
    shardings_by_name = {sharding.operator: sharding for sharding in plan.shardings}

    def read_axes(sharding: OperatorSharding, user: str, parameter: str) -> dict[str, tuple[str, ...]]:
        return dict(sharding.find_kept_spec(operators[user][0].tensor[parameter]).cuts)

    for first_end, second_end in problem.graph.tied:
        first_user, second_user = _find_user(problem, *first_end), _find_user(problem, *second_end)
        if first_user not in shardings_by_name or second_user not in shardings_by_name:
            continue
        kept_axes = read_axes(shardings_by_name[second_user], second_user, second_end[1])
        legal_shardings = list_choices(first_end[0], *operators[first_user], degrees, plan.sequences)
        current_cuts = set(shardings_by_name[first_user].cuts)
        shardings_by_name[first_user] = max(
            (choice for choice in legal_shardings if read_axes(choice, first_user, first_end[1]) == kept_axes),
            key=lambda sharding: (len(current_cuts & set(sharding.cuts)), not sharding.kept),
            default=shardings_by_name[first_user],
        )
    return replace(plan, shardings=tuple(shardings_by_name.values()))


def _find_user(problem: Problem, block: str, parameter: str) -> str:
    """Return the name of the operator of a block that uses a parameter."""
    owner_block = dict(problem.graph.occurrences)[block]
    return next(f"{block}.{operator.name}" for operator in owner_block.operators if parameter in operator.parameters)


def with_all_kept(problem: Problem, plan: Plan) -> Plan:
    """Return the plan that keeps every parameter cut along all axes that cut none of its dims, as ZeRO 3 does."""
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    operators, result = operators_by_name(problem), []
    for sharding in plan.shardings:
        block, operator = operators[sharding.operator]
        operator_cuts = tuple((dim, axes) for dim, axes in sharding.cuts if dim in dict(operator.dims))
        *_, kept_cuts = list_kept_cuts(block, operator, operator_cuts, degrees)
        result.append(replace(sharding, kept=kept_cuts))
    return replace(plan, shardings=tuple(result))


def _with_batch(problem: Problem, plan: Plan, axis: str) -> Plan | None:
    """Return the plan in which an axis cuts the batch of every operator that has one; None where it does not divide."""
    order = [item.name for item in plan.mesh.axes]
    operators = operators_by_name(problem)
    result = []
    for sharding in plan.shardings:
        _, operator = operators[sharding.operator]
        cuts = dict(_remove_axes(sharding.cuts, (axis,)))
        if BATCH in dict(operator.dims):
            cuts[BATCH] = tuple(sorted((*cuts.get(BATCH, ()), axis), key=order.index))
        if plan.sequences % prod(plan.mesh.size(item) for item in cuts.get(BATCH, ())):
            return None
        result.append(_without_axes(sharding, (axis,), cuts))
    return replace(plan, shardings=tuple(result))


def operators_by_name(problem: Problem) -> dict[str, tuple[Block, Operator]]:
    """Return every operator, with its block, by each name that a plan may use for it."""
    return {
        f"{name}.{operator.name}": (block, operator)
        for occurrence, block in problem.graph.occurrences
        for name in (block.name, occurrence)
        for operator in block.operators
    }


def _is_data(problem: Problem, plan: Plan, axis: str, *, keeps_cut: bool) -> bool:
    """Return whether an axis cuts the batch of all operators that have one, and nothing else.

    With ``keeps_cut`` it also keeps all their parameters cut, otherwise none.
    """
    operators = operators_by_name(problem)
    for sharding in plan.shardings:
        block, operator = operators[sharding.operator]
        cut_dims = [dim for dim, axes in sharding.cuts if axis in axes]
        if cut_dims != ([BATCH] if BATCH in dict(operator.dims) else []):
            return False
        is_kept = [axis in sharding.find_kept_spec(block.tensor[name]).cut_axes for name in operator.parameters]
        if any(is_kept) if not keeps_cut else bool(cut_dims) and not all(is_kept):
            return False
    return True


def _move_axes(plan: Plan, axes: tuple[str, ...], zero: int) -> Plan:
    """Return the plan with adjacent axes replaced by one data axis, at their position in the mesh."""
    num_ranks = prod(plan.mesh.size(axis) for axis in axes)
    assert isinstance(plan.microbatch, int)
    remaining_axes = [axis for axis in plan.mesh.axes if axis.name not in (*axes[1:], DATA)]
    mesh = [Axis(DATA, num_ranks) if axis.name == axes[0] else axis for axis in remaining_axes]
    if TENSOR in axes:
        mesh.append(Axis(TENSOR, 1))
    return replace(
        plan,
        mesh=Mesh(tuple(mesh)),
        shardings=tuple(
            _without_axes(sharding, axes, dict(_remove_axes(sharding.cuts, axes))) for sharding in plan.shardings
        ),
        microbatch=plan.microbatch // num_ranks,
        zero=zero,
    )


def _without_axes(
    sharding: OperatorSharding, axes: tuple[str, ...], cuts: Mapping[str, tuple[str, ...]]
) -> OperatorSharding:
    """Return a sharding with other cuts, whose parameters are kept without some axes.

    Parameters that it then keeps as it reads them are not named.
    """
    kept_cuts = ((name, _remove_axes(parameter_cuts, axes)) for name, parameter_cuts in sharding.kept)
    wider_cuts = ((name, row) for name, row in kept_cuts if any(cuts.get(dim, ()) != dim_axes for dim, dim_axes in row))
    return OperatorSharding(sharding.operator, tuple(cuts.items()), tuple(wider_cuts))


def _remove_axes(cuts: Cuts, axes: tuple[str, ...]) -> Cuts:
    """Return cuts without some axes; dims that no other axis cuts are left out."""
    remaining_cuts = ((dim, tuple(axis for axis in dim_axes if axis not in axes)) for dim, dim_axes in cuts)
    return tuple((dim, dim_axes) for dim, dim_axes in remaining_cuts if dim_axes)


def cuts_operators(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan has shardings of single operators that no layout of the whole network means."""
    if not plan.shardings:
        return plan.tensor_depth > 1
    parallelism = Parallelism(
        tensor=plan.tensor > 1,
        sequence_parallel=plan.sequence_parallel,
        expert=plan.mesh.size(EXPERT) > 1,
        attention=plan.attention,
        rows=plan.tensor_rows > 1,
        gathers_logits=problem.training.gathers_logits,
    )
    if plan.shardings == shard_operators(problem.graph, parallelism):
        return False
    return not operators_by_name(problem).keys().isdisjoint(sharding.operator for sharding in plan.shardings)


def list_operator_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Yield every rule that a plan with shardings of single operators breaks.

    All its fields but mesh, batch, shardings, pipeline and those of `FREE_DECISIONS` must be those of
    `build_operator_plan`.
    """
    known_axes = (PIPELINE, DATA, *OPERATOR_AXES)
    unknown_axis = next((axis.name for axis in plan.mesh.axes if axis.name not in known_axes), None)
    if unknown_axis is not None:
        yield Violation(
            "mesh", f"a plan that cuts single operators has the axes {', '.join(known_axes)}, met axis {unknown_axis}"
        )
        return
    if not isinstance(plan.microbatch, int):
        yield Violation("microbatch", "microbatches of a plan that cuts single operators are equal; met several sizes")
        return
    pipeline_violations = list(_list_pipeline_violations(problem, plan))
    if pipeline_violations:
        yield from pipeline_violations
        return
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    try:
        expected_plan = build_operator_plan(
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
    free_values = {name: getattr(plan, name) for name in FREE_DECISIONS}
    expected_plan = replace(expected_plan, mesh=plan.mesh, **free_values)
    for name in Plan.__dataclass_fields__:
        if getattr(plan, name) != getattr(expected_plan, name):
            yield Violation(name, f"{name} of a plan that cuts single operators follows from its mesh and the scenario")
    if plan.zero not in ZERO_STAGES:
        nearest = min(ZERO_STAGES, key=lambda stage: abs(stage - plan.zero))
        yield Violation("zero", f"zero is 0, 1, 2 or 3, met {plan.zero}; nearest: {nearest}")
    yield from need_violations(plan)
    if plan.overlap_tensor and (plan.operator_ranks == 1 or plan.splits_backward):
        yield Violation(
            "overlap_tensor",
            "overlap_tensor needs an operator axis, and a schedule that keeps backward whole; nearest: false",
        )
    layers = {name for name, block in problem.graph.occurrences if block.layer}
    num_layers = tuple(sum(name in layers for name in stage.blocks) for stage in plan.stages)
    yield from recompute_violations(problem.graph, plan.recompute, num_layers)
    yield from _list_sharding_violations(problem, plan, degrees)


def _list_pipeline_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Yield every rule of stages and schedules that a plan of single operators breaks."""
    names = [name for name, _ in problem.graph.occurrences]
    block_names = [name for stage in plan.stages for name in stage.blocks]
    if block_names != names:
        pairs = enumerate(zip_longest(names, block_names))
        index, pair = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        expected_name, actual_name = ("none" if name is None else name for name in pair)
        rule_text = f"stages hold every block once and in order; block {index} is {expected_name}, met {actual_name}"
        yield Violation("stages", rule_text)
    if plan.schedule not in SCHEDULES or SCHEDULES[plan.schedule].is_asynchronous:
        flushed_names = [name for name, rule in SCHEDULES.items() if not rule.is_asynchronous]
        nearest_name = get_close_matches(plan.schedule, flushed_names, 1, 0.0)[0]
        yield Violation(
            "schedule", f"stages of single operators run a published schedule with a flush; nearest: {nearest_name}"
        )
        return
    rule, num_microbatches = SCHEDULES[plan.schedule], plan.num_microbatches
    if plan.pipeline > 1 and (fault := rule.find_violation(plan.pipeline, num_microbatches, plan.chunks)):
        yield Violation("schedule", fault)
    elif len(plan.stages) != plan.pipeline * plan.chunks:
        stages = f"pipeline({plan.pipeline}) * chunks({plan.chunks}) = {plan.pipeline * plan.chunks}"
        yield Violation("stages", f"{stages} stages, met {len(plan.stages)}")


def _list_sharding_violations(problem: Problem, plan: Plan, degrees: dict[str, int]) -> Iterator[Violation]:
    """Yield the first broken rule of every sharding of a plan."""
    operators = operators_by_name(problem)
    seen_names: set[str] = set()
    for number, sharding in enumerate(plan.shardings):
        field = f"shardings.{number}"
        if sharding.operator not in operators:
            nearest_name = get_close_matches(sharding.operator, operators, 1, 0.0)[0]
            yield Violation(
                field, f"shardings name operators of the model, met {sharding.operator}; nearest: {nearest_name}"
            )
        elif sharding.operator in seen_names:
            yield Violation(field, f"shardings name an operator once, met {sharding.operator} again")
        else:
            violation = _find_sharding_violation(*operators[sharding.operator], sharding, degrees, plan.sequences)
            if violation:
                yield Violation(field, f"{sharding.operator}: {violation}")
        seen_names.add(sharding.operator)


def _find_sharding_violation(
    block: Block, operator: Operator, sharding: OperatorSharding, degrees: dict[str, int], microbatch: int
) -> str:
    """Return the first rule that a sharding of an operator breaks; empty where it breaks none."""
    legal_dims, operator_dims = list_cuttable_dims(block, operator), dict(operator.dims)
    wrong_axis = _find_wrong_axis([axes for dim, axes in sharding.cuts if dim in operator_dims], degrees)
    if wrong_axis is not None:
        return f"an axis of the mesh cuts one dim, met {wrong_axis}"
    expected_cuts: dict[str, tuple[str, ...]] = {}
    aliases = {item for dim in legal_dims for item in list_aliases(block, operator, dim)}
    for dim, axes in sharding.cuts:
        if dim in aliases:
            continue
        if dim not in legal_dims:
            return f"may be cut: {', '.join(legal_dims) or 'nothing'}; met {dim}"
        if list(axes) != [axis for axis in degrees if axis in axes]:
            return f"axes that cut {dim} go from the outermost to the innermost, met {', '.join(axes)}"
        fault = find_cut_violation(block, operator, dim, axes, degrees, microbatch)
        if fault:
            return fault
        expected_cuts |= dict.fromkeys((dim, *list_aliases(block, operator, dim)), axes)
    if dict(sharding.cuts) != expected_cuts:
        return f"cuts {', '.join(expected_cuts) or 'nothing'} together, met {', '.join(dict(sharding.cuts))}"
    return next(filter(None, (_find_kept_violation(block, operator, *item, degrees) for item in sharding.kept)), "")


def _find_wrong_axis(rows: Iterable[tuple[str, ...]], degrees: dict[str, int]) -> str | None:
    """Return the first axis that has one rank or cuts more than one dim; None where there is none."""
    used_axes = list(chain(*rows))
    return next((axis for axis in used_axes if degrees.get(axis, 1) == 1 or used_axes.count(axis) > 1), None)


def _find_kept_violation(block: Block, operator: Operator, name: str, cuts: Cuts, degrees: dict[str, int]) -> str:
    """Return the first rule that the layout of a kept parameter breaks; empty where it breaks none."""
    if name not in operator.parameters:
        return f"keeps its parameters ({', '.join(operator.parameters) or 'none'}) cut, met {name}"
    tensor = block.tensor[name]
    wrong_axis = _find_wrong_axis([axes for _, axes in cuts], degrees)
    if wrong_axis is not None:
        return f"an axis of the mesh cuts one dim of {name}, met {wrong_axis}"
    for dim, axes in cuts:
        if dim not in tensor.dims:
            return f"{name} has the dims {', '.join(tensor.dims)}, met {dim}"
        size, num_parts = tensor.shape[tensor.dims.index(dim)], prod(degrees[axis] for axis in axes)
        if size % num_parts:
            return f"{' * '.join(axes)}({num_parts}) divides {dim}({size}) of {name}"
    return ""
