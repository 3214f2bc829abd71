"""``meshwise accuracy``: rows and scenarios are read alike, and pictures written."""

import json

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.library import find_root
from meshwise.scenarios.published.accuracy import load_runs, predict
from meshwise.scenarios.published.runs import read_runs

from ..published.test_accuracy import ROW


def test_a_folder_of_pictures_is_written(tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in (ROW, ROW | {"dp": 8, "tp": 1})))
    assert run(["accuracy", str(tmp_path / "rows.jsonl"), "--plots", str(tmp_path / "plots"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["predicted"] == 2
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"predicted-measured.png", *(f"error-by-{by}.png" for by in ("source", "devices", "technique"))}


def test_a_folder_of_scenarios_is_read_like_rows() -> None:
    runs = load_runs(find_root() / "korthikanti")
    assert len(runs) == 8
    assert all(run.scenario is not None and run.step_time for run in runs)
    assert load_runs(find_root() / "starter.yaml")[0].skipped == "the scenario has no plan or nothing measured"


def test_the_published_runs_of_the_library_are_predicted_within_a_tenth() -> None:
    predictions = [
        predict(run) for run in (*load_runs(find_root() / "korthikanti")[-2:], *load_runs(find_root() / "megatron")[:2])
    ]
    assert all(abs(prediction.error or 1) < 0.1 for prediction in predictions)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not json\n", b"[1]\n", b"[" * 100_000, b"\xff\xfe\n"])
def test_a_file_of_something_else_is_a_scenario_error(content: bytes, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ScenarioError):
        read_runs(tmp_path / "rows.jsonl")


def test_words_that_are_not_understood_are_refused_where_asked(tmp_path, capsys) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW | {"schedule": "gpip"}))
    assert run(["accuracy", str(file)]) == 0
    assert run(["accuracy", str(file), "--strict"]) == 2
    column = file.read_text().index('"gpip"') + 1
    message = f"{file}:1:{column}: schedule: 'gpip' is not understood; nearest known word: gpipe"
    assert message in capsys.readouterr().err
