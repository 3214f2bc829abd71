"""A matrix of plans: each runs once, one that fails stops no other, and what is known is not run again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from . import plan_matrix
from .plan_matrix import (
    PAGE,
    ROWS,
    build_rows,
    format_page,
    key_of,
    main,
    read_known_rows,
    trials,
    write,
)
from .techniques import Combination, combine, techniques

ALL = {technique.name: technique for technique in techniques()}


def of(*names: str) -> Combination:
    return combine([ALL[name] for name in names])


def broken() -> Combination:
    """Return a plan that raises in its ranks: its precision is none of the executor's."""
    good = of("data, no overlap")
    assert good.job is not None
    wrong = replace(good.job, training=replace(good.job.training, precision="fp16"))
    return good._replace(names=("broken",), job=wrong)


def said() -> list[str]:
    return []


def test_a_plan_that_fails_stops_no_other_and_what_is_known_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_matrix, "techniques", lambda: (*techniques(), replace(ALL["data"], name="broken")))
    asked = (of("data"), broken(), of("zbv", "full recompute"), of("ZeRO 1", "data"), of("ZeRO 1"), of("adafactor"))
    heard = said()
    assert not write(tmp_path, [2], asked, heard.append)
    head, known = read_known_rows(tmp_path / ROWS)
    keys = [key_of(each.job) for each in asked if each.job is not None]
    assert list(known) == [keys[0], keys[2], keys[3]]  # the failed one is not known: it runs again
    assert all(row["state"] == "equal" and row["gradient"] < 1e-13 for row in known.values())
    text = (tmp_path / PAGE).read_text()
    assert "3 of 4 plans equal" in text and "failed: rank" in text and "'fp16'" in text
    assert "adamw or sgd, met adafactor" in text
    assert str(tmp_path) not in text and "/tmp" not in text

    monkeypatch.setattr(plan_matrix, "run_jobs", lambda pairs: pytest.fail("nothing is left to run"))
    assert write(tmp_path, [2], tuple(each for each in asked if each.names != ("broken",)), heard.append)
    assert read_known_rows(tmp_path / ROWS) == (head, known)


def test_a_plan_runs_once_whatever_it_is_called() -> None:
    names = (["data"], ["ZeRO 1"], ["data", "ZeRO 1"], ["clipping"], ["data", "clipping"], ["tensor", "data"])
    asked = tuple(of(*each) for each in names)
    found = trials(asked)
    assert [trial.combination.name for trial in found] == ["data", "ZeRO 1", "clipping", "tensor + data"]
    rows = build_rows(asked, [2], {})
    assert [row.get("same_as") for row in rows] == [None, None, "ZeRO 1", None, "clipping", None]
    assert [row.get("state") for row in rows][-1] == "left out"  # 4 ranks


def test_rows_measured_elsewhere_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ROWS
    head, _ = read_known_rows(path)
    row = '{"key": "a", "state": "equal", "loss": 0.0, "gradient": 0.0, "parameter": 0.0}\n'
    path.write_text(json.dumps(head) + "\n" + row + row[:20])  # it was killed while it wrote the last one
    assert list(read_known_rows(path)[1]) == ["a"]
    monkeypatch.setattr(plan_matrix, "describe_circumstances", lambda: {"torch": "another"})
    assert read_known_rows(path)[1] == {}


def test_an_unequal_plan_is_seen() -> None:
    asked = (of("data"),)
    (job,) = (each.job for each in asked)
    assert job is not None
    row = {"key": key_of(job), "state": "different", "loss": 0.0, "gradient": 0.1, "parameter": 0.0}
    head, _ = read_known_rows(Path("nowhere"))
    text = format_page(head, build_rows(asked, [2], {key_of(job): row}))
    assert "0 of 1 plans equal" in text and "| 1.0e-01 | 0.0e+00 | **no** |" in text


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.studies.plan_matrix.write", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted; run again to go on\n"
