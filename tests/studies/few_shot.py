"""How much a few measured steps of a publisher help to predict its other steps.

Run ``python -m tests.studies.few_shot ROWS.jsonl [--without=SOURCE ...]`` for a table by publisher: the mean absolute
error before any run, and after 1, 3 and 5 runs drawn at random, of the runs that were not drawn. The prior of each
publisher is fitted without it. The predictions after a draw are those of
`meshwise.scenarios.machine_fit.shares`, without a further simulation.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from math import hypot
from random import Random
from statistics import NormalDist, fmean, median
from typing import NamedTuple

import numpy as np

from meshwise.scenarios.console import BAD_INPUT, Ticker, note, print_table
from meshwise.scenarios.machine_fit.posterior import Prior, fit_posterior, load_prior
from meshwise.scenarios.machine_fit.run_fit import find_spread
from meshwise.scenarios.machine_fit.shares import MeasuredStep, build_table
from meshwise.scenarios.published.accuracy import load_runs, select_split

from .factor_priors import StepsByPublisher, fit_priors, measure_steps, select_timed, split_arguments

COUNTS = (1, 3, 5)
"""Numbers of runs that are drawn."""

DRAWS = 20
SEED = 0
FEWEST_RUNS = 10
"""Fewest timed runs of a publisher that is judged."""

COVERAGE = 0.9


class ShotErrors(NamedTuple):
    """Errors of predictions after a number of runs, means over draws.

    Attributes
    ----------
    mape
        Mean absolute relative error.
    bias
        Mean relative error.
    inside
        Fraction of runs inside their 90 % intervals.
    half_width
        Half width of these intervals, in natural logarithms.
    """

    mape: float
    bias: float
    inside: float
    half_width: float


def few_shot_errors(
    rows: Sequence[MeasuredStep], count: int, draws: int = DRAWS, seed: int = SEED, prior: Prior | None = None
) -> ShotErrors:
    """Return the errors on the runs of a publisher that were not drawn, after ``count`` drawn ones; 0 for none.

    Raises
    ------
    ValueError
        Where no run is left.
    """
    if count >= len(rows):
        raise ValueError(f"{count} runs are drawn of more than that, met {len(rows)}")
    return _average(
        _judge_draw(rows, set(Random(seed * draws + number).sample(range(len(rows)), count)), prior or load_prior())
        for number in range(draws if count else 1)
    )


def _judge_draw(rows: Sequence[MeasuredStep], drawn: set[int], prior: Prior) -> ShotErrors:
    steps = [row for place, row in enumerate(rows) if place in drawn]
    posterior = fit_posterior(steps, prior)
    table = build_table([row for place, row in enumerate(rows) if place not in drawn])
    deviations = table.ratios - table.extrapolate(posterior.means)[0]
    errors = np.exp(-deviations) - 1.0
    spread = find_spread(posterior, steps or rows)
    half_width = NormalDist(sigma=hypot(posterior.residual, spread)).inv_cdf((1 + COVERAGE) / 2)
    inside = np.abs(deviations) <= half_width
    return ShotErrors(float(np.abs(errors).mean()), float(errors.mean()), float(inside.mean()), half_width)


def _average(judged: Iterable[ShotErrors]) -> ShotErrors:
    return ShotErrors(*map(fmean, zip(*judged, strict=True)))


HEAD = ("publisher", "runs", "catalogue", "prior", *(f"after {count}" for count in COUNTS), "inside", "half width")


def judge_publishers(steps_by_publisher: StepsByPublisher) -> dict[str, dict[int, ShotErrors]]:
    """Return for each publisher the errors after 0 and `COUNTS` runs, with a prior fitted without the publisher."""
    result = {}
    for publisher, steps in sorted(steps_by_publisher.items()):
        if len(steps) >= FEWEST_RUNS:
            prior = fit_priors(steps_by_publisher, excluding={publisher})
            result[publisher] = {count: few_shot_errors(steps, count, prior=prior) for count in (0, *COUNTS)}
    return result


def list_lines(steps_by_publisher: StepsByPublisher) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table under `HEAD`, with the medians last; intervals are those after the last count."""
    judged = judge_publishers(steps_by_publisher)
    plain = {
        name: fmean(abs(step.predicted / step.measured - 1) for step in steps_by_publisher[name]) for name in judged
    }
    for name, errors in judged.items():
        last = errors[COUNTS[-1]]
        cells = (f"{100 * error.mape:.1f} %" for error in errors.values())
        count = str(len(steps_by_publisher[name]))
        yield name, count, f"{100 * plain[name]:.1f} %", *cells, f"{last.inside:.0%}", f"{last.half_width:.3f}"
    medians = (median(errors[count].mape for errors in judged.values()) for count in (0, *COUNTS))
    cells = (f"{100 * value:.1f} %" for value in (median(plain.values()), *medians))
    yield "median", "", *cells, "", ""


def main(arguments: Sequence[str]) -> int:
    """Print the table for the runs of a file; return the exit code."""
    names, left_out = split_arguments(arguments)
    if len(names) != 1:
        note("usage: python -m tests.studies.few_shot ROWS.jsonl [--without=SOURCE ...]")
        return BAD_INPUT
    ticker = Ticker()
    try:
        runs = [run for run in select_split(load_runs(names[0]), judge=False) if run.source not in left_out]
        steps = measure_steps(select_timed(runs), lambda done, total: ticker(f"{done} of {total} runs"))
        ticker.clear()
        print_table(HEAD, list(list_lines(steps)))
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
