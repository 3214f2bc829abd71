"""What a hostile file holds does nothing: no code runs, no other file is opened, and nothing moves the cursor."""

import hashlib
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.results import write
from meshwise.scenarios.loader import load
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.files import escape_text, is_plain

from ..endurance.fuzzing import corpus
from ..endurance.fuzzing.watch import watched

ESCAPE = "\x1b[31m\x1b]0;owned\x07"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
CODE = "__import__('os').system('touch canary')"
SCENARIO: dict[str, Any] = {
    "name": "small",
    "model": {"transformer": {"layers": 2, "hidden": 48, "heads": 6, "ffn": 192, "vocab": 256}},
    "training": {"global_batch": 4, "sequence": 64, "precision": "fp32"},
    "cluster": {"preset": "local-cpu", "nodes": 1, "devices_per_node": 2},
    "plan": {"data": 2},
}


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


def scenario(folder: Path, **sections: Any) -> Path:
    path = folder / "s.yaml"
    path.write_text(json.dumps(SCENARIO | sections))
    return path


def safe(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, on stdout and stderr, where none of it moves the cursor."""
    printed = "".join(capfd.readouterr())
    assert is_plain(printed), ascii(printed)
    assert "Traceback" not in printed
    return printed


def strings(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of texts."""
    if isinstance(data, dict):
        return [place for key, value in data.items() for place in strings(value, (*path, key))]
    if isinstance(data, list):
        return [place for index, value in enumerate(data) for place in strings(value, (*path, index))]
    return [path] if isinstance(data, str) else []


@pytest.mark.parametrize(
    "payload", [CODE, "!!python/object/apply:os.system [touch canary]", "$(touch canary)", "`touch canary`"]
)
def test_code_in_a_field_is_text(payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """In every text of scenario and cluster file in turn."""
    monkeypatch.chdir(tmp_path)
    cluster = json.loads(corpus.clusters()[0])
    assert run(["validate", str(scenario(tmp_path))]) == 0  # what is imported now is not opened later
    for base, names in ((SCENARIO, strings(SCENARIO)), (cluster, strings(cluster))):
        for path in names:
            data = json.loads(json.dumps(base))
            *parents, last = path
            holder = data
            for key in parents:
                holder = holder[key]
            holder[last] = payload
            Path("s.yaml").write_text(json.dumps(data))
            with watched(tmp_path) as effects:
                assert run(["validate", "s.yaml"]) in (0, 2)
            assert effects == []
    safe(capfd)
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    "command", ["validate", "simulate --plan", "accuracy", "calibrate --from", "simulate --cluster"]
)
def test_a_pickle_is_never_loaded(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    scenario(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        Path("evil").write_bytes(pickle.dumps(Bomb(), protocol))
        first, *rest = command.split()
        assert run([first, *(["s.yaml"] if rest[:1] in (["--plan"], ["--cluster"]) else []), *rest, "evil"]) == 2
    safe(capfd)
    assert not Path("canary").exists()


def test_a_pickle_in_the_place_of_a_checkpoint_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seal may be right: whoever writes the manifest can write that too."""
    from meshwise.executor.training.checkpoint import MANIFEST, SEAL, DamagedError, find_last_good, format_seal

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(pickle.dumps(Bomb()))
    (folder / SEAL).write_bytes(format_seal((folder / MANIFEST).read_bytes()))
    with pytest.raises(ValueError, match="is damaged"):
        find_last_good(tmp_path)
    manifest = {
        "version": 1, "step": 1, "seed": 0, "tensors": {},
        "files": {"../../canary": {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest(), "pieces": []}},
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / SEAL).write_bytes(format_seal((folder / MANIFEST).read_bytes()))
    with pytest.raises(ValueError, match=r"a file is rank-N\.bin"):
        find_last_good(tmp_path)
    assert issubclass(DamagedError, ValueError)
    assert not Path("canary").exists()


REFERENCES = {"graph": ("model", "graph"), "hf_config": ("model", "hf_config"), "file": ("cluster", "file")}


def refusal(folder: Path, kind: str, name: str) -> str:
    """Return why a scenario may not refer to a file, which is opened neither."""
    section, field = REFERENCES[kind]
    path = scenario(folder, **{section: {field: name}})
    with watched(folder) as effects, pytest.raises(ScenarioError) as caught:
        load(path)
    assert effects == []
    return caught.value.faults[0].message


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_stays_in_its_folder(kind: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (inside / "link.json").symlink_to(tmp_path / "secret.json")
    (inside / "folder").symlink_to(tmp_path)
    (inside / "loop.json").symlink_to(inside / "loop.json")
    outside = (
        "../secret.json",
        str(tmp_path / "secret.json"),
        "a/../../secret.json",
        "link.json",
        "folder/secret.json",
    )
    for name in (*outside, "/etc/passwd", "/dev/zero", "~/../../etc/passwd", "..", "/proc/self/mem"):
        assert refusal(inside, kind, name).startswith("a path stays in the folder of its file"), name
    for name in ("loop.json", "x" * 900):
        assert "names a file" in refusal(inside, kind, name) or "cannot be read" in refusal(inside, kind, name)


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for kind in REFERENCES:
        assert refusal(tmp_path, kind, "pipe") == "names a file, met a pipe or device, 'pipe'"


def test_a_reference_inside_the_folder_is_read_through_a_link(tmp_path: Path) -> None:
    """As mounted configuration has it: every file a link into a folder beside it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text(json.dumps(corpus.CONFIGS[0]))
    (tmp_path / "config.json").symlink_to("data/config.json")
    found = load(scenario(tmp_path, model={"hf_config": "config.json"}))
    assert found.spec.name == "gpt2"


def test_an_output_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out.json").symlink_to(tmp_path / "precious")
    write(tmp_path / "out.json", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "out.json").read_text() == "new" and not (tmp_path / "out.json").is_symlink()


@pytest.mark.parametrize("text", [ESCAPE, "a\u202eb", "a\rb", "a\x08b", "\u2066", "\x9b31m", "a\u2028b"])
def test_a_name_that_moves_the_cursor_is_refused_and_shown_escaped(text: str, tmp_path: Path, capfd) -> None:
    path = scenario(tmp_path, name=text)
    assert run(["validate", str(path)]) == 2
    assert "name: text is printable, met U+" in safe(capfd)
    assert run(["validate", str(scenario(tmp_path, **{text: 1}))]) == 2
    assert run(["validate", str(scenario(tmp_path, cluster={"preset": text, "nodes": 1}))]) == 2
    assert run(["validate", str(scenario(tmp_path, plan={"schedule": text}))]) == 2
    safe(capfd)


def test_words_of_the_command_line_and_names_of_files_are_shown_escaped(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    scenario(tmp_path).rename(tmp_path / f"{ESCAPE.replace('/', '')}.yaml")
    name = f"{ESCAPE}.yaml"
    for arguments in (
        ["validate", name],
        ["validate", ESCAPE],
        ["simulate", ESCAPE],
        ["simulate", name, "--plan", ESCAPE],
        ["simulate", name, "--timeline", ESCAPE],
        ["search", name, "--algorithm", ESCAPE],
        ["search", name, "--budget", "1", "--out", f"lost/{ESCAPE}.json"],
        ["explain", name, "--why-not", ESCAPE],
        ["explain", name, "--why-not", f"tensor={ESCAPE}"],
        ["accuracy", ESCAPE],
        ["list", ESCAPE],
        ["schema", ESCAPE],
        [ESCAPE],
        ["simulate", name],
    ):
        assert run(arguments) in (0, 1, 2, 3)
        safe(capfd)


def test_rows_are_shown_escaped(tmp_path: Path, capfd) -> None:
    row = corpus.ROW | {"row_id": ESCAPE, "source_id": f"{ESCAPE}{SCRIPT}", "model": ESCAPE, "schedule": ESCAPE}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"row_id": f"{ESCAPE}{index}"}) + "\n" for index in range(2)))
    assert run(["accuracy", str(path), "--out", str(tmp_path / "predictions.csv")]) in (0, 1, 3)
    safe(capfd)
    assert is_plain((tmp_path / "predictions.csv").read_text())
    made = build_run(row | {"row_id": "\ud800"})
    assert (made.row_id, made.source) == ("\\ud800", escape_text(row["source_id"]))


def test_a_name_is_text_in_pictures_and_pages(tmp_path: Path, capfd) -> None:
    path = scenario(tmp_path, name=f"$\\frac{{1$ -->{SCRIPT}")
    outputs = {"--timeline": "t.svg", "--memory": "m.svg", "--trace": "trace.json", "--save": "s.json"}
    options = [word for option, name in outputs.items() for word in (option, str(tmp_path / name))]
    assert run(["simulate", str(path), *options]) == 0
    safe(capfd)
    for name in ("t.svg", "m.svg"):
        assert not re.search(r"<script|<img", (tmp_path / name).read_text())


def test_a_report_shows_markup_as_text() -> None:
    from meshwise.reports.document import Section, to_markdown

    section = Section(SCRIPT, (SCRIPT,), ((SCRIPT, SCRIPT), (SCRIPT, SCRIPT)), f"{SCRIPT[1:8]}.png", SCRIPT)
    assert not re.search(r"(?<!\\)<(script|img src=x)", to_markdown(SCRIPT, [section]))
