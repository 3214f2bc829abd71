"""Pairs by hand: one switch, the slower run over the faster one."""

from dataclasses import replace

import pytest

from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.runs import build_run

from ..scenarios.published.test_accuracy import ROW
from .pairs import list_lines, list_pairs, main


def measure(row: dict, measured: float, predicted: float) -> Prediction:
    return Prediction(replace(build_run(row), step_time=measured, tier="A"), predicted)


def test_runs_that_differ_in_one_switch_make_a_pair() -> None:
    base = ROW | {"norm_kernel": "fused", "compiled": True}
    rows = [
        base,
        base | {"norm_kernel": "eager"},
        base | {"norm_kernel": "eager", "compiled": False},  # a pair with the second alone
        base | {"norm_kernel": "eager", "micro_batch": 2},  # 1 % slower than the second: no pair
    ]
    times = [(1.0, 1.0), (1.25, 1.0), (1.5, 1.8), (1.2625, 9.0)]
    predictions = [measure(row, *pair) for row, pair in zip(rows, times, strict=True)]
    norm, compiled = sorted(list_pairs(rows, predictions), reverse=True)
    assert (norm.field, norm.measured, norm.predicted) == ("norm_kernel", 1.25, 1.0)
    assert norm.error == pytest.approx(-0.2)
    assert compiled.field == "compiled" and compiled.error == pytest.approx(0.5)  # 1.8 for 1.2
    # every switch of a source counts once: (20 + 50) / 2 %
    assert list(list_lines([norm, norm, compiled]))[-1][-1] == "35.0 %"


def test_a_file_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["missing.jsonl"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
