"""``search`` with an objective, terms of a run or numbers of nodes, and its progress as JSON lines."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

SCENARIO = """
name: small
model: {transformer: {layers: 4, hidden: 512, heads: 8, ffn: 2048, vocab: 1024}}
training: {global_batch: 16, sequence: 256, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 2}
search: {space: {core: true}}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)


def test_the_document_has_the_best_setup_and_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minimize", "cost", "--price", "2.00", "--tokens", "1B", "--nodes", "1,2", "--out", "plan.json"]
    assert run(["search", "s.yaml", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [setup["nodes"] for setup in found["setups"]] == [1, 2] and found["gap"] == 0
    best = found["best"]
    bill, steps = best["bill"], 1e9 / (16 * 256)
    assert bill["cost"] == pytest.approx(2.0 * best["devices"] * steps * best["step_time"] / 3600)
    assert json.loads(Path("plan.json").read_text()) == best["plan"]


def test_a_deadline_that_nothing_keeps_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minimize", "devices", "--tokens", "1B", "--deadline", "1 s", "--nodes", "1..2"]
    assert run(["search", "s.yaml", *options]) == 3
    assert capsys.readouterr().err.startswith("no plan of 2 setups keeps the deadline of 1 s; nearest: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minimize", "money"], "--minimize is one of time, cost, devices, energy, met money"),
        (["--minimize", "cost"], "price: minimize cost needs the price of a device-hour, met none; as in --price 2.50"),
        (["--nodes", "4..2"], "--nodes holds numbers or ranges, at most 1000, as in 8 or 1,2,4..8; met 4..2"),
        (["--nodes", "900000"], "nodes: 900,000 of 2 devices are more than 1,000,000; nearest: 500,000"),
        (["--tokens", "15X"], "--tokens is a number of tokens, as in 15T, 300B or 4e6; met 15X"),
        (["--tokens", "1T", "--deadline", "30"], "--deadline is a time with its unit, as in 30d or '12 h'; met 30"),
        (["--price", "cheap"], "--price is in US dollars for an hour of one device"),
        (["--nodes", "1..2", "--algorithm", "mcmc"], "--algorithm is for searches of the least time on one machine"),
        (["--progress", "xml"], "--progress is json, or left out for a line on a terminal; met xml"),
    ],
)
def test_bad_options_are_told(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", *options]) == 2
    assert message in capsys.readouterr().err


def test_progress_is_one_document_a_line_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", "--algorithm", "best_first", "--progress", "json", "--json"]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert lines[-1]["phase"] == "end" and lines[-1]["gap"] == json.loads(captured.out)["gap"] == 0
    assert all({"phase", "best", "bound", "gap", "share"} <= line.keys() for line in lines[:-1])
    best = [line["best"] for line in lines[:-1] if line["best"] is not None]
    assert best == sorted(best, reverse=True)
