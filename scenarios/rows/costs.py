"""Step times of many plans of many problems, quickly: what rows share is computed once."""

from dataclasses import replace
from functools import lru_cache

from simulator.engine import step_time
from strategies.cost_model import SimulatedCost
from strategies.lowering import lower
from strategies.plan import Plan
from strategies.problem import Problem

MANY_PASSES = 1500
"""Passes through layers of one step beyond which the effect of shared links is taken from a shorter step."""


def costs_of(problem: Problem) -> SimulatedCost:
    """Return the simulation of a problem; steps of other batches share it, for plans say how many microbatches."""
    return _costs(replace(problem, training=replace(problem.training, global_batch=1)))


@lru_cache(maxsize=128)
def _costs(problem: Problem) -> SimulatedCost:
    return SimulatedCost(problem)


def seconds_of(problem: Problem, plan: Plan) -> float:
    """Return the seconds of one step.

    A long step takes its longest path, times what transfers that share links cost a step of the same plan
    with so few microbatches that all its events can be simulated.
    """
    costs, fewer = costs_of(problem), _fewest(problem, plan)
    if plan.asynchronous or plan.offload or fewer >= plan.num_microbatches:
        return _simulated(costs, plan)
    return costs.longest_paths([plan])[0] * _slowdown(costs, replace(plan, num_microbatches=fewer))


@lru_cache(maxsize=4096)
def _simulated(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _slowdown(costs: SimulatedCost, plan: Plan) -> float:
    """Return how much longer a step takes than its longest path, for transfers share links."""
    return max(1.0, _simulated(costs, plan) / costs.longest_paths([plan])[0])


def _fewest(problem: Problem, plan: Plan) -> int:
    """Return the microbatches of a step that is short, but fills every stage."""
    wanted = max(1, MANY_PASSES // len(problem.graph.occurrences))
    return wanted if plan.pipeline == 1 else plan.pipeline * max(1, wanted // plan.pipeline)
