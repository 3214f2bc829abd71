"""The closed loop: search, run the best plans, fit the machine's figures to the runs, and predict the plans again."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.scenarios.calibration.recalibration import PlanRun, Refit, predict_step, refit_cluster
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.driver import SearchResult

if TYPE_CHECKING:
    from meshwise.executor.launch.run import Run
    from meshwise.executor.options import RunOptions
    from meshwise.scenarios.scenario import Scenario

EXTRA_EVALUATIONS = 500
"""Evaluation budget of the exhaustive search that follows where the search itself evaluated too few plans: a search
that proves its best plan needs to evaluate no second one."""

NoteCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoopedPlan:
    """A plan that ran, with four step times in seconds: one measured, the others predicted.

    ``time_before`` is that before any figure was fitted, ``time_after`` that with figures fitted to all other runs,
    ``None`` where there is no other run, and ``fitted_time`` that with figures fitted to all runs.
    """

    plan: Plan
    time_before: float
    measured_time: float
    time_after: float | None
    fitted_time: float

    def to_json(self) -> dict[str, Any]:
        """Return the plan and its step times as JSON-ready data; errors are predicted over measured time, minus 1."""
        return {
            "plan": self.plan.describe(),
            "predicted_step_time": self.time_before,
            "step_time": self.measured_time,
            "predicted_after": self.time_after,
            "fitted_step_time": self.fitted_time,
            "error_before": self.time_before / self.measured_time - 1,
            "error_after": self.time_after / self.measured_time - 1 if self.time_after is not None else None,
        }


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The result of a loop: the plans that ran, the fitted machine, and the best plan of a search on it.

    ``interrupted`` says that the user ended the loop: then it covers the plans that ran until then, and there is no
    ``best_plan``.
    """

    rows: tuple[LoopedPlan, ...]
    refit: Refit
    best_plan: Plan | None
    interrupted: bool

    __repr__ = brief_repr()

    @property
    def fastest_plan(self) -> Plan:
        """The plan that ran fastest."""
        return min(self.rows, key=lambda row: row.measured_time).plan

    def to_json(self) -> dict[str, Any]:
        """Return the loop as JSON-ready data, without the fitted cluster."""
        pairs_before = [(row.time_before, row.measured_time) for row in self.rows]
        pairs_after = [(row.time_after, row.measured_time) for row in self.rows if row.time_after is not None]
        return {
            "plans": [row.to_json() for row in self.rows],
            "mean_error_before": _find_mean_error(pairs_before),
            "mean_error_after": _find_mean_error(pairs_after) if pairs_after else None,
            "tau_before": kendall_tau(pairs_before),
            "tau_after": kendall_tau(pairs_after),
            "device": dict(self.refit.device),
            "collectives": dict(self.refit.collectives),
            "fastest": self.fastest_plan.describe(),
            "best": self.best_plan.describe() if self.best_plan is not None else None,
            "interrupted": self.interrupted,
        }


def _find_mean_error(pairs: list[tuple[float, float]]) -> float:
    """Return the mean size of the relative errors of pairs of a predicted and a measured time."""
    return sum(abs(predicted / measured - 1) for predicted, measured in pairs) / len(pairs)


def list_executable(scenario: "Scenario", result: SearchResult, max_plans: int) -> list[Plan]:
    """Return the ``max_plans`` fastest plans of a search result that fit and that this machine can run."""
    plans = []
    fitting_trials = (trial for trial in result.trials if trial.evaluation.fits)
    for trial in sorted(fitting_trials, key=lambda trial: trial.evaluation.step_time):
        with suppress(ValueError):
            scenario.check_executable(trial.plan)
            plans.append(trial.plan)
    return plans[:max_plans]


def find_best_plans(scenario: "Scenario", max_plans: int, note: NoteCallback) -> list[Plan]:
    """Return the fastest plans that this machine can run, of the scenario's search, else of an exhaustive search.

    Raises
    ------
    ValueError
        Where no plan that fits can be run.
    """
    result = scenario.search_plan()
    plans = list_executable(scenario, result, max_plans)
    if len(plans) < max_plans:
        evaluated_text = f"{result.algorithm} evaluated {len(result.trials)} plans"
        note(f"{evaluated_text}; looking at the others for {max_plans} that can run")
        candidates = list_executable(scenario, scenario.search_plan("exhaustive", budget=EXTRA_EVALUATIONS), max_plans)
        plans = sorted({*plans, *candidates}, key=lambda plan: scenario.simulate(plan).step_time)[:max_plans]
    if not plans:
        raise ValueError(f"{scenario.file}: no plan that fits can be run by the executor")
    return plans


def close_loop(
    scenario: "Scenario",
    max_plans: int,
    options: "RunOptions",
    *,
    folder: Path | None,
    note: NoteCallback,
    progress: Callable[[int, float, float], None] | None = None,
    on_finished: "Callable[[int, Plan, Run], None] | None" = None,
) -> ClosedLoop:
    """Run the best ``max_plans`` plans of a scenario and fit its machine to these runs.

    After an interrupt no further plan runs, and the machine is fitted to the runs that were complete.

    The runs leave their files in ``folder``, one folder a plan, by default in a temporary one. ``note`` is called with
    a line about what happens next, ``on_finished`` after each run with its number, plan and result.

    Raises
    ------
    ValueError
        Where no plan can be run.
    KeyboardInterrupt
        Where the user interrupts before the first run is complete.
    """
    plans = find_best_plans(scenario, max_plans, note)
    plan_runs: list[PlanRun] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="meshwise-") as temporary:
        base_folder = Path(temporary) if folder is None else folder
        try:
            for number, plan in enumerate(plans, 1):
                note(f"plan {number} of {len(plans)}: {plan.describe()}")
                run_folder = base_folder / f"plan-{number}"
                run = scenario.execute(plan, options, folder=run_folder, progress=progress)
                plan_runs.append(PlanRun(plan, run.timeline, run.step_time))
                if on_finished is not None:
                    on_finished(number, plan, run)
        except KeyboardInterrupt:
            interrupted = True
            if not plan_runs:
                raise
    return _fit_runs(scenario, plan_runs, interrupted, note)


def _fit_runs(scenario: "Scenario", runs: Sequence[PlanRun], interrupted: bool, note: NoteCallback) -> ClosedLoop:
    problem = scenario.problem
    note(f"fitting the machine to {len(runs)} runs")
    refit = refit_cluster(problem, runs)
    rows = []
    for run in runs:
        # fitted without the run itself: else the error after the fit would be one of fitting, not of prediction
        other_runs = [other_run for other_run in runs if other_run is not run]
        time_after = predict_step(problem, refit_cluster(problem, other_runs).cluster, run.plan) if other_runs else None
        time_before, fitted_time = (
            predict_step(problem, machine, run.plan) for machine in (problem.cluster, refit.cluster)
        )
        rows.append(LoopedPlan(run.plan, time_before, run.step_time, time_after, fitted_time))
    best_plan = None
    if not interrupted:
        note("searching again on the fitted machine")
        best_plan = next(iter(find_best_plans(scenario.on(refit.cluster), 1, note)), None)
    return ClosedLoop(tuple(rows), refit, best_plan, interrupted)
