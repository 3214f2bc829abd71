"""Ranks that are killed at drawn moments: what `tests.studies.fault_trials` looks at, in few trials."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP

import pytest

pytest.importorskip("torch")

from .fault_trials import LIMIT, PHASES, Fault, Outcome, build_job, main, run_fault

pytestmark = pytest.mark.fresh_ranks


def test_killed_ranks_are_named_and_nothing_is_left(tmp_path: Path, capsys) -> None:
    out = tmp_path / "faults.json"
    assert main(["--trials", "2", "--ranks", "2", "--seed", "1", "--out", str(out)]) == 0
    assert "2 of 2 hold" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["holds"] for row in rows] == [True, True]
    for row in rows:
        assert row["message"].startswith(f"rank {row['rank']} was killed by SIGKILL (at ")
        assert row["seconds"] < LIMIT


def test_an_interrupt_ends_trials_with_those_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: int) -> Iterator[Outcome]:
        yield Outcome(Fault(0, SIGKILL, "build", -1, 0.0), "build", 0.1, True, True, (), (), (), "")
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.studies.fault_trials.trials", interrupted)
    assert main(["--out", str(tmp_path / "faults.json")]) == 130
    assert "1 of 1 hold" in capsys.readouterr().out
    assert json.loads((tmp_path / "faults.json").read_text())["held"] == 1


def test_fault_that_never_came_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.studies.fault_trials.launch_ranks", lambda *arguments, **options: None)
    outcome = run_fault(Fault(1, SIGKILL, "forward", 5, 0.0), build_job(2, 60.0), tmp_path)
    assert not outcome.holds() and outcome.message == "all ranks ended well"


def test_draws_reach_every_rank_phase_and_step() -> None:
    random = Random(0)
    drawn = [Fault.draw(random, SIGKILL, 4, 3) for _ in range(400)]
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert {fault.phase for fault in drawn} == set(PHASES)
    assert {(fault.phase, fault.step) for fault in drawn} == {("start", -1), ("build", -1)} | {
        (phase, step) for phase in PHASES[2:] for step in range(3)
    }


def test_what_does_not_hold() -> None:
    good = Outcome(Fault(0, SIGSTOP, "build", -1, 0.0), "build", 9.9, True, True, (), (), (), "")
    assert good.holds()
    wrongs = ({"seconds": 10.0}, {"rank_named": False}, {"place_named": False}, {"orphans": (7,)}, {"ports": (80,)})
    for wrong in (*wrongs, {"exposed": ("0.0.0.0",)}):
        assert not replace(good, **wrong).holds()
    assert replace(good, seconds=20.0).holds(25.0)


@pytest.mark.parametrize(
    "arguments", [["--ranks", "1"], ["--trials", "-1"], ["--ranks", "four"], ["--out", "/nowhere/x.json"]]
)
def test_bad_arguments(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
