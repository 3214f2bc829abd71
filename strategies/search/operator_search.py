"""The part that all searches for shardings of single operators have in common."""

from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.lowering import StageCosts
from meshwise.strategies.operators.choices import admitted, broken, resolved
from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.costs import OperatorCosts, operator_costs
from meshwise.strategies.operators.operator_plan import nearly_data, with_data
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS, divisors
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.driver import Certificate, Proof, Proposals
from meshwise.strategies.search.space import Space

Solve = Callable[[OperatorCosts, int], Solution | Shortfall]
"""Returns a choice for every operator that takes no more than a number of bytes, or what is missing."""

RETRIES = 4
"""How often an arrangement is solved, each time with a limit nearer to the bytes that its plan really takes."""

BINDING = 0.97
"""Part of the memory from which on memory is taken to bind."""


def operator_search(problem: Problem, space: Space, costs: CostModel, solve: Solve, *, among: str = "") -> Proposals:
    """Yield the plan that ``solve`` chooses on every arrangement of the devices that a space allows.

    On each arrangement the largest microbatches come first, and smaller ones while nothing fits. ``choices_text``
    names the choices among which ``solve`` takes the best; empty for all. The only proof about step times is the bound
    of all plans: no device computes faster than its peak.
    """
    yield Proof(least_step_time(problem))
    # one StageCosts for all arrangements: the costs of equally cut operators are shared
    stages, pins = StageCosts(problem), resolved(problem.graph, space.pin)
    in_time = partial(_in_time, costs, solve)
    for degrees in arrangements(problem, space):
        for microbatch in microbatches(problem, space, degrees):
            if broken(pins, dict(degrees), microbatch):
                continue
            table = operator_costs(problem, dict(degrees), microbatch, costs=stages, allowed=partial(admitted, pins))
            fitted = yield from _proposals(table, space, in_time, among)
            if fitted:
                break
    return None


def _in_time(costs: CostModel, solve: Solve, table: OperatorCosts, limit: int) -> Solution | Shortfall:
    costs.check_time()
    return solve(table, limit)


def check_pins(problem: Problem, space: Space) -> None:
    """Raise ``ValueError`` where pins name unknown operators, or no arrangement of the devices can keep them."""
    pins = resolved(problem.graph, space.pin)
    found = ""
    for degrees in arrangements(problem, space):
        for microbatch in microbatches(problem, space, degrees):
            fault = broken(pins, dict(degrees), microbatch)
            if not fault:
                return
            found = found or fault
    if found:
        raise ValueError(f"pins hold on some arrangement of the devices that space allows; on the first one {found}")


def _proposals(
    table: OperatorCosts, space: Space, solve: Solve, among: str
) -> Generator[Plan | Certificate, Evaluation, bool]:
    """Yield plans until one fits that uses the memory well; return whether one fitted.

    The bytes of a choice are never less than those of its plan, and may be more: where memory binds, the limit is
    raised or lowered by the bytes that the plan really takes. Where the user ended ``solve``, its plans are the last.
    """
    limit, fitted = table.limit, False
    room = table.limit
    for turn in range(RETRIES):
        one, solution = _tied(table, limit, solve)
        if isinstance(solution, Shortfall):
            if turn or solution.memory <= limit:
                break
            limit = solution.memory  # the plan may take less
            continue
        yield _certificate(solution, among)
        chosen = one.plan(solution.choice)
        fits, needed = False, 0.0
        for plan in variants(table.problem, chosen, space):
            evaluation = yield plan
            fits = fits or evaluation.fits
            needed = needed or evaluation.peak_memory - table.resident
        if solution.interrupted:
            raise KeyboardInterrupt
        fitted = fitted or fits
        if not needed or (fits and (solution.memory < BINDING * limit or needed > BINDING * room)):
            break
        # a byte less where the plan did not fit, so that the same choice is not made again
        limit = int(solution.memory * room / needed) - (not fits)
    return fitted


def _certificate(solution: Solution, among: str) -> Certificate:
    price = None if solution.price is None else solution.price / TICKS_PER_SECOND
    return Certificate(solution.gap if solution.bound else None, price, among)


def _tied(table: OperatorCosts, limit: int, solve: Solve) -> tuple[OperatorCosts, Solution | Shortfall]:
    """Return the solution of ``solve`` in which operators that share a parameter keep it in one layout, and its table.

    Where a solution has two layouts of a shared parameter, both are tried for all of its operators and the better is
    taken; the bound of free layouts remains a bound. If the user has ended ``solve``, the other operators keep their
    choices.
    """
    solution = solve(table, limit)
    if isinstance(solution, Shortfall):
        return table, solution
    for (first, one), (second, other) in table.tied:
        ends = (first, solution.choice[first], one), (second, solution.choice[second], other)
        layouts = [table.keeps(*end) for end in ends]
        if layouts[0] == layouts[1]:
            continue
        found: list[tuple[OperatorCosts, Solution]] = []
        for layout in layouts:
            now = enumerate(solution.choice) if solution.interrupted else ()
            same = {node: [choice] for node, choice in now} | {
                node: [n for n in range(len(table.choices[node])) if table.keeps(node, n, name) == layout]
                for node, name in ((first, one), (second, other))
            }
            if all(same.values()):
                again = _tied(table.only(same), limit, solve)
                found += [(again[0], again[1])] if isinstance(again[1], Solution) else []
        if found:
            costs, best = min(found, key=lambda each: each[1].time)
            return costs, replace(best, bound=min(best.bound, solution.bound), interrupted=solution.interrupted)
    return table, solution


def variants(problem: Problem, chosen: Plan, space: Space) -> Iterator[Plan]:
    """Yield a chosen plan and those near it, with data parallelism in the mesh, with whole and with shared states."""
    for plan in (with_data(problem, chosen),) if space.pin else nearly_data(problem, chosen):
        for zero in dict.fromkeys((plan.zero, 1 if plan.data > 1 and not plan.zero else plan.zero)):
            if _allowed(space.zero, zero) and _allowed(space.data, plan.data):
                yield replace(plan, zero=zero)


def arrangements(problem: Problem, space: Space) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the degrees of the operator axes over all devices, the largest inner axis first.

    The inner axis has all devices, or lies inside a node; a limit on ``tensor`` is for it, one on ``tensor_rows`` for
    the outer axis. A third axis outside both has ``tensor_depth`` ranks. There is one pipeline stage.
    """
    devices, inside = len(problem.cluster.free_devices), problem.cluster.first.devices
    if not _allowed(space.pipeline, 1):
        return
    depths = [depth for depth in sorted(set(space.tensor_depth or (1,))) if devices % depth == 0]
    for depth, inner in product(depths, reversed(divisors(devices))):
        outer, left = divmod(devices, depth * inner)
        local = inner == devices or (1 < inner <= inside and inside % inner == 0)
        if local and not left and _allowed(space.tensor, inner) and _allowed(space.tensor_rows, outer):
            degrees = (TENSOR_DEPTH, depth), (TENSOR_ROWS, outer), (TENSOR, inner)
            yield tuple((axis, ranks) for axis, ranks in degrees if ranks > 1 or axis == TENSOR)


def microbatches(problem: Problem, space: Space, degrees: tuple[tuple[str, int], ...]) -> Iterator[int]:
    """Yield the sequences of a microbatch on all devices, the largest first; the outermost axis divides them.

    By default the batch divided by powers of two.
    """
    batch, ways = problem.training.global_batch, degrees[0][1]
    if batch % ways:
        yield batch
        return
    for each in reversed(divisors(batch // ways)):
        count = batch // ways // each
        if _allowed(space.microbatch, each) and (space.microbatch or count & (count - 1) == 0):
            yield each * ways


def _allowed(limit: Container[int] | None, value: int) -> bool:
    return limit is None or value in limit
