"""A search that is killed anywhere goes on to the result it would have had."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS, NEEDED_PACKAGES

BUDGET = 12


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load("local/dp2-tp2-pp2")


def without_clock(result: Any) -> tuple[Any, ...]:
    trials = tuple((trial.plan, trial.evaluation) for trial in result.trials)
    history = tuple((count, best) for count, _, best in result.history)
    return trials, history, result.considered, result.lower_bound, result.gap


@pytest.mark.parametrize("name", LAYOUT_ALGORITHMS)
def test_a_search_goes_on_from_any_byte_to_the_uninterrupted_result(
    name: str, scenario: Scenario, tmp_path: Path
) -> None:
    if name in NEEDED_PACKAGES:
        pytest.importorskip(NEEDED_PACKAGES[name])
    whole = scenario.search(name, budget=BUDGET, resume=tmp_path / "whole.jsonl")
    written = (tmp_path / "whole.jsonl").read_bytes()
    head = written.index(b"\n") + 1
    for length in {head, head + 1, (head + len(written)) // 2, len(written) - 1, len(written)}:
        cut = tmp_path / f"{length}.jsonl"
        cut.write_bytes(written[:length])
        resumed = scenario.search(name, budget=BUDGET, resume=cut)
        assert without_clock(resumed) == without_clock(whole)
        names = [json.loads(line)["plan"] for line in cut.read_bytes().splitlines()[1:]]
        assert names == [json.loads(line)["plan"] for line in written.splitlines()[1:]]


def test_what_is_known_is_not_simulated_again(scenario: Scenario, tmp_path: Path, monkeypatch: Any) -> None:
    from meshwise.strategies.cost_model import SimulatedCost

    journal = tmp_path / "j.jsonl"
    scenario.search("random", budget=5, resume=journal)
    real, simulated = SimulatedCost.evaluate, []
    monkeypatch.setattr(SimulatedCost, "evaluate", lambda self, plan: (simulated.append(plan), real(self, plan))[1])
    result = scenario.search("random", budget=8, resume=journal)
    new = [trial.plan for trial in result.trials[5:]]
    confirmed = [result.best.plan] if result.best and result.best.plan not in new else []
    assert simulated == new + confirmed


def test_the_clock_goes_on_from_that_of_the_earlier_run(scenario: Scenario, tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    scenario.search("random", budget=3, resume=journal)
    head, *lines = journal.read_text().splitlines()
    rows = [json.dumps(json.loads(line) | {"elapsed": 50.0 + number}) for number, line in enumerate(lines)]
    journal.write_text("\n".join([head, *rows]) + "\n")
    result = scenario.search("random", seconds=52.0, resume=journal)
    assert [trial.elapsed for trial in result.trials] == [50.0, 51.0, 52.0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (["--seed", "2"], "options"),
        (["--algorithm", "mcmc"], "algorithm"),
        ([], "problem"),
    ],
)
def test_the_journal_of_another_search_is_an_error(
    change: list[str], field: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--algorithm", "random", "--seed", "1", "--budget", "2", "--resume", "j.jsonl", *change]
    load("local/dp2-tp2-pp2").search("random", seed=1, budget=2, resume="j.jsonl")
    before = (tmp_path / "j.jsonl").read_bytes()
    capsys.readouterr()
    assert run(["search", "local/dp2-tp2-pp2" if change else "local/dp2", *common]) == 2
    met = capsys.readouterr().err.strip().splitlines()
    assert met[0].startswith("j.jsonl:1:1: ")
    assert any(line.startswith(f"j.jsonl:1:1: {field}: a search goes on from the journal of the same") for line in met)
    assert (tmp_path / "j.jsonl").read_bytes() == before


GOOD = {"plan": "0" * 64, "step_time": 1.0, "peak_memory": 1.0, "fits": True, "elapsed": 1.0}
HOSTILE = [
    b"null\n",
    b"[" * 100_000 + b"\n",
    b"1" * 70_000 + b"\n",
    b'{"plan": "\xff"}\n',
    json.dumps(GOOD | {"step_time": float("nan")}).encode() + b"\n",
    json.dumps(GOOD | {"step_time": float("inf")}).encode() + b"\n",
    json.dumps(GOOD | {"step_time": -1.0}).encode() + b"\n",
    json.dumps(GOOD | {"step_time": True}).encode() + b"\n",
    json.dumps(GOOD | {"step_time": None}).encode() + b"\n",
    json.dumps(GOOD | {"plan": "x" * 64}).encode() + b"\n",
    json.dumps(GOOD | {"plan": ["0"] * 64}).encode() + b"\n",
    json.dumps(GOOD | {"fits": "yes"}).encode() + b"\n",
    json.dumps(GOOD | {"more": 1}).encode() + b"\n",
    json.dumps(GOOD).replace("1.0", "1" + "0" * 400).encode() + b"\n" + b"\x00\n",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_line_is_an_error_with_its_number(line: bytes, scenario: Scenario, tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    scenario.search("random", budget=1, resume=journal)
    before = journal.read_bytes() + line
    journal.write_bytes(before)
    with pytest.raises(ScenarioError, match=r"j\.jsonl:[34]:1: a "):
        scenario.search("random", budget=1, resume=journal)
    assert journal.read_bytes() == before


@pytest.mark.parametrize("content", [b"mine", b"mine\n", b"{}\n", b"[]\n", b"\x00" * 99, b"[" * 60_000 + b"\n"])
def test_a_file_that_is_no_journal_is_kept(content: bytes, scenario: Scenario, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(ScenarioError, match="name another file"):
        scenario.search("random", budget=1, resume=file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("place", [".", "nowhere/j.jsonl", "a\0b"])
def test_a_place_that_cannot_hold_a_journal_is_an_error(
    place: str, scenario: Scenario, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="cannot be"):
        scenario.search("random", budget=1, resume=place)


@pytest.mark.parametrize("options", [["--workers", "-1"], ["--workers", "many"], ["--resume", "."]])
def test_wrong_use_is_one_message_with_code_2(
    options: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["search", "local/dp2", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_a_best_plan_that_is_not_what_the_journal_says_is_an_error(scenario: Scenario, tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    scenario.search("random", budget=2, resume=journal)
    head, first, second = journal.read_text().splitlines()
    forged = json.dumps(json.loads(second) | {"step_time": 1e-9, "fits": True})
    journal.write_text("\n".join([head, first, forged]) + "\n")
    with pytest.raises(ValueError, match="the journal says of the best plan what its simulation says"):
        scenario.search("random", budget=2, resume=journal)


def started(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """Return a search of a space that takes long, in a process of its own."""
    command = [sys.executable, "-m", "meshwise", "search", "llama3-8b-8-h100", "--algorithm", "exhaustive", "--json"]
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *options], cwd=folder, env=here, start_new_session=True, **pipes)


def wait_for(file: Path, lines: int, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while not file.exists() or len(file.read_bytes().splitlines()) < lines:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, "the search did not begin"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_a_process_soon_with_a_valid_plan_and_a_journal(workers: str, tmp_path: Path, capsys: Any) -> None:
    process = started(tmp_path, "--out", "plan.json", "--resume", "j.jsonl", "--workers", workers)
    wait_for(tmp_path / "j.jsonl", 4, process)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert time.monotonic() - begun < 20  # 2 s on a quiet machine
    assert "Traceback" not in err
    document = json.loads(out)
    assert document["interrupted"] is True
    assert json.loads((tmp_path / "plan.json").read_text()) == document["best"]["plan"]
    assert run(["validate", str(tmp_path / "plan.json")]) == 0
    kept = len((tmp_path / "j.jsonl").read_text().splitlines()) - 1
    assert kept - document["evaluations"] in (0, 1)  # a trial is on disk before it is counted


def states(column: str, process: int) -> list[str]:
    """Return the process ids and states of processes: of one by ``-p``, of the children of one by ``--ppid``."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", column, str(process)], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if not line.split()[1].startswith("Z")]


def test_a_process_that_was_killed_leaves_a_plan_and_a_journal_to_go_on_from_and_no_workers(tmp_path: Path) -> None:
    process = started(tmp_path, "--out", "plan.json", "--resume", "j.jsonl", "--workers", "2")
    wait_for(tmp_path / "j.jsonl", 6, process)
    workers = [int(line.split()[0]) for line in states("--ppid", process.pid)]
    assert len(workers) >= 2
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    try:
        while any(states("-p", worker) for worker in workers):
            assert time.monotonic() < end, "workers outlive their parent"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert run(["validate", str(tmp_path / "plan.json")]) == 0
    scenario = load("llama3-8b-8-h100")
    whole = scenario.search("exhaustive", budget=8)
    assert without_clock(scenario.search("exhaustive", budget=8, resume=tmp_path / "j.jsonl")) == without_clock(whole)
