"""``meshwise calibrate --runs``: a machine fitted to a few measured steps of any plans."""

import datetime
import json
import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from meshwise.scenarios.commands.accuracy import print_doubts
from meshwise.scenarios.console import Ticker, emit, note, print_table
from meshwise.scenarios.files.results import check_output
from meshwise.scenarios.inputs.cluster_document import build_cluster_document
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.machine_fit.measured_links import measure_links
from meshwise.scenarios.machine_fit.posterior import load_prior
from meshwise.scenarios.machine_fit.run_fit import RunFit, fit_runs
from meshwise.scenarios.machine_fit.suggestion import Suggestion, suggest_plans
from meshwise.scenarios.published.accuracy import load_runs
from meshwise.simulator.machine.factors import FACTORS
from meshwise.simulator.program import pause_collection
from meshwise.simulator.units import format_count

OUTLYING = 0.5
"""Weight below which a run is called an outlier: it is more than 2.7 residuals off."""

KNOWN = 0.7
"""Deviation over that of the prior below which the runs told something about a factor: half of its variance is gone."""


def calibrate_to_runs(path: str, collectives: str | None, suggest: int | None, out: str | None, as_json: bool) -> None:
    """Fit the machine of the runs in a file or folder, print what was learned, and write the machine.

    Links are first fitted to the file ``collectives``, where there is one.

    Raises
    ------
    ValueError
        Where the file is none of runs, or no run can be used.
    """
    check_output(out, (".yaml", ".yml"))
    runs, prior = load_runs(path), load_prior()
    if collectives is not None:
        runs, prior, summary = measure_links(runs, prior, collectives)
        note(f"links: {summary}")
    ticker = Ticker()
    try:
        with pause_collection():
            fit = fit_runs(runs, prior, datetime.date.today().isoformat(), ticker)
            ticker("looking for plans that would tell most")
            suggestions = suggest_plans(fit.used_runs, fit.posterior, suggest) if suggest else ()
    finally:
        ticker.clear()
    if out is not None:
        write_cluster(
            fit.cluster, out, f"Fitted by `meshwise calibrate --runs` to {format_count(len(fit.runs), 'run')}."
        )
    if as_json:
        emit(build_document(fit, suggestions))
        return
    _print_fit(fit)
    _print_suggestions(suggestions, suggest)
    if out is not None:
        print(f"{out} is written; predict with it: meshwise simulate SCENARIO --cluster {shlex.quote(out)}")


def build_document(fit: RunFit, suggestions: Sequence[Suggestion]) -> dict[str, Any]:
    """Return a fit and suggestions as JSON-ready data."""
    return {
        "runs": [
            {
                "name": run.name,
                "measured": run.measured,
                "before": run.before,
                "after": run.after,
                "weight": round(run.weight, 6),
            }
            for run in fit.runs
        ],
        "skipped": [skipped._asdict() for skipped in fit.skipped],
        "error_before": fmean(abs(run.before / run.measured - 1) for run in fit.runs),
        "error_after": fmean(abs(run.after / run.measured - 1) for run in fit.runs),
        "factors": {
            name: {"factor": factor, "deviation": deviation, "prior_factor": prior_factor, "prior_deviation": prior}
            for name, factor, deviation, prior_factor, prior in list_factors(fit)
        },
        "cluster": build_cluster_document(fit.cluster),
        "suggestions": [
            {"plan": suggestion.plan, "step_time": suggestion.step_time, "width": suggestion.width}
            for suggestion in suggestions
        ],
    }


def list_factors(fit: RunFit) -> list[tuple[str, float, float, float, float]]:
    """Return name, factor, deviation of its logarithm, and factor and deviation of the prior, of every factor."""
    prior_factors = fit.prior.factors
    return [
        (name, getattr(fit.posterior.factors, name), float(deviation), getattr(prior_factors, name), prior_deviation)
        for name, deviation, prior_deviation in zip(
            FACTORS, fit.posterior.deviations, fit.prior.deviations, strict=True
        )
    ]


def _print_fit(fit: RunFit) -> None:
    rows = [
        (
            run.name,
            f"{run.measured:.4g}",
            f"{run.before:.4g}",
            f"{run.before / run.measured - 1:+.1%}",
            f"{run.after:.4g}",
            f"{run.after / run.measured - 1:+.1%}" + (" outlier" if run.weight < OUTLYING else ""),
        )
        for run in fit.runs
    ]
    print_table(("run", "measured s", "before s", "error", "after s", "error"), rows)
    print()
    factors = [
        (
            name,
            f"{factor:.3f}",
            f"{deviation:.1%}",
            f"{prior_factor:.3f}",
            f"{prior_deviation:.1%}",
            "told by the runs" if deviation < KNOWN * prior_deviation else "hardly told",
        )
        for name, factor, deviation, prior_factor, prior_deviation in list_factors(fit)
    ]
    print_table(("factor on times", "fitted", "sure to", "other machines", "within", ""), factors)
    print()
    document = build_document(fit, ())
    print(f"mean error of these runs: {document['error_before']:.1%} before, {document['error_after']:.1%} after")
    calibration = fit.cluster.calibration
    if calibration is not None:
        print(f"90 % of later steps lie within {calibration.find_half_width(0.9):.1%} of their predictions")
    machines = sorted({run.scenario.problem.cluster.accelerator.name for run in fit.used_runs if run.scenario})
    if len(machines) > 1:
        name = fit.cluster.accelerator.name
        note(f"runs of {len(machines)} accelerators, {', '.join(machines)}: the machine is that of {name}")
    for skipped in fit.skipped:
        note(f"skipped {skipped.name}: {skipped.reason}")
    print_doubts(fit.used_runs)


def _print_suggestions(suggestions: Sequence[Suggestion], count: int | None) -> None:
    if not count:
        return
    if not suggestions:
        note("no plan near the runs is legal and fits: none is suggested")
        return
    print("\nmeasure next, for plans like these; each line with those above it:")
    for suggestion in suggestions:
        words = json.dumps(suggestion.plan).replace('"', "")
        print(f"plan: {words}  # {suggestion.step_time:.3g} s; intervals {1 - suggestion.width:.0%} narrower")
