"""A plan that is as fast as the best one, and takes less: less risk, then less memory, then fewer axes.

A prediction is off by some percent, so that between plans whose predicted times differ by less than `TOLERANCE` the
time decides nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from meshwise.scenarios.memory_forecast import MemoryForecast, forecast_memory
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.deadline import TimeLeft
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.operators.operator_plan import cuts_operators
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.descent import is_simulated_soon
from meshwise.strategies.search.space import neighbours

TOLERANCE = 0.005
"""Fraction of the step time by which a plan may be slower and still counts as fast."""

RISK_STEP = 0.005
"""To multiples of this probabilities of lacking memory are rounded before they are compared."""

MEMORY_STEP = 0.02
"""To multiples of this fraction of the best plan's memory that of others is rounded before it is compared."""

MAX_TRIALS = 20
"""Plans as fast as the best of which the memory is replayed."""

MAX_NEIGHBOURS = 16
"""Plans one decision away from the best that are simulated, those with the least bounds."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that is as fast as the best: its fraction of time more, of memory less in bytes, and its own figures."""

    plan: Plan
    step_time: float
    slower: float
    saved: float
    num_axes: int
    forecast: MemoryForecast

    def describe(self) -> str:
        """Return the plan and what it takes less, in words."""
        time_text = f"{self.slower:.1%} slower" if self.slower >= 0.0005 else "no slower"
        memory_text = "" if self.saved < 2**20 else f", {format_size(self.saved)} less"
        return f"{self.plan.describe()}: {time_text}{memory_text}, out of memory {self.forecast.out_of_memory:.1%}"


def find_tie(scenario: Scenario, best: Trial, trials: Iterable[Trial], time_left: TimeLeft) -> Tie | None:
    """Return the plan that takes the least of those as fast as the best; ``None`` where that is the best itself.

    The plans are those that a search evaluated and those one decision away from its best.
    """
    costs = SimulatedCost(scenario.problem)
    limit = (1 + TOLERANCE) * best.evaluation.step_time
    candidates = [trial for trial in trials if trial.evaluation.fits and trial.evaluation.step_time <= limit]
    candidates += _list_neighbours(scenario, costs, best, limit, time_left)
    ranked = {trial.plan: trial for trial in candidates if trial.plan != best.plan}
    best_forecast = forecast_memory(costs, best.plan)
    best_key, choice = _rank(best.plan, best_forecast, best_forecast.device), None
    for trial in islice(ranked.values(), MAX_TRIALS):
        if time_left() <= 0:
            break
        forecast = forecast_memory(costs, trial.plan)
        key = _rank(trial.plan, forecast, best_forecast.device)
        if forecast.fits and key < best_key:
            slower = max(trial.evaluation.step_time / best.evaluation.step_time - 1.0, 0.0)
            saved = best_forecast.device - forecast.device
            step_time = trial.evaluation.step_time
            best_key, choice = key, Tie(trial.plan, step_time, slower, saved, _count_axes(trial.plan), forecast)
    return choice


def _list_neighbours(
    scenario: Scenario, costs: SimulatedCost, best: Trial, limit: float, time_left: TimeLeft
) -> Iterator[Trial]:
    """Yield the plans one decision away from the best that are as fast, as long as there is time."""
    problem = scenario.problem
    if cuts_operators(problem, best.plan):  # no layout means it
        return
    layout = recover_layout(problem, best.plan)
    if complete(problem, layout) != best.plan:  # stages were divided by a search of their own
        return
    near = (other for other in neighbours(problem, scenario.make_space(), layout) if is_simulated_soon(problem, other))
    plans = (complete(problem, other) for other in near)
    bounds = {plan: costs.plan_bound(plan) for plan in takewhile(lambda plan: time_left() > 0, plans)}
    promising = sorted((plan for plan in bounds if bounds[plan] <= limit), key=bounds.__getitem__)
    for plan in islice((plan for plan in promising if costs.fits(plan)), MAX_NEIGHBOURS):
        if time_left() <= 0:
            return
        if costs.longest_paths([plan])[0] <= limit:
            evaluation = costs.evaluate(plan)
            if evaluation.fits and evaluation.step_time <= limit:
                yield Trial(plan, evaluation, 0.0)


def _rank(plan: Plan, forecast: MemoryForecast, best_memory: float) -> tuple[int, int, int]:
    """Return a key by which plans that are as fast are sorted: risk, memory, axes; small differences are none."""
    risk, memory = round(forecast.out_of_memory / RISK_STEP), round(forecast.device / (MEMORY_STEP * best_memory))
    return risk, memory, _count_axes(plan)


def _count_axes(plan: Plan) -> int:
    """Return along how many axes a plan is parallel."""
    return sum(plan.mesh.size(axis) > 1 for axis in AXES)
