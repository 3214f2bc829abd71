"""Trials are of different plans that can run, and say what they found."""

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tiny_jobs import SEQUENCE, TINY, cluster

from meshwise.executor.supported import find_unsupported
from meshwise.simulator.models.model import build
from meshwise.strategies.plan.problem import Problem, Training

from . import prediction_trials
from .prediction_trials import (
    Trial,
    list_layouts,
    list_plans,
    main,
    read_trials,
    summarize_trials,
    trial,
)

TRAINING = Training(16, SEQUENCE, "fp32", framework="torch")


def problem(ranks: int) -> Problem:
    return Problem(build(TINY, SEQUENCE, "fp32"), cluster(ranks), TRAINING)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_there_are_24_different_plans_that_the_executor_runs(ranks: int) -> None:
    found = list_plans(problem(ranks), ranks, 24, TINY)
    assert len(set(found)) == len(found) == 24
    assert not any(find_unsupported(TINY, TRAINING, plan) for plan in found)
    assert {plan.mesh.num_ranks for plan in found} == {ranks}
    assert len({plan.describe() for plan in found}) == 24  # else rows of a table look the same


def test_the_first_plans_are_of_every_split() -> None:
    splits = [(each.data, each.tensor, each.pipeline) for each in list_layouts(4, 16)[:6]]
    assert sorted(splits) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


def row(plan: str, predicted: float, measured: float, peak: float = 1.0) -> Trial:
    return Trial(
        2, plan, predicted, measured, peak, 1.0, 1.0, {"forward": predicted}, {"forward": measured}, 0.0, 1.0, 1.0
    )


def test_a_summary_has_median_and_worst_error_and_the_order() -> None:
    # errors of time -10 %, 0, +50 %; of memory 0, 0, +4 %; two of three pairs are in order
    found = summarize_trials([row("a", 0.9, 1.0), row("b", 2.0, 2.0), row("c", 2.7, 1.8, 1.04)])
    assert found[:5] == [
        "3 plans of 2 ranks",
        "step time: median error 10.0%, worst 50.0% (c)",
        "peak memory, tracker: median error 0.0%, worst 4.0% (c)",
        "peak memory, allocator: median error 0.0%, worst 4.0% (c)",
        "order of plans by step time: Kendall's tau 0.33",
    ]
    assert found[5] == "forward: predicted 1.17 of what was measured"  # 5.6 of 4.8


def test_an_interrupt_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = iter([row("a", 0.9, 1.0), row("b", 2.0, 2.0)])

    def interrupted(*_: object) -> Trial:
        try:
            return next(trials)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(prediction_trials, "calibrate", lambda **_: cluster(2))
    monkeypatch.setattr(prediction_trials, "drift", lambda _: 1.0)
    monkeypatch.setattr(prediction_trials, "trial", interrupted)
    out = tmp_path / "rows.jsonl"
    assert main(["--out", str(out)]) == 130
    assert [each.plan for each in read_trials(out)] == ["a", "b"]
    assert "2 plans of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--plans", "0"], ["--seconds", "0"]])
def test_bad_input_says_what_holds(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", "rows.jsonl"])
    assert "at least 1" in capsys.readouterr().err


def test_one_trial_is_predicted_and_run(tmp_path: Path) -> None:
    plan = list_plans(problem(2), 2, 3, TINY)[2]  # data parallel
    found = trial(problem(2), plan, 2, tmp_path, spec=TINY)
    assert found.measured_step_time > 0 and found.predicted_step_time > 0
    assert found.predicted_peak_memory == pytest.approx(found.measured_peak_memory, rel=0.05)
    assert found.predicted_peak_memory == pytest.approx(found.tracked_peak_memory, rel=0.05)
    assert found.predicted_kinds.keys() == found.measured_kinds.keys()
