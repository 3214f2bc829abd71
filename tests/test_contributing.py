"""What CONTRIBUTING says of where to add something is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text("utf-8")
ROOMS = ("simulator", "strategies", "executor", "reports", "scenarios")
ROWS = [line.split("|")[1:4] for line in PAGE.partition("## Where do I add")[2].splitlines() if line.startswith("| a")]
DATA = {"scenarios/published", "scenarios/recipes.json", "scenarios/gallery", "scenarios/machines"}
"""Where published runs and scenarios name what they ran with: they follow from nothing that is added."""


def paths(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.(?:py|json))`", text))


def mentions(word: str) -> set[str]:
    """Return the modules and tables of the product that name something, quoted or as a module."""
    pattern = re.compile(rf"""["'.]{word}["' ,]|import {word}\b""", re.IGNORECASE)
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".py", ".json") or name.startswith((*DATA, "reports/", "scenarios/scenario.schema")):
                continue
            if pattern.search(path.read_text("utf-8")):
                found.add(name)
    return found


def test_every_row_was_read() -> None:
    assert len(ROWS) == 6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_the_files_that_are_named_are_there_and_no_others_have_it(row: list[str]) -> None:
    _, files, example = row
    named = paths(files)
    assert named and all((ROOT / name).is_file() for name in named)
    for word in re.findall(r"`([\w]+)`", example):
        assert mentions(word) <= named


def test_every_room_is_told_of() -> None:
    for room in ROOMS:
        for folder in (ROOT / room).iterdir():
            if (folder / "__init__.py").exists():
                assert f"`{folder.name}`" in PAGE or f"`{room}/{folder.name}`" in PAGE or room == "reports", folder
