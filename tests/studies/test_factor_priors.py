"""Priors over publishers: what is fitted to machines with known factors."""

from math import exp

import numpy as np
import pytest

from meshwise.scenarios.machine_fit.posterior import load_prior
from meshwise.scenarios.machine_fit.shares import PARTS, MeasuredStep, build_table
from meshwise.simulator.machine.factors import FACTORS

from .factor_priors import FEWEST_RUNS, START, build_document, fit_priors, measure_steps, split_arguments


def draw_publisher(generator: np.random.Generator, factors: np.ndarray, count: int = 12) -> list[MeasuredStep]:
    """Return the steps of a publisher whose machine has factors with these logarithms, to within 3 %."""
    steps = []
    for number in range(count):
        shares = tuple(generator.dirichlet(np.ones(len(PARTS))).tolist())
        plain = MeasuredStep(str(number), number, 1.0, 1.0, shares)
        moved = float(build_table([plain]).extrapolate(factors)[0][0]) + generator.normal(0, 0.03)
        steps.append(MeasuredStep(str(number), number, exp(moved), 1.0, shares))
    return steps


def draw_publishers(mean: float, deviation: float, count: int) -> dict[str, list[MeasuredStep]]:
    """Return publishers whose machines differ in what slows the whole step, and in nothing else."""
    generator = np.random.default_rng(0)
    return {
        f"publisher {number}": draw_publisher(
            generator, np.array([0.0] * len(PARTS) + [generator.normal(mean, deviation)])
        )
        for number in range(count)
    }


def test_the_mean_over_publishers_is_found() -> None:
    """What slows all parts alike is the whole step's factor or that of each part: their sum is what steps tell."""
    prior = fit_priors(draw_publishers(0.2, 0.05, 20))
    shares = np.full(len(PARTS), 1 / len(PARTS))
    assert prior.means[-1] + shares @ prior.means[:-1] == pytest.approx(0.2, abs=0.04)
    assert prior.residual == pytest.approx(0.03, abs=0.015)


def test_publishers_that_differ_more_make_a_wider_prior() -> None:
    alike, different = (fit_priors(draw_publishers(0.0, deviation, 12)) for deviation in (0.02, 0.3))
    assert alike.deviations[-1] < different.deviations[-1]


def test_a_publisher_left_out_plays_no_part() -> None:
    publishers = draw_publishers(0.0, 0.05, 5)
    far = draw_publisher(np.random.default_rng(1), np.array([0.0] * len(PARTS) + [1.0]))
    assert fit_priors(publishers | {"far": far}, excluding={"far"}) == fit_priors(publishers)
    assert fit_priors(publishers | {"far": far}) != fit_priors(publishers)
    few = {"few": publishers["publisher 0"][: FEWEST_RUNS - 1]}
    assert fit_priors(publishers | few) == fit_priors(publishers)


def test_one_publisher_is_no_prior() -> None:
    with pytest.raises(ValueError, match="two publishers with 5 timed runs each, met 1"):
        fit_priors(draw_publishers(0.0, 0.1, 1))


def test_the_shipped_figures_are_a_document_of_the_study() -> None:
    document = build_document(draw_publishers(0.0, 0.1, 3), "2026-11-28")
    assert tuple(document["factors"]) == FACTORS and set(document["publishers"].values()) == {12}
    prior = load_prior()
    assert len(prior.means) == len(START.means)
    assert all(
        abs(mean) < 1 and 0.02 < deviation < 1 for mean, deviation in zip(prior.means, prior.deviations, strict=True)
    )


def test_runs_are_measured_once_and_grouped_by_publisher() -> None:
    from meshwise.scenarios.published.runs import build_run

    from ..scenarios.machine_fit.small_runs import ROW

    rows = [ROW, ROW | {"source_id": "simumax_b200"}, ROW | {"step_time_s": None}, ROW | {"status": "oom"}]
    steps = measure_steps([build_run(row) for row in rows])
    assert {name: len(found) for name, found in steps.items()} == {"ours": 1, "Moore Threads": 1}


def test_sources_are_left_out_by_name() -> None:
    assert split_arguments(["a.jsonl", "--without=x", "b.json", "--without=y"]) == (["a.jsonl", "b.json"], {"x", "y"})
