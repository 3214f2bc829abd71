"""Priors of the factors of machines, fitted to publishers: how far machines are from their data sheets.

Run ``python -m tests.studies.factor_priors ROWS.jsonl [OUT.json] [--without=SOURCE ...]`` for the figures;
``OUT.json`` gets those that `meshwise.scenarios.machine_fit.posterior` reads.

This is empirical Bayes [1]_. The factors of every publisher are fitted to its own runs; their means over publishers
and their scatter are the prior of the next one. Each is repeated with the prior that the other gave (the EM algorithm
[2]_). However many runs it has, a publisher counts as `EFFECTIVE_RUNS` of them, for runs of one publisher err alike. A
publisher far from all others in a factor counts less for it, as in the likelihood of Student's t [3]_.

References
----------
.. [1] Efron and Morris, "Data analysis using Stein's estimator and its generalizations", JASA 70, 1975.
.. [2] Dempster, Laird and Rubin, "Maximum likelihood from incomplete data via the EM algorithm", JRSS B 39(1), 1977.
.. [3] Lange, Little and Taylor, "Robust statistical modeling using the t distribution", JASA 84, 1989.
"""

import datetime
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any

import numpy as np

from meshwise.scenarios.console import BAD_INPUT, Ticker, note, print_table
from meshwise.scenarios.files.results import write
from meshwise.scenarios.machine_fit.posterior import Prior, fit_posterior
from meshwise.scenarios.machine_fit.run_fit import measure_step
from meshwise.scenarios.machine_fit.shares import MeasuredStep, build_table
from meshwise.scenarios.published.accuracy import load_runs, predict_all, select_split
from meshwise.scenarios.published.runs import Run
from meshwise.scenarios.published.vocabulary.publishers import find_publisher
from meshwise.simulator.machine.factors import FACTORS
from meshwise.simulator.program import pause_collection

from .interval_ends import is_timed

EFFECTIVE_RUNS = 10
"""Runs of a publisher that count: errors of runs that differ little in plan are nearly the same error."""

FEWEST_RUNS = 5
"""Fewest timed runs of a publisher that the priors use."""

START = Prior((0.0,) * len(FACTORS), (0.15,) * len(FACTORS), 0.08)
"""The prior of the first round: where no publisher tells anything of a factor, machines are taken to be within 15 % of
the catalogue."""

PSEUDO_PUBLISHERS = 2.0
"""Number of publishers that `START` counts as in every round: of a dozen, scatter alone would be a poor estimate."""
STUDENT = 4.0
"""Degrees of freedom of the t distribution of publishers."""
ROUNDS = 30
NORMAL_MEDIAN = 0.6745
"""Median size of a standard normal deviate: a robust scale is the median size of errors over it."""

StepsByPublisher = Mapping[str, Sequence[MeasuredStep]]


def measure_steps(
    runs: Sequence[Run], progress: Callable[[int, int], None] | None = None
) -> dict[str, list[MeasuredStep]]:
    """Return the measured steps by publisher, with their shares: eight simulations a run."""
    timed_runs = [run for run in runs if run.step_time and run.scenario is not None and run.status == "ok"]
    result: dict[str, list[MeasuredStep]] = defaultdict(list)
    with pause_collection():
        for number, run in enumerate(sorted(timed_runs, key=lambda run: (run.source, run.group)), start=1):
            try:
                step = measure_step(run)
            except ValueError:  # the accuracy of predictions lists what cannot be simulated
                continue
            finally:
                if progress is not None:
                    progress(number, len(timed_runs))
            result[find_publisher(run.source).name].append(step)
    return dict(result)


def select_timed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose step times are judged."""
    return [row.run for row in predict_all(runs) if is_timed(row)]


def fit_priors(steps_by_publisher: StepsByPublisher, excluding: Collection[str] = ()) -> Prior:
    """Return the prior of the factors of a machine, from all publishers but those of ``excluding``.

    Raises
    ------
    ValueError
        Where fewer than two publishers are left.
    """
    groups = [
        steps
        for publisher, steps in sorted(steps_by_publisher.items())
        if publisher not in excluding and len(steps) >= FEWEST_RUNS
    ]
    if len(groups) < 2:
        raise ValueError(f"a prior needs two publishers with {FEWEST_RUNS} timed runs each, met {len(groups)}")
    prior = START
    for _ in range(ROUNDS):
        prior = _fit_round(groups, prior)
    return prior


def _fit_round(groups: Sequence[Sequence[MeasuredStep]], prior: Prior) -> Prior:
    means, variances = np.array(prior.means), np.array(prior.deviations) ** 2
    locations, uncertainties, weights, residuals = [], [], [], []
    for steps in groups:
        # a wider residual, with which all runs tell as much as the effective number of them
        residual = prior.residual * sqrt(max(1.0, len(steps) / EFFECTIVE_RUNS))
        posterior = fit_posterior(steps, replace(prior, residual=residual))
        locations.append(posterior.means)
        uncertainties.append(np.diag(posterior.covariance))
        distances = ((posterior.means - means) ** 2 + np.diag(posterior.covariance)) / variances
        weights.append((STUDENT + 1) / (STUDENT + distances))
        table = build_table(steps)
        changes, slopes = table.extrapolate(posterior.means)
        # a fit comes nearer to runs than their residual: errors shrink by the root of 1 minus the run's leverage
        leverages = np.einsum("ij,jk,ik->i", slopes, posterior.covariance, slopes) / residual**2
        errors = (table.ratios - changes) / np.sqrt(np.clip(1.0 - leverages, 0.05, 1.0))
        residuals.append(float(np.median(np.abs(errors))) / NORMAL_MEDIAN)
    total = np.sum(weights, axis=0) + PSEUDO_PUBLISHERS
    new_means = np.sum(np.multiply(weights, locations), axis=0) / total  # pseudo-publishers are at 0
    scatter = np.multiply(weights, (np.array(locations) - new_means) ** 2 + uncertainties).sum(axis=0)
    new_variances = (scatter + PSEUDO_PUBLISHERS * (np.array(START.deviations) ** 2 + new_means**2)) / total
    return Prior(tuple(new_means.tolist()), tuple(np.sqrt(new_variances).tolist()), median(residuals))


def build_document(steps_by_publisher: StepsByPublisher, date: str) -> dict[str, Any]:
    """Return the figures of the prior, and the publishers that it was fitted to."""
    prior = fit_priors(steps_by_publisher)
    return {
        "date": date,
        "factors": {
            name: {"mean": round(mean, 4), "deviation": round(deviation, 4)}
            for name, mean, deviation in zip(FACTORS, prior.means, prior.deviations, strict=True)
        },
        "residual": round(prior.residual, 4),
        "publishers": {
            name: len(steps) for name, steps in sorted(steps_by_publisher.items()) if len(steps) >= FEWEST_RUNS
        },
    }


HEAD = ("factor", "mean", "deviation")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], set[str]]:
    """Return the names of files, and the sources of ``--without=SOURCE``, in the arguments of a command line."""
    option = "--without="
    sources = {name.removeprefix(option) for name in arguments if name.startswith(option)}
    return [name for name in arguments if not name.startswith(option)], sources


def main(arguments: Sequence[str]) -> int:
    """Print the prior fitted to the runs of a file, and write its figures to a second one; return the exit code."""
    names, left_out = split_arguments(arguments)
    if len(names) not in (1, 2):
        note("usage: python -m tests.studies.factor_priors ROWS.jsonl [OUT.json] [--without=SOURCE ...]")
        return BAD_INPUT
    ticker = Ticker()
    try:
        runs = [run for run in select_split(load_runs(names[0]), judge=False) if run.source not in left_out]
        steps = measure_steps(select_timed(runs), lambda done, total: ticker(f"{done} of {total} runs"))
        document = build_document(steps, datetime.date.today().isoformat())
        rows = [(name, *(f"{value:+.3f}" for value in pair.values())) for name, pair in document["factors"].items()]
        print_table(HEAD, rows)
        if len(names) == 2:
            write(names[1], json.dumps(document, indent=1) + "\n")
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    finally:
        ticker.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
