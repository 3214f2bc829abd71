"""Fast step times and peaks for the plans of many problems: rows with one problem share its costs."""

from dataclasses import replace
from functools import lru_cache

from meshwise.scenarios.memory_forecast import MemoryForecast, forecast_memory
from meshwise.simulator.engine import step_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MANY_PASSES = 120
"""Number of passes through layers in a step beyond which its time is extrapolated from shorter steps.

With 400 the times of 462 published runs are the same to the last bit."""


def costs_of(problem: Problem) -> SimulatedCost:
    """Return the cost model of a problem; all global batches share one, since plans state their microbatches."""
    return _costs(share_costs(problem))


def share_costs(problem: Problem) -> Problem:
    """Return the problem whose costs a problem shares: the same with a global batch of 1."""
    return replace(problem, training=replace(problem.training, global_batch=1))


@lru_cache(maxsize=32)
def _costs(problem: Problem) -> SimulatedCost:
    return SimulatedCost(problem)


def estimate_step_time(problem: Problem, plan: Plan) -> float:
    """Return the step time of a plan in seconds.

    Once its stages are full, a pipeline takes the same time for every further round of microbatches. The time of a
    long step is therefore extrapolated from two short steps of the same plan.
    """
    costs, num_microbatches = costs_of(problem), _count_microbatches(problem, plan)
    if plan.num_microbatches <= 2 * num_microbatches:
        return _simulate_step(costs, plan)
    short_time, long_time = (
        _simulate_step(costs, replace(plan, num_microbatches=count))
        for count in (num_microbatches, 2 * num_microbatches)
    )
    return long_time + (plan.num_microbatches / num_microbatches - 2) * (long_time - short_time)


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether the tensors of a plan fit in the memory of every device with a margin."""
    return _fits(costs_of(problem), shorten_plan(problem, plan))


@lru_cache(maxsize=64)
def _fits(costs: SimulatedCost, plan: Plan) -> bool:
    return costs.fits(plan)


def forecast_run(problem: Problem, plan: Plan) -> MemoryForecast:
    """Return the memory of a plan in three ways, and whether it fits."""
    return _forecast(costs_of(problem), shorten_plan(problem, plan))


@lru_cache(maxsize=64)
def _forecast(costs: SimulatedCost, plan: Plan) -> MemoryForecast:
    return forecast_memory(costs, plan)


def shorten_plan(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with few microbatches and the same peak memory; the plan itself where stages buffer every one."""
    num_microbatches = 2 * _count_microbatches(problem, plan)
    if plan.num_microbatches <= num_microbatches or (
        plan.pipeline > 1 and problem.training.conventions.buffers_every_microbatch
    ):
        return plan
    return replace(plan, num_microbatches=num_microbatches)


@lru_cache(maxsize=64)
def _simulate_step(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _count_microbatches(problem: Problem, plan: Plan) -> int:
    """Return the number of microbatches of a short step that still fills every stage and that the schedule allows."""
    min_microbatches = max(2, MANY_PASSES // len(problem.graph.occurrences) // 2)
    if plan.pipeline == 1:
        return min_microbatches
    rounds = max(1, min_microbatches // plan.pipeline)
    while plan.rule.find_violation(plan.pipeline, rounds * plan.pipeline, plan.chunks) is not None and rounds < 8:
        rounds += 1
    return rounds * plan.pipeline
