"""Memory of a plan in three ways, and whether it fits: one judgement for simulations, answers of searches and accuracy.

Tensors are allocated, the allocator reserves segments for them, and the device holds these and what the runtime and
communicators take. A plan fits where the device has that much with the probability that is asked for, and every host
what its ranks keep there. A search screens plans by their tensors and a margin
(`meshwise.scenarios.intervals.with_margin`), for it looks at thousands; the judgement of what it found replays a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwise.scenarios.intervals import find_risk_limit, find_uncertainty
from meshwise.strategies.allocation.device import count_overhead
from meshwise.strategies.allocation.replay import PlanReplay
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.driver import SearchResult

MAX_JUDGED = 20
"""Plans of a search that are judged, the fastest first, before the fastest one is kept with what is said of it."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of the fullest device of a plan: of tensors, reserved for them, and in all; and whether the plan fits.

    ``out_of_memory`` is the probability that a device lacks memory, ``allocated_last`` the tensors of the last pipeline
    rank.
    """

    allocated: float
    reserved: float
    device: float
    out_of_memory: float
    fits: bool
    allocated_last: float


def forecast_memory(costs: SimulatedCost, plan: Plan, assumptions: Sequence[str] = ()) -> MemoryForecast:
    """Return the memory of a plan in three ways, and whether it fits.

    Without a margin a plan fits where its tensors do: then predictions are trusted, and nothing is reserved beside
    tensors.
    """
    problem = costs.problem
    smallest = min(problem.cluster.accelerators, key=lambda device: device.memory)
    overhead = count_overhead(problem, plan)
    room = smallest.memory - overhead
    uncertainty, limit = find_uncertainty(problem, assumptions), find_risk_limit(problem)
    peak = costs.peak_memory(plan)
    if costs.memory_needs_simulation(plan):
        # what the host takes and gives back depends on times, so that there is no order of allocations to replay
        allocated = peak - smallest.reserved
        reserved = uncertainty.reserved_ratios[1] * allocated
        risk = uncertainty.estimate_cluster_risk(problem.cluster, peak)
        last = allocated
    else:
        allocated, reserved, least = costs.costs.get_shared(PlanReplay).reserve(plan, max(int(room), 0))
        risk = uncertainty.estimate_replay_risk(least, room)
        even_plan = plan.with_microbatch(max(plan.sizes))
        last = float(costs.costs.get_shared(PlanMemory).allocated(even_plan)[-1])
    is_mixed = len(problem.cluster.accelerators) > 1
    # on devices of several kinds each position has room of its own
    fits = costs.fits(plan) if limit is None or is_mixed else risk <= limit and costs.hosts_fit(plan)
    return MemoryForecast(allocated, reserved, reserved + overhead, risk, fits, last)


def forecast_plan(problem: Problem, plan: Plan) -> MemoryForecast:
    """Return the memory of a plan of a problem in three ways, and whether it fits."""
    return forecast_memory(SimulatedCost(problem), plan)


def judge_result(costs: SimulatedCost, result: SearchResult) -> SearchResult:
    """Return the result of a search with the fastest plan that fits when it is replayed.

    Where none of the fastest plans does, the result is as it was: its probability of lacking memory says so.
    """
    if result.best is None or forecast_memory(costs, result.best.plan).fits:
        return result
    fitting_trials = sorted(
        (trial for trial in result.trials if trial.evaluation.fits), key=lambda trial: trial.evaluation.step_time
    )
    best = next(
        (trial for trial in fitting_trials[:MAX_JUDGED] if forecast_memory(costs, trial.plan).fits), result.best
    )
    bound = result.lower_bound
    gap = None if result.gap is None or not bound else max((best.evaluation.step_time - bound) / bound, 0.0)
    return replace(result, best=best, gap=gap)
