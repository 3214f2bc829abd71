"""A machine fitted to a few measured steps of any plans: its factors, and what they are worth.

The machine of the runs is built as their rows describe it, from the catalogue. Its factors are fitted
(`meshwise.scenarios.machine_fit.posterior`), shares of the steps are measured again with these factors, and so on, for
other tasks may be the longest chain there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from meshwise.scenarios.machine_fit.factored_machine import apply_factors
from meshwise.scenarios.machine_fit.posterior import Posterior, Prior, fit_posterior
from meshwise.scenarios.machine_fit.shares import PARTS, MeasuredStep, build_table, measure_shares, predict_time
from meshwise.scenarios.published.runs import Run
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.factors import FACTORS, Factors, RunCalibration
from meshwise.simulator.units import format_count

MAX_RUNS = 100
"""Most runs of one fit, which simulates each of them some thirty times."""

ROUNDS = 3
"""Fits, each with the shares of steps at the factors of the one before."""

SHIFT = 0.1
"""Part of a step by which plans may differ from the measured ones that the interval is for, in any one direction."""

NO_FACTORS = Factors()


class SkippedRun(NamedTuple):
    """A run that tells nothing, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A run with its predictions, in seconds: on the machine of the catalogue, and on the fitted one.

    ``weight`` is below 1 where the run is an outlier.
    """

    name: str
    measured: float
    before: float
    after: float
    weight: float

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class RunFit:
    """A machine fitted to runs.

    Parameters
    ----------
    cluster
        The machine with its factors, and the record of the fit.
    runs, skipped
        The runs that it was fitted to, and those that it was not.
    used_runs
        The runs that it was fitted to, as they were read.
    """

    cluster: Cluster
    prior: Prior
    posterior: Posterior
    runs: tuple[FittedRun, ...]
    skipped: tuple[SkippedRun, ...]
    used_runs: tuple[Run, ...]

    __repr__ = brief_repr("cluster", "posterior")


def measure_step(run: Run, factors: Factors = NO_FACTORS) -> MeasuredStep:
    """Return the measured step of a run with its shares on a machine with factors.

    Raises
    ------
    ValueError
        Where the run has no step time or no scenario, or its plan cannot be simulated.
    """
    reason = find_skip_reason(run)
    if reason is not None or run.scenario is None or run.step_time is None:
        raise ValueError(f"{run.row_id}: {reason}")
    problem, plan = run.scenario.problem, run.scenario.choose_plan()
    predicted, shares = measure_shares(problem, plan, factors)
    return MeasuredStep(
        run.row_id, (problem, plan), run.step_time, predicted, shares, tuple(factors.logarithms.tolist())
    )


def find_skip_reason(run: Run) -> str | None:
    """Return why a run tells nothing about its machine; ``None`` where it does."""
    if run.scenario is None:
        return run.skipped or "it has no scenario"
    if run.status == "oom":
        return "it ran out of memory"
    return None if run.step_time else "no step time was measured"


def fit_runs(
    runs: Sequence[Run],
    prior: Prior,
    date: str,
    progress: Callable[[str], None] = lambda text: None,
) -> RunFit:
    """Return the machine of ``runs``, in any order, with factors fitted to their step times.

    Parameters
    ----------
    date
        Day of the fit, as ``2026-11-28``.

    Raises
    ------
    ValueError
        Where no run has a measured step that can be predicted, or there are more than `MAX_RUNS`.
    """
    if len(runs) > MAX_RUNS:
        raise ValueError(f"a machine is fitted to at most {MAX_RUNS} runs, met {len(runs)}")
    skipped = [SkippedRun(run.row_id, reason) for run in runs if (reason := find_skip_reason(run)) is not None]
    used_runs: list[Run] = []
    first_steps: list[MeasuredStep] = []
    for run in (run for run in runs if find_skip_reason(run) is None):
        progress(f"simulating {run.row_id}")
        try:
            first_steps.append(measure_step(run))
            used_runs.append(run)
        except ValueError as error:
            skipped.append(SkippedRun(run.row_id, str(error)))
    if not used_runs:
        reasons = "; ".join(f"{run.name}: {run.reason}" for run in skipped[:3])
        raise ValueError(f"a machine is fitted to at least one measured step, met none in {len(runs)} runs: {reasons}")
    steps, posterior = first_steps, fit_posterior(first_steps, prior)
    for number in range(2, ROUNDS + 1):
        progress(f"fit {number} of {ROUNDS}")
        steps = [measure_step(run, posterior.factors) for run in used_runs]
        posterior = fit_posterior(steps, prior)
    weights = dict(posterior.weights)
    after = [predict_run(run, posterior.factors) for run in used_runs]
    fitted = tuple(
        FittedRun(step.name, step.measured, step.predicted, seconds, weights[step.plan])
        for step, seconds in zip(first_steps, after, strict=True)
    )
    cluster = apply_factors(find_machine(used_runs), posterior.factors)
    record = record_posterior(posterior, steps, date)
    return RunFit(replace(cluster, calibration=record), prior, posterior, fitted, tuple(skipped), tuple(used_runs))


def predict_run(run: Run, factors: Factors) -> float:
    """Return the predicted seconds of a step of a run on its machine with factors.

    Raises
    ------
    ValueError
        Where the run has no scenario.
    """
    if run.scenario is None:
        raise ValueError(f"{run.row_id}: {find_skip_reason(run)}")
    return predict_time(run.scenario.problem, run.scenario.choose_plan(), factors.logarithms)


def find_machine(runs: Sequence[Run]) -> Cluster:
    """Return the machine of most of the runs, which have scenarios: the largest that has the same accelerator."""
    clusters = [run.scenario.problem.cluster for run in runs if run.scenario is not None]
    counts = Counter(cluster.accelerator.name for cluster in clusters)
    name = min(counts, key=lambda name: (-counts[name], name))
    return max(
        (cluster for cluster in clusters if cluster.accelerator.name == name), key=lambda cluster: cluster.num_devices
    )


def find_spread(posterior: Posterior, steps: Sequence[MeasuredStep]) -> float:
    """Return the standard deviation of the logarithm of a predicted step from factors that are not known exactly.

    It is that of a plan in which any one part takes up to `SHIFT` more of the step than in the mean of ``steps``, of
    all parts the one that is known least: later predictions have other plans.
    """
    shares = build_table(steps).extrapolate(posterior.means)[1].mean(axis=0)
    shifted = (1.0 - SHIFT) * shares + SHIFT * np.eye(len(FACTORS))[: len(PARTS)]
    shifted[:, -1] = 1.0
    return sqrt(float(np.einsum("ij,jk,ik->i", shifted, posterior.covariance, shifted).max()))


def record_posterior(posterior: Posterior, steps: Sequence[MeasuredStep], date: str) -> RunCalibration:
    """Return the record of a posterior after ``steps`` for a cluster file."""
    factors = [getattr(posterior.factors, name) for name in FACTORS]
    return RunCalibration(
        date=date,
        runs=len(posterior.weights),
        residual=round(posterior.residual, 6),
        spread=round(find_spread(posterior, steps), 6),
        factors=tuple((name, round(value, 6)) for name, value in zip(FACTORS, factors, strict=True)),
        deviations=tuple(
            (name, round(float(value), 6)) for name, value in zip(FACTORS, posterior.deviations, strict=True)
        ),
    )


def move_run(run: Run, calibration: RunCalibration) -> Run:
    """Return a run on its own machine with the factors of a calibration, and with its intervals."""
    if run.scenario is None:
        return run
    problem = run.scenario.problem
    cluster = replace(apply_factors(problem.cluster, Factors(**dict(calibration.factors))), calibration=calibration)
    line = f"factors of the machine fitted to {format_count(calibration.runs, 'run')} ({calibration.date})"
    scenario = replace(
        run.scenario,
        problem=replace(problem, cluster=cluster),
        assumptions=(*run.scenario.assumptions, line),
    )
    return replace(run, scenario=scenario, assumed=(*run.assumed, line))
