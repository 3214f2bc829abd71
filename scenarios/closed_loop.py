"""The closed loop: search, run the best plans, fit the machine's figures to the runs, and predict the plans again."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.scenarios.calibration.recalibration import PlanRun, Refit, predicted_step, refitted
from meshwise.simulator.brief import brief
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search import SearchResult

if TYPE_CHECKING:
    from meshwise.executor.launch.run import Run
    from meshwise.executor.options import RunOptions
    from meshwise.scenarios.scenario import Scenario

TOP_UP = 500
"""Evaluation budget of the exhaustive search that follows where the search itself evaluated too few plans: a search
that proves its best plan needs to evaluate no second one."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Looped:
    """A plan that ran, with four step times in seconds.

    Parameters
    ----------
    time_before
        Predicted before any figure was fitted.
    measured_time
        Measured.
    time_after
        Predicted with figures fitted to all other runs, not to this one; ``None`` where there is no other run.
    fitted_time
        Predicted with figures fitted to all runs, this one included.
    """

    plan: Plan
    before: float
    measured: float
    after: float | None
    fitted: float

    def to_json(self) -> dict[str, Any]:
        """Return the plan and its step times as JSON-ready data; errors are predicted over measured time, minus 1."""
        return {
            "plan": self.plan.describe(),
            "predicted_step_time": self.before,
            "step_time": self.measured,
            "predicted_after": self.after,
            "fitted_step_time": self.fitted,
            "error_before": self.before / self.measured - 1,
            "error_after": self.after / self.measured - 1 if self.after is not None else None,
        }


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The result of a loop: the plans that ran, the fitted machine, and the best plan of a search on it.

    ``interrupted`` says that the user ended the loop: then it covers the plans that ran until then, and there is no
    ``best_plan``.
    """

    rows: tuple[Looped, ...]
    refit: "Refit"
    best: Plan | None
    interrupted: bool

    __repr__ = brief()

    @property
    def fastest(self) -> Plan:
        """The plan that ran fastest."""
        return min(self.rows, key=lambda row: row.measured).plan

    def to_json(self) -> dict[str, Any]:
        """Return the loop as JSON-ready data, without the fitted cluster."""
        before = [abs(row.before / row.measured - 1) for row in self.rows]
        after = [abs(row.after / row.measured - 1) for row in self.rows if row.after is not None]
        return {
            "plans": [row.to_json() for row in self.rows],
            "mean_error_before": sum(before) / len(before),
            "mean_error_after": sum(after) / len(after) if after else None,
            "tau_before": kendall_tau([(row.before, row.measured) for row in self.rows]),
            "tau_after": kendall_tau([(row.after, row.measured) for row in self.rows if row.after is not None]),
            "device": dict(self.refit.device),
            "collectives": dict(self.refit.collectives),
            "fastest": self.fastest.describe(),
            "best": self.best.describe() if self.best is not None else None,
            "interrupted": self.interrupted,
        }


def executable(scenario: "Scenario", found: SearchResult, most: int) -> list[Plan]:
    """Return the ``max_plans`` fastest plans of a search result that fit and that this machine can run."""
    plans = []
    for trial in sorted((t for t in found.trials if t.evaluation.fits), key=lambda t: t.evaluation.step_time):
        try:
            scenario.check_executable(trial.plan)
        except ValueError:
            continue
        plans.append(trial.plan)
    return plans[:most]


def best_plans(scenario: "Scenario", most: int, note: Note) -> list[Plan]:
    """Return the fastest plans that this machine can run, of the scenario's search, else of an exhaustive search.

    Raises
    ------
    ValueError
        Where no plan that fits can be run.
    """
    found = scenario.search()
    plans = executable(scenario, found, most)
    if len(plans) < most:
        note(f"{found.algorithm} evaluated {len(found.trials)} plans; looking at the others for {most} that can run")
        every = executable(scenario, scenario.search("exhaustive", budget=TOP_UP), most)
        plans = sorted({*plans, *every}, key=lambda plan: scenario.simulate(plan).step_time)[:most]
    if not plans:
        raise ValueError(f"{scenario.file}: no plan that fits can be run by the executor")
    return plans


def close_loop(
    scenario: "Scenario",
    most: int,
    options: "RunOptions",
    *,
    folder: Path | None,
    note: Note,
    progress: Callable[[int, float, float], None] | None = None,
    finished: "Callable[[int, Plan, Run], None] | None" = None,
) -> ClosedLoop:
    """Run the best ``max_plans`` plans of a scenario and fit its machine to these runs.

    After an interrupt no further plan runs, and the machine is fitted to the runs that were complete.

    Parameters
    ----------
    folder
        Where the runs leave their files, one folder a plan; a temporary folder by default.
    note
        Called with a line about what happens next.
    on_finished
        Called after each run with its number, plan and result.

    Raises
    ------
    ValueError
        Where no plan can be run.
    KeyboardInterrupt
        Where the user interrupts before the first run is complete.
    """
    plans = best_plans(scenario, most, note)
    done: list[PlanRun] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="meshwise-") as temporary:
        base = Path(temporary) if folder is None else folder
        try:
            for number, plan in enumerate(plans, 1):
                note(f"plan {number} of {len(plans)}: {plan.describe()}")
                where = base / f"plan-{number}"
                run = scenario.execute(plan, options, folder=where, progress=progress)
                done.append(PlanRun(plan, run.timeline, run.step_time))
                if finished is not None:
                    finished(number, plan, run)
        except KeyboardInterrupt:
            interrupted = True
            if not done:
                raise
    return _fitted(scenario, done, interrupted, note)


def _fitted(scenario: "Scenario", runs: Sequence[PlanRun], interrupted: bool, note: Note) -> ClosedLoop:
    problem = scenario.problem
    note(f"fitting the machine to {len(runs)} runs")
    refit = refitted(problem, runs)
    rows = []
    for run in runs:
        # fitted without the run itself: else the error after the fit would be one of fitting, not of prediction
        others = [other for other in runs if other is not run]
        after = predicted_step(problem, refitted(problem, others).cluster, run.plan) if others else None
        before, fitted = (predicted_step(problem, each, run.plan) for each in (problem.cluster, refit.cluster))
        rows.append(Looped(run.plan, before, run.step_time, after, fitted))
    best = None
    if not interrupted:
        note("searching again on the fitted machine")
        best = next(iter(best_plans(scenario.on(refit.cluster), 1, note)), None)
    return ClosedLoop(tuple(rows), refit, best, interrupted)
