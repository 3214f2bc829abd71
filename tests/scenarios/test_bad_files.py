"""A catalogue of bad files: each ends its command with code 2 and one clear message, and nothing is written."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.simulator.files import is_plain

FOLDER = Path(__file__).parent / "bad_files"
TABLE = FOLDER / "catalogue.tsv"
"""File, command, and what its message contains; ``hf_config`` stands for the scenario that `CONFIG` makes of a file."""
CONFIG = """\
model: {{hf_config: {file}}}
training: {{global_batch: 16, sequence: 64, precision: fp32}}
cluster: {{preset: local-cpu, nodes: 1}}
"""
MOST = 2000
"""Characters of a message: what is met may be of any length, and is cut."""


def catalogue() -> list[tuple[str, str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(name, command, message) for name, command, message in list(rows)[1:]]


def words(command: str, name: str, folder: Path) -> list[str]:
    """Return the command line of a row."""
    if command != "hf_config":
        return [*command.split(), name]
    (folder / "of-config.yaml").write_text(CONFIG.format(file=name))
    return ["validate", "of-config.yaml"]


def test_the_catalogue_names_every_file_once() -> None:
    named = [name for name, _, _ in catalogue()]
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path not in (TABLE, FOLDER / "good.yaml"))
    assert len(named) >= 80


def test_the_good_file_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(FOLDER / "good.yaml")]) == 0


@pytest.mark.parametrize(("name", "command", "message"), catalogue(), ids=[name for name, _, _ in catalogue()])
def test_a_bad_file_is_one_clear_message(
    name: str, command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    for file in {name, "good.yaml"}:
        shutil.copy(FOLDER / file, tmp_path)
    arguments = words(command, name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert re.match(rf"{re.escape(name)}(:\d+:\d+)?: |lost.json: |\.: ", err), "the message begins with file and place"
    assert "Traceback" not in err and len(err) <= MOST and is_plain(err)
    assert len(err.splitlines()) == len(set(err.splitlines())), "each fault is told once"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
