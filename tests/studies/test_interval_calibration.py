import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from meshwise.scenarios.intervals import Category
from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.runs import build_run

from .interval_calibration import (
    fit_figures,
    group_coverage,
    leave_out,
    main,
    measure_coverage,
    network_of,
    source_of,
)
from .test_accuracy import ROW

RUNS = Path(__file__).parents[1] / "scenarios/published/fixtures/published_runs.jsonl"


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
    assert set(found["step_time"]["plan stated"]["sources"]) == {"simumax_b200", "vtrain_single"}
    assert "all, each source left out" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"], ["missing.jsonl"]])
def test_bad_arguments_are_one_message(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("missing.jsonl: " if "missing.jsonl" in arguments else "usage: ")
