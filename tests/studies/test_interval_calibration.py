import json
import random
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.intervals import Category, find_half_width
from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.runs import build_run

from ..scenarios.published.test_accuracy import ROW as BARE_ROW
from .interval_calibration import (
    Residual,
    find_half_widths,
    fit_figures,
    group_coverage,
    leave_groups_out,
    leave_out,
    main,
    measure_coverage,
    network_of,
    source_of,
)

ROW = BARE_ROW | {"framework": "Megatron-LM"}
"""A row whose framework is known."""

RUNS = Path(__file__).parents[1] / "scenarios/published/fixtures/published_runs.jsonl"


SIZES = st.lists(st.floats(0, 10), min_size=1, max_size=30)


def of(group: str, sizes: list[float], category: str = "all") -> list[Residual]:
    return [Residual(size, category, group) for size in sizes]


@given(SIZES, st.floats(0.05, 1.0))
def test_the_half_width_holds_what_it_says_and_no_smaller_one_does(sizes: list[float], coverage: float) -> None:
    width = find_half_widths(of("a", sizes), coverage)["all"]
    assert width in sizes
    assert fmean(size <= width for size in sizes) >= coverage - 1e-9
    assert fmean(size < width for size in sizes) < coverage


def test_weights_of_two_groups_by_hand() -> None:
    errors = of("few", [0.4]) + of("many", [0.1, 0.2, 0.3, 0.5])
    # by size: 0.1 (1/8), 0.2 (2/8), 0.3 (3/8), 0.4 (3/8 + 1/2 = 7/8), 0.5 (1)
    assert [find_half_widths(errors, share)["all"] for share in (0.25, 0.375, 0.4, 0.875, 0.9)] == [
        0.2,
        0.3,
        0.4,
        0.4,
        0.5,
    ]


@given(SIZES, SIZES, st.integers(2, 5))
def test_a_group_counts_the_same_however_many_runs_it_has(a: list[float], b: list[float], times: int) -> None:
    assert find_half_widths(of("a", a * times) + of("b", b), 0.9) == find_half_widths(of("a", a) + of("b", b), 0.9)


def test_categories_are_apart_and_an_unknown_one_is_the_widest() -> None:
    widths = find_half_widths(of("a", [0.1], "near") + of("a", [0.7], "far"), 0.9)
    assert widths == {"near": 0.1, "far": 0.7}
    assert find_half_width(widths, "near") == 0.1
    assert find_half_width(widths, "nowhere") == 0.7


@given(SIZES, SIZES, st.floats(1, 100))
def test_errors_that_are_left_out_do_not_change_their_own_interval(a: list[float], b: list[float], by: float) -> None:
    groups = ["a"] * len(a) + ["b"] * len(b)
    own = dict(leave_groups_out(groups, of("a", a) + of("b", b), 0.9))
    worse = dict(leave_groups_out(groups, of("a", [by * size for size in a]) + of("b", b), 0.9))
    assert own.keys() == worse.keys() == set(range(len(groups)))
    assert all(own[place] == worse[place] for place in range(len(a)))


def test_groups_of_one_kind_are_held_as_often_as_promised() -> None:
    """Groups differ in scale by up to 3; of 40, at least 0.9 * 39 / 40 = 0.88 of the runs of a left out one is held."""
    source = random.Random(0)
    errors = []
    for group in range(40):
        scale = source.uniform(0.05, 0.15)
        errors += of(str(group), [abs(source.gauss(0, scale)) for _ in range(source.choice((3, 30, 60)))])
    held = [
        errors[place].size <= width for place, width in leave_groups_out([each.group for each in errors], errors, 0.9)
    ]
    assert 0.85 < fmean(held) < 0.95


def test_one_group_alone_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="needs two, met a alone"):
        list(leave_groups_out(["a", "a"], of("a", [0.1, 0.2]), 0.9))


def predictions(**measured_over_predicted: list[float]) -> list[Prediction]:
    """Return runs of sources by what was measured over what was predicted, with peaks as predicted."""
    run = build_run(ROW)
    return [
        Prediction(
            replace(run, source=source, step_time=ratio, peak_memory=1.0, reserved_memory=1.05), 1.0, 1.0, fits=True
        )
        for source, ratios in measured_over_predicted.items()
        for ratio in ratios
    ]


def test_figures_by_hand() -> None:
    found = fit_figures(predictions(a=[0.5, 1.0], b=[1.25]), "today")
    # by size of the logarithm: 1 (1/4), 1.25 (3/4), 0.5 (1): the ninth tenth is reached by the last
    assert found["step_time"] == {
        "plan stated": {"half_width": round(log(2), 4), "rows": 3, "sources": {"a": 2, "b": 1}}
    }
    assert found["peak_memory"] == {"half_width": 0.0, "rows": 3, "sources": {"a": 2, "b": 1}}
    assert found["reserved_over_allocated"]["largest"] == 1.05
    assert (found["date"], found["coverage"]) == ("today", 0.9)


def test_sources_left_out_by_hand() -> None:
    held = leave_out(predictions(a=[1.5, 1.1], b=[1.2]), source_of)
    # a is judged by b's 1.2: one of two inside; b by a's 1.5
    assert [(each.source, each.inside, round(each.factor, 9)) for each in held] == [
        ("a", False, 1.2),
        ("a", True, 1.2),
        ("b", True, 1.5),
    ]
    assert measure_coverage(held) == (3, 2 / 3, pytest.approx(1.2))
    assert group_coverage(held, "source")["a"] == (2, 0.5, pytest.approx(1.2))
    assert set(group_coverage(held, "category")) == {Category.STATED}


def test_a_network_is_known_by_its_sizes() -> None:
    run = build_run(ROW)
    same, other = build_run(ROW | {"model": "renamed", "dp": 8, "tp": 1}), build_run(ROW | {"n_layers": 6})
    first, second, third = (network_of(Prediction(each, 1.0)) for each in (run, same, other))
    assert first == second != third


@pytest.mark.parametrize("apart", [{"peak_memory": None}, {"reserved_memory": None}, {"step_time": None}])
def test_without_measurements_there_are_no_figures(apart: dict[str, None]) -> None:
    rows = [replace(row, run=replace(row.run, **apart)) for row in predictions(a=[1.0])]
    with pytest.raises(ValueError, match="measured step times, peaks and reserved memory, met"):
        fit_figures(rows, "today")


def test_figures_are_written_from_rows(tmp_path: Path, capsys) -> None:
    rows = RUNS.read_text("utf-8").splitlines()
    few = [row for row in rows if '"simumax_b200"' in row or '"vtrain_single"' in row]
    (tmp_path / "rows.jsonl").write_text("\n".join(few))
    assert main([str(tmp_path / "rows.jsonl"), str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert set(found["step_time"]["plan stated"]["sources"]) == {"Moore Threads", "VIA Research"}
    assert "all, each source left out" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"], ["missing.jsonl"]])
def test_bad_arguments_are_one_message(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("missing.jsonl: " if "missing.jsonl" in arguments else "usage: ")
