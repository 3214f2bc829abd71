"""``meshwise calibrate --runs``: what it prints and writes, and one message for whatever it cannot use."""

import json

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.simulator.machine.factors import FACTORS, Factors

from ..machine_fit.small_runs import ROW, RUNS, measure


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def slow_rows(count: int) -> list[dict]:
    """Return rows of a machine on which all takes 1.25 times as long."""
    return [row | {"step_time_s": measure(row, Factors(other=1.25)).step_time} for row in RUNS[:count]]


def test_three_runs_make_a_machine_with_which_others_are_predicted(tmp_path, capsys) -> None:
    rows, out = write_rows(tmp_path / "rows.jsonl", slow_rows(3)), str(tmp_path / "c.yaml")
    assert run(["calibrate", "--runs", rows, "--out", out, "--suggest", "1"]) == 0
    printed = capsys.readouterr().out
    for words in ("error", "factor on times", "other", "mean error of these runs: 20.0% before", "plan: {data: "):
        assert words in printed
    rest = write_rows(tmp_path / "rest.jsonl", slow_rows(6)[3:])
    errors = []
    for options in ([], ["--cluster", out]):
        assert run(["accuracy", rest, "--json", *options]) == 0
        errors.append(json.loads(capsys.readouterr().out)["all"]["step_time"]["mape"])
    assert errors[1] < errors[0] / 2


def test_the_document_has_factors_runs_and_the_machine(tmp_path, capsys) -> None:
    rows = [*slow_rows(1), ROW | {"row_id": "untimed", "step_time_s": None}]
    assert run(["calibrate", "--runs", write_rows(tmp_path / "rows.jsonl", rows), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert tuple(document["factors"]) == FACTORS
    assert document["error_after"] < document["error_before"]
    assert document["skipped"] == [{"name": "untimed", "reason": "no step time was measured"}]
    assert document["cluster"]["calibration"]["runs"] == 1
    assert document["suggestions"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suggest", "2"], "--suggest goes with --runs RUNS.jsonl, met no --runs"),
        (["--runs", "rows.jsonl", "--from", "rows.jsonl"], "--runs goes without --from"),
        (["--runs", "rows.jsonl", "--out", "c.json"], "c.json"),
        (["--runs", "missing.jsonl"], "the file cannot be read"),
        (["--runs", "rows.jsonl"], "a machine is fitted to at least one measured step, met none in 1 run"),
    ],
)
def test_what_cannot_be_used_is_one_message(options, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [ROW | {"step_time_s": None}])
    assert run(["calibrate", *options]) == 2
    assert message in capsys.readouterr().err


def test_accuracy_refuses_a_machine_that_no_run_told_of(tmp_path, capsys) -> None:
    from meshwise.scenarios.inputs.cluster_file import write_cluster
    from meshwise.simulator.catalog import cluster

    write_cluster(cluster("dgx-h100"), tmp_path / "c.yaml")
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    assert run(["accuracy", rows, "--cluster", str(tmp_path / "c.yaml")]) == 2
    assert "calibration: a file that `meshwise calibrate --runs` wrote has it, met none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"residual": -1}, "calibration.residual"),
        ({"factors": {"computing": 1.0}}, "nearest: compute"),
        ({"factors": {"compute": 99.0}}, "calibration.factors.compute"),
        ({"date": "yesterday"}, "calibration.date"),
        ({"runs": 0}, "calibration.runs"),
    ],
)
def test_a_faulty_record_is_named_by_its_place(figures, message, tmp_path, capsys) -> None:
    from meshwise.scenarios.files.reader import dump_yaml
    from meshwise.scenarios.inputs.cluster_document import build_cluster_document
    from meshwise.simulator.catalog import cluster

    record = {"date": "2026-11-28", "runs": 1, "residual": 0.1, "spread": 0.1} | figures
    (tmp_path / "c.yaml").write_text(dump_yaml(build_cluster_document(cluster("dgx-h100")) | {"calibration": record}))
    assert run(["validate", str(tmp_path / "c.yaml")]) == 2
    assert message in capsys.readouterr().err
