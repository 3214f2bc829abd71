"""Step times of many plans of many problems, quickly: what rows share is computed once."""

from dataclasses import replace
from functools import lru_cache

from simulator.engine import step_time
from strategies.cost_model import SimulatedCost
from strategies.lowering import lower
from strategies.plan import Plan
from strategies.problem import Problem

MANY_PASSES = 400
"""Passes through layers of one step beyond which it is extrapolated from shorter ones."""


def costs_of(problem: Problem) -> SimulatedCost:
    """Return the simulation of a problem; steps of other batches share it, for plans say how many microbatches."""
    return _costs(replace(problem, training=replace(problem.training, global_batch=1)))


@lru_cache(maxsize=128)
def _costs(problem: Problem) -> SimulatedCost:
    return SimulatedCost(problem)


def seconds_of(problem: Problem, plan: Plan) -> float:
    """Return the seconds of one step.

    Once its stages are full, a pipeline takes as long for every further round of microbatches. A long step
    is a short one of the same plan, and as many times what one more round adds to it as it has more.
    """
    costs, few = costs_of(problem), _fewest(problem, plan)
    if plan.asynchronous or plan.num_microbatches <= 2 * few:
        return _simulated(costs, plan)
    short, longer = (_simulated(costs, replace(plan, num_microbatches=count)) for count in (few, 2 * few))
    return longer + (plan.num_microbatches / few - 2) * (longer - short)


@lru_cache(maxsize=4096)
def _simulated(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _fewest(problem: Problem, plan: Plan) -> int:
    """Return the microbatches of a step that is short, but fills every stage."""
    wanted = max(2, MANY_PASSES // len(problem.graph.occurrences) // 2)
    return wanted if plan.pipeline == 1 else plan.pipeline * max(1, wanted // plan.pipeline)
