"""The documentation is true of the program: its commands, its Python and its YAML run, and its links lead somewhere."""

import contextlib
import dataclasses
import fnmatch
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwise.scenarios.commands.main import application, run
from meshwise.scenarios.files.library import find_root
from meshwise.strategies.search.algorithms import ALGORITHMS

from .pages import LANGUAGES, PAGES, ROOT, SHELL, Block, anchors, blocks, links, marks

REASONS = ("needs", "takes", "measures", "installs", "shows")
"""What the reason why a block is not run begins with."""
MOST_EXCLUDED = 0.25
"""Of all blocks that could run."""
BLOCKS = {page: list(blocks(page)) for page in PAGES}
ALL = [block for found in BLOCKS.values() for block in found]
RUNNABLE = [block for block in ALL if block.commands or block.language in ("python", "yaml")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a user has beside the program: the library's files and the README."""
    shutil.copytree(find_root(), tmp_path / "scenarios", ignore=_programs)
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "meshwise"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meshwise "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a reader has what is installed, not the folders of a clone
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _programs(directory: str, files: list[str]) -> list[str]:
    here = Path(directory).name
    return [file for file in files if file == "__pycache__" or (file.endswith(".py") and here != "operators")]


def printed_by(command: str, code: int) -> str:
    """Run a command and return what it printed; ``AssertionError`` where it ends with another code."""
    text = io.StringIO()
    words = shlex.split(command, comments=True)
    if words[0] == "meshwise" and not {"&&", "|", ";", ">"} & set(words):
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            met = run(words[1:])
    else:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
        met = done.returncode
        text.write(done.stdout + done.stderr)
    assert met == code, f"ends with {met}, not {code}:\n{text.getvalue()[-2000:]}"
    return text.getvalue()


KNOWN: dict[tuple[str, int], tuple[str, dict[Path, bytes]]] = {}
"""What commands that read nothing of their page have printed and written: pages share them."""


def outcome(command: str, code: int) -> str:
    """Run a command, or recall what it did on another page, and return what it printed."""
    words = shlex.split(command, comments=True)
    own = [word for word in words[1:] if Path(word.partition(":")[0]).exists() and not word.startswith("scenarios/")]
    if words[0] != "meshwise" or own:
        return printed_by(command, code)
    if (command, code) not in KNOWN:
        before = set(Path().iterdir())
        text = printed_by(command, code)
        KNOWN[command, code] = (
            text,
            {path: path.read_bytes() for path in set(Path().iterdir()) - before if path.is_file()},
        )
    text, written = KNOWN[command, code]
    for path, content in written.items():
        path.write_bytes(content)
    return text


def validate(block: Block) -> None:
    """Validate a file of the page, or a part of a scenario in the place of that of the starter's."""
    text = block.text
    named = re.match(r"# ([\w.-]+\.yaml)\b", text)
    path = Path(named[1]) if named else Path("block.yaml")
    part = yaml.safe_load(text)
    if not named and isinstance(part, dict) and not {"model", "training"} <= part.keys() and part.keys() <= _SECTIONS:
        pinned = "pin" in part.get("search", {})
        base = Path("scenarios") / ("operators/mlp.yaml" if pinned else "starter.yaml")
        path = base.parent / path if pinned else path
        whole = yaml.safe_load(base.read_text("utf-8"))
        if part.keys() & {"model", "cluster"}:
            del whole["plan"]
        text = yaml.safe_dump(whole | part, sort_keys=False)
    path.write_text(text)
    printed_by(f"meshwise validate {path}", block.exit_code)


_SECTIONS = {"name", "model", "training", "cluster", "plan", "search", "run", "measured"}


def same(shown: str, printed: str) -> bool:
    """Return whether all lines shown are in what was printed, in that order; ``...`` stands for anything."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    wanted = [" ".join(line.split()) for line in shown.splitlines() if line.strip() not in ("", "...")]
    plain = [re.sub(r"([*?[])", r"[\1]", line) for line in wanted]
    patterns = [re.sub(r" ?\.\.\. ?", "*", line) for line in plain]
    return all(any(fnmatch.fnmatchcase(line, pattern) for line in lines) for pattern in patterns)


GUIDES = [page for page in PAGES if page != ROOT / "README.md"]


def test_blocks_do_what_the_readme_says(folder: Path) -> None:
    check_page(ROOT / "README.md")


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_blocks_do_what_the_page_says(page: Path, folder: Path) -> None:
    check_page(page)


def check_page(page: Path) -> None:
    """Run every block of a page in the folder that is current."""
    pytest.importorskip("torch")  # which some pages execute plans on
    names: dict[str, Any] = {}
    printed = ""
    for block in BLOCKS[page]:
        if block.excluded is not None:
            continue
        try:
            if block.commands:
                printed = "".join(outcome(command, block.exit_code) for command in block.commands)
            elif block.language == "python":
                printed = evaluated(block, names)
            elif block.language == "yaml":
                validate(block)
            elif block.language == "json":
                json.loads(block.text)
            elif block.checked:
                assert same(block.text, printed), f"what is shown is not in what was printed:\n{printed}"
        except (Exception, SystemExit) as error:
            pytest.fail(f"{block}: {type(error).__name__}: {error}")


def evaluated(block: Block, names: dict[str, Any]) -> str:
    """Run Python with the names that blocks before it made; keep it where its first line names a file."""
    named = re.match(r"# ([\w.-]+\.py)\b", block.text)
    if named:
        Path(named[1]).write_text(block.text)
        return ""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(block.text, str(block), "exec"), names)
    return text.getvalue()


def test_every_comment_is_understood_and_each_exclusion_has_its_reason() -> None:
    for page in PAGES:
        for mark in marks(page):
            assert re.fullmatch(r"output|exit code [1-9]\d*|not run:.*", mark, re.DOTALL), f"{name(page)}: {mark}"
    for block in ALL:
        if block.excluded is not None:
            assert len(block.excluded.split()) >= 3, f"{block}: a reason, met {block.excluded!r}"
            assert block.excluded.split()[0] in REASONS, f"{block}: a reason {REASONS}, met {block.excluded!r}"


def test_most_blocks_run() -> None:
    excluded = [block for block in RUNNABLE if block.excluded is not None]
    assert len(excluded) <= MOST_EXCLUDED * len(RUNNABLE), [f"{block}: {block.excluded}" for block in excluded]


def test_blocks_are_in_languages_that_are_looked_at() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []
    assert [str(block) for block in ALL if block.language in SHELL and not block.commands] == []


@pytest.mark.parametrize("block", [block for block in ALL if block.excluded and block.commands], ids=str)
def test_commands_that_are_not_run_are_commands(block: Block) -> None:
    group = application()
    for command in block.commands:
        for part in command.split("&&"):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name == "meshwise":
                found = group.commands.get(words[1])
                assert found is not None, command
                found.make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert ROOT in target.parents, f"{name(page)}: {link}"
        assert target.exists(), f"{name(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}"


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {
        (index.parent / link.partition("#")[0]).resolve() for link in links(index) if not re.match(r"[a-z]+:", link)
    }
    pages = set(PAGES) - {index, ROOT / "README.md"}
    assert {name(page) for page in pages - named} == set()


def test_the_guide_names_the_options_of_every_algorithm() -> None:
    guide = (ROOT / "docs" / "guides" / "search.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` `(\w+)` \| `(.*?)` \| .+ \|$", guide, re.MULTILINE)
    options = [
        (name, field.name, str(field.default)) for name in ALGORITHMS for field in dataclasses.fields(ALGORITHMS[name])
    ]
    assert sorted(rows) == sorted(options)


def test_the_page_of_algorithms_has_a_section_of_six_lines_for_every_algorithm() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in sections) == sorted(ALGORITHMS)
    for name, text in sections:
        assert re.findall(r"^- (.+?):", text, re.MULTILINE) == PROPERTIES, name


def test_the_tests_that_hold_algorithms_to_their_names_exist() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    lines = re.findall(r"^- Held by:(.*?)^- Good for:", page, re.MULTILINE | re.DOTALL)
    for line in lines:
        names = re.findall(r"`([\w/]+\.py)`", line)
        assert names and all((ROOT / "tests" / "strategies" / name).is_file() for name in names), line


PROPERTIES = ["State", "Moves", "Objective", "Published", "Held by", "Good for"]
"""What the page of algorithms says of each."""


def test_an_output_is_found_by_its_lines_in_order() -> None:
    assert same("a ... c\n...\nb", "x\na 1  c\ny\nb\n")
    assert not same("b\na", "a\nb\n")
    assert not same("a[1]", "a1")
