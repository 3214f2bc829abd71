"""Rows of one device are predicted by the simulator, and errors are what they are called."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # trials are of the executor

from .device_predictions import describe_rows, find_machine, list_errors, main, predict_rows
from .device_trials import trials

GIB = 2**30


def row(number: int, **fields: Any) -> dict[str, Any]:
    trial = trials("cuda")[number]
    found = {"trial": trial.name, "job": json.loads(trial.job("cuda").to_text()), "status": "ok"}
    return {**found, "step_time": 0.1, "held": {"now": 0, "peak": 10 * GIB, "reserved": 11 * GIB}, **fields}


def test_errors_are_predicted_over_measured() -> None:
    told = {"predicted_step_time": 0.12, "predicted_peak": 9 * GIB}
    rows = [row(0, **told), row(1, **told, status="oom")]
    assert list_errors(rows) == {"step time": [pytest.approx(0.2)], "peak memory": [pytest.approx(-0.1)]}
    assert describe_rows(rows)[-2:] == [
        "step time: median error 20.0%, worst 20.0%, of 1 rows",
        "peak memory: median error 10.0%, worst 10.0%, of 1 rows",
    ]
    assert describe_rows(rows)[1].endswith("; oom")


def test_what_is_recomputed_takes_time_and_saves_memory_on_the_catalogues_h200() -> None:
    plain, full = predict_rows([row(0), row(2)], find_machine("H200 SXM"))
    assert (plain["trial"], full["trial"]) == ("plain", "full recompute")
    # forward again: of 3 parts 4 at the most, for embedding, head and optimizer stay
    assert 1 < full["predicted_step_time"] / plain["predicted_step_time"] < 4 / 3
    assert full["predicted_peak"] < plain["predicted_peak"]
    assert plain["predicted_host_peak"] == 0


def test_one_command_from_rows_to_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.json", tmp_path / "predicted.json"
    rows.write_text(json.dumps({"machine": {"accelerator": "H200 SXM", "date": "2026-01-02"}, "rows": [row(0)]}))
    assert main([str(rows), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["machine"]["date"] == "2026-01-02" and written["rows"][0]["predicted_step_time"] > 0
    assert "of 1 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"machine": {"accelerator": "cpu"}, "rows": []}, "met 'cpu'; nearest: --cluster FILE.yaml"),
        ({"rows": []}, "have a machine and jobs"),
        ({"machine": {"accelerator": "H200 SXM"}, "rows": [{"trial": "a", "job": {}}]}, "a job of this program"),
    ],
)
def test_other_files_get_one_message(document: dict, words: str, tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(document))
    assert main([str(rows)]) == 2
    assert words in capsys.readouterr().err
