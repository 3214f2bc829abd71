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


@lru_cache(maxsize=32)
def _costs(problem: Problem) -> SimulatedCost:
    return SimulatedCost(problem)


def seconds_of(problem: Problem, plan: Plan) -> float:
    """Return the seconds of one step.

    Once its stages are full, a pipeline takes as long for every further round of microbatches. A long step
    is a short one of the same plan, and as many times what one more round adds to it as it has more.
    """
    costs, few = costs_of(problem), _fewest(problem, plan)
    if plan.num_microbatches <= 2 * few:
        return _simulated(costs, plan)
    short, longer = (_simulated(costs, replace(plan, num_microbatches=count)) for count in (few, 2 * few))
    return longer + (plan.num_microbatches / few - 2) * (longer - short)


def peak_memory_of(problem: Problem, plan: Plan) -> float:
    """Return the bytes of the fullest device, which no round of microbatches after the second changes."""
    return costs_of(problem).peak_memory(_for_memory(problem, plan))


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether every device has the memory that it needs."""
    return costs_of(problem).fits(_for_memory(problem, plan))


def _for_memory(problem: Problem, plan: Plan) -> Plan:
    """Return a plan of the same memory with few microbatches, where a stage has no buffer for every one of them."""
    few = 2 * _fewest(problem, plan)
    if plan.num_microbatches <= few or (plan.pipeline > 1 and problem.training.conventions.buffers_every_microbatch):
        return plan
    return replace(plan, num_microbatches=few)


@lru_cache(maxsize=64)
def _simulated(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _fewest(problem: Problem, plan: Plan) -> int:
    """Return the microbatches of a step that is short, but fills every stage."""
    wanted = max(2, MANY_PASSES // len(problem.graph.occurrences) // 2)
    if plan.pipeline == 1:
        return wanted
    rounds = max(1, wanted // plan.pipeline)
    while plan.rule.violation(plan.pipeline, rounds * plan.pipeline, plan.chunks) is not None and rounds < 8:
        rounds += 1
    return rounds * plan.pipeline
