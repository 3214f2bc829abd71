"""Commands that are interrupted at drawn moments: all that `interrupt_trials` looks at, a few times."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

from . import interrupt_trials
from .interrupt_trials import Command, is_whole, left, main, searched
from .interruption import Interruption

KEPT = ("--out", "plan.json", "--resume", "journal.jsonl")
SMALL = {
    "search": Command(("search", "local/dp2", "--algorithm", "random", "--budget", "6", *KEPT)),
    "simulate": Command(("simulate", "local/dp2", "--trace", "s.json"), repeats=(".json",)),
}
GOOD = Interruption("simulate", 1.0, False, 1.9, 0.3, 130, True, 0, "interrupted")


def test_interrupted_commands_end_soon_and_leave_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interrupt_trials, "COMMANDS", SMALL)
    out = tmp_path / "trials.json"
    arguments = ["--trials", "2", "--commands", "search,simulate", "--seed", "1", "--busy", "--out", str(out)]
    assert main(arguments) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["trials"] == document["held"] == 4
    assert [row["name"] for row in document["rows"]] == ["search", "search", "simulate", "simulate"]


def test_what_does_not_hold() -> None:
    assert GOOD.faults(2.0) == []
    assert replace(GOOD, code=-2).faults(2.0) == []
    assert replace(GOOD, ended_before=True, code=0).faults(2.0) == []
    wrongs = [{"seconds": 2.0}, {"code": 1}, {"code": 0}, {"orphans": 1}, {"errors": "Traceback (most"}]
    for wrong in (*wrongs, {"errors": "Exception ignored in"}, {"ended_before": True}):
        assert len(replace(GOOD, **wrong).faults(2.0)) == 1
    assert replace(GOOD, seconds=60.0).faults(2.0, busy=True) == []
    assert replace(GOOD, cpu_seconds=2.0).faults(2.0, busy=True) == ["took 2.0 s to end"]


def test_files_that_are_left_or_cut_are_faults(tmp_path: Path) -> None:
    command = Command(("simulate",), repeats=(".csv",))
    folder, whole = tmp_path / "a", tmp_path / "b"
    for place in (folder, whole):
        place.mkdir()
        (place / "good.json").write_text("{}")
        (place / "table.csv").write_text("a\n")
    assert list(left(command, folder, whole)) == []
    (folder / ".good.json.x1").write_text("")
    (folder / "good.json").write_text("{")
    (folder / "table.csv").write_text("b\n")
    assert list(left(command, folder, whole)) == [
        ".good.json.x1 is left",
        "good.json is not whole",
        "table.csv differs from that of a whole run",
    ]


def test_a_journal_that_is_not_of_this_search_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    search = SMALL["search"]
    assert run(list(search.arguments)) == 0
    assert list(searched(search, tmp_path, tmp_path)) == []
    journal = tmp_path / "journal.jsonl"
    head, *rows = [json.loads(line) for line in journal.read_text().splitlines()]
    twice = [row | {"step_time": 2 * row["step_time"]} for row in rows]
    journal.write_text("".join(json.dumps(row) + "\n" for row in (head, *twice)))
    simulates, goes_on = searched(search, tmp_path, tmp_path)
    assert simulates == "the plan does not simulate to the time in the journal"
    assert goes_on.startswith("the search does not go on: the journal says of the best plan what its simulation says")


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.html", "a.csv", "a.jsonl", "a.json"])
def test_half_a_file_is_not_whole(name: str, tmp_path: Path) -> None:
    content = {
        ".png": b"\x89PNG IEND\xaeB`\x82",
        ".svg": b"<svg></svg>\n",
        ".html": b"<html></html>\n",
        ".csv": b"a\nb\n",
        ".jsonl": b'{"a": 1}\n{"b": 2}\n',
        ".json": b'{"a": 1}',
    }[Path(name).suffix]
    path = tmp_path / name
    path.write_bytes(content)
    assert is_whole(path)
    path.write_bytes(content[:-1] if name == "a.csv" else content[:-2])
    assert not is_whole(path)


@pytest.mark.parametrize("arguments", [["--trials", "0"], ["--commands", "list"], ["--out", "/nowhere/x.json"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
