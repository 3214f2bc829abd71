"""The part that all searches for shardings of single operators have in common."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.choices import filter_choices, find_pin_violation, resolve_pins
from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.costs import OperatorCosts, compute_operator_costs
from meshwise.strategies.operators.operator_plan import list_data_variants, with_data
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS, divisors
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import allows_value
from meshwise.strategies.search.proposals import Certificate, Proof, Proposals
from meshwise.strategies.search.space import Space

Solver = Callable[[OperatorCosts, int], Solution | Shortfall]
"""Returns a choice for every operator that takes no more than a number of bytes, or what is missing."""

RETRIES = 4
"""How often an arrangement is solved, each time with a limit nearer to the bytes that its plan really takes."""

BINDING_SHARE = 0.97
"""Part of the memory from which on memory is taken to bind."""


def search_operators(
    problem: Problem, space: Space, costs: CostModel, solve: Solver, *, choices_text: str = ""
) -> Proposals:
    """Yield the plan that ``solve`` chooses on every arrangement of the devices that a space allows.

    On each arrangement the largest microbatches come first, and smaller ones while nothing fits. ``choices_text``
    names the choices among which ``solve`` takes the best; empty for all. The only proof about step times is the bound
    of all plans: no device computes faster than its peak.
    """
    yield Proof(least_step_time(problem))
    # one StageCosts for all arrangements: the costs of equally cut operators are shared
    stage_costs, pins = StageCosts(problem), resolve_pins(problem.graph, space.pin)
    solve_in_time = partial(_solve_in_time, costs, solve)
    for degrees in list_arrangements(problem, space):
        for microbatch in list_microbatches(problem, space, degrees):
            if find_pin_violation(pins, dict(degrees), microbatch):
                continue
            table = compute_operator_costs(
                problem, dict(degrees), microbatch, costs=stage_costs, choice_filter=partial(filter_choices, pins)
            )
            has_fit = yield from _propose_fitting(table, space, solve_in_time, choices_text)
            if has_fit:
                break
    return None


def _solve_in_time(costs: CostModel, solve: Solver, table: OperatorCosts, limit: int) -> Solution | Shortfall:
    costs.check_time()
    return solve(table, limit)


def check_pins(problem: Problem, space: Space) -> None:
    """Raise ``ValueError`` where pins name unknown operators, or no arrangement of the devices can keep them."""
    pins = resolve_pins(problem.graph, space.pin)
    first_fault = ""
    for degrees in list_arrangements(problem, space):
        for microbatch in list_microbatches(problem, space, degrees):
            fault = find_pin_violation(pins, dict(degrees), microbatch)
            if not fault:
                return
            first_fault = first_fault or fault
    if first_fault:
        raise ValueError(
            f"pins hold on some arrangement of the devices that space allows; on the first one {first_fault}"
        )


def _propose_fitting(
    table: OperatorCosts, space: Space, solve: Solver, choices_text: str
) -> Generator[Plan | Certificate, Evaluation, bool]:
    """Yield plans until one fits that uses the memory well; return whether one fitted.

    The bytes of a choice are never less than those of its plan, and may be more: where memory binds, the limit is
    raised or lowered by the bytes that the plan really takes. Where the user ended ``solve``, its plans are the last.
    """
    limit, has_fit = table.limit, False
    room = table.limit
    for retry in range(RETRIES):
        tied_table, solution = solve_tied(table, limit, solve)
        if isinstance(solution, Shortfall):
            if retry or solution.memory <= limit:
                break
            limit = solution.memory  # the plan may take less
            continue
        price = None if solution.price is None else solution.price / TICKS_PER_SECOND
        yield Certificate(solution.gap if solution.bound else None, price, choices_text)
        chosen_plan = tied_table.build_plan(solution.choice)
        fits, needed_bytes = False, 0.0
        for plan in list_variants(table.problem, chosen_plan, space):
            evaluation = yield plan
            fits = fits or evaluation.fits
            needed_bytes = needed_bytes or evaluation.peak_memory - table.resident_bytes
        if solution.was_interrupted:
            raise KeyboardInterrupt
        has_fit = has_fit or fits
        if not needed_bytes or (
            fits and (solution.memory < BINDING_SHARE * limit or needed_bytes > BINDING_SHARE * room)
        ):
            break
        # a byte less where the plan did not fit, so that the same choice is not made again
        limit = int(solution.memory * room / needed_bytes) - (not fits)
    return has_fit


def solve_tied(table: OperatorCosts, limit: int, solve: Solver) -> tuple[OperatorCosts, Solution | Shortfall]:
    """Return the solution of ``solve`` in which operators that share a parameter keep it in one layout, and its table.

    Where a solution has two layouts of a shared parameter, both are tried for all of its operators and the better is
    taken; the bound of free layouts remains a bound. If the user has ended ``solve``, the other operators keep their
    choices.
    """
    solution = solve(table, limit)
    if isinstance(solution, Shortfall):
        return table, solution
    for (first_node, first_name), (second_node, second_name) in table.tied_users:
        tied_ends = (
            (first_node, solution.choice[first_node], first_name),
            (second_node, solution.choice[second_node], second_name),
        )
        layouts = [table.find_kept_axes(*tied_end) for tied_end in tied_ends]
        if layouts[0] == layouts[1]:
            continue
        solutions: list[tuple[OperatorCosts, Solution]] = []
        for layout in layouts:
            fixed_choices = enumerate(solution.choice) if solution.was_interrupted else ()
            allowed_choices = {node: [choice] for node, choice in fixed_choices} | {
                node: [n for n in range(len(table.choices[node])) if table.find_kept_axes(node, n, name) == layout]
                for node, name in ((first_node, first_name), (second_node, second_name))
            }
            if all(allowed_choices.values()):
                tied_solution = solve_tied(table.restrict_choices(allowed_choices), limit, solve)
                solutions += [(tied_solution[0], tied_solution[1])] if isinstance(tied_solution[1], Solution) else []
        if solutions:
            costs, best_solution = min(solutions, key=lambda pair: pair[1].time)
            return costs, replace(
                best_solution, bound=min(best_solution.bound, solution.bound), was_interrupted=solution.was_interrupted
            )
    return table, solution


def list_variants(problem: Problem, chosen_plan: Plan, space: Space) -> Iterator[Plan]:
    """Yield a chosen plan and those near it, with data parallelism in the mesh, with whole and with shared states."""
    for plan in (with_data(problem, chosen_plan),) if space.pin else list_data_variants(problem, chosen_plan):
        for zero in dict.fromkeys((plan.zero, 1 if plan.data > 1 and not plan.zero else plan.zero)):
            if allows_value(space.zero, zero) and allows_value(space.data, plan.data):
                yield replace(plan, zero=zero)


def list_arrangements(problem: Problem, space: Space) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the degrees of the operator axes over all devices, the largest inner axis first.

    The inner axis has all devices, or lies inside a node; a limit on ``tensor`` is for it, one on ``tensor_rows`` for
    the outer axis. A third axis outside both has ``tensor_depth`` ranks. There is one pipeline stage.
    """
    devices, node_devices = len(problem.cluster.free_devices), problem.cluster.first_node.devices
    if not allows_value(space.pipeline, 1):
        return
    depths = [depth for depth in sorted(set(space.tensor_depth or (1,))) if devices % depth == 0]
    for depth, inner in product(depths, reversed(divisors(devices))):
        outer, remainder = divmod(devices, depth * inner)
        is_local = inner == devices or (1 < inner <= node_devices and node_devices % inner == 0)
        if is_local and not remainder and allows_value(space.tensor, inner) and allows_value(space.tensor_rows, outer):
            degrees = (TENSOR_DEPTH, depth), (TENSOR_ROWS, outer), (TENSOR, inner)
            yield tuple((axis, ranks) for axis, ranks in degrees if ranks > 1 or axis == TENSOR)


def list_microbatches(problem: Problem, space: Space, degrees: tuple[tuple[str, int], ...]) -> Iterator[int]:
    """Yield the sequences of a microbatch on all devices, the largest first; the outermost axis divides them.

    By default the batch divided by powers of two.
    """
    batch, num_parts = problem.training.global_batch, degrees[0][1]
    if batch % num_parts:
        yield batch
        return
    for size in reversed(divisors(batch // num_parts)):
        count = batch // num_parts // size
        if allows_value(space.microbatch, size) and (space.microbatch or count & (count - 1) == 0):
            yield size * num_parts
