"""The page on adding a technique is true: its diffs apply to this tree, and its check passes where they are applied."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "adding_a_technique.md"
CHECK = "# check_ulysses.py"
ROOMS = ("simulator", "strategies", "executor", "reports", "scenarios")
TOOLS = {"patch": ["patch", "-p1", "--fuzz=0", "--forward"], "git": ["git", "apply", "-p1", "--verbose"]}
"""Programs that apply a diff, where the lines around a change are as the diff says and nowhere else."""


def copy_package(folder: Path) -> Path:
    """Copy the rooms and the door of this tree as the package ``meshwise`` in a folder, and return it."""
    package = folder / "meshwise"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scenarios" / "api", package, ignore=ignored)
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    return package


def apply_diff(block: Block, package: Path) -> None:
    """Apply a diff of the page; ``AssertionError`` with its hunks that do not apply."""
    tool = next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither patch nor git is there to apply a diff")
    # git looks for no repository around the copy, whose paths it would take the diff's for
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(package.parent)}
    done = subprocess.run(
        TOOLS[tool], input=block.text, cwd=package, env=environment, capture_output=True, text=True, timeout=60
    )
    rejected = "".join(path.read_text("utf-8") for path in package.rglob("*.rej"))
    assert done.returncode == 0, (
        f"{block}: the diff no longer applies; change it with what you changed\n{done.stdout}{done.stderr}{rejected}"
    )


def apply_diffs(package: Path) -> None:
    """Apply all diffs of the page, in order."""
    diffs = [block for block in blocks(PAGE) if block.language == "diff"]
    assert len(diffs) >= 5
    for block in diffs:
        apply_diff(block, package)


def test_the_diffs_apply_to_this_tree(tmp_path: Path) -> None:
    apply_diffs(copy_package(tmp_path))


@pytest.mark.slow
def test_the_technique_works_where_the_diffs_are_applied(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # on which the check executes plans
    apply_diffs(copy_package(tmp_path))
    [check] = [block for block in blocks(PAGE) if block.text.startswith(CHECK)]
    script = tmp_path / "check.py"
    script.write_text(check.text, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{check}: the check fails where the diffs are applied\n{done.stdout}{done.stderr}"
