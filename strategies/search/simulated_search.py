"""Searches by the simulator.

The driver knows cost models by their protocol alone; here the simulator is the one where none is given.
"""

from collections.abc import Callable
from time import perf_counter

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.driver import Progress, SearchResult, run_search
from meshwise.strategies.search.fan_out import Evaluator
from meshwise.strategies.search.proposals import SearchAlgorithm
from meshwise.strategies.search.space import EVERYTHING, Space


def search(
    algorithm: SearchAlgorithm,
    problem: Problem,
    space: Space = EVERYTHING,
    *,
    costs: CostModel | Evaluator | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> SearchResult:
    """Return the result of ``algorithm`` for ``problem`` in ``space``.

    Parameters
    ----------
    costs
        The cost model, by default the simulator; in an `Evaluator` with an executor, or with the journal of an
        earlier run. The executor is not shut down.
    budget
        The number of evaluations at most; only different plans count.
    seconds
        The time of the search. A simulation under way at its end is given up a moment later. Where no plan was
        evaluated by then, the known plan that is simulated soonest is, so that there is a result.
    progress
        Called after every evaluation, and about twice a second while no plan is evaluated.
    clock
        Returns the current time in seconds.

    Raises
    ------
    ValueError
        Where ``budget`` is less than 1, ``seconds`` is not positive, or a journal has another evaluation of the best
        plan than the cost model. That nothing fits is a result, not an error.
    """
    return run_search(
        algorithm,
        problem,
        space,
        costs=SimulatedCost(problem) if costs is None else costs,
        budget=budget,
        seconds=seconds,
        progress=progress,
        clock=clock,
    )
