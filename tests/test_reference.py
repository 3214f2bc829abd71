"""The reference of the Python interface can be built, and shows what users look for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwise

ROOT = Path(__file__).parent.parent
ROOMS = ("meshwise.simulator.machine", "meshwise.strategies.search.algorithms", "meshwise.reports.pictures")


@pytest.mark.slow
def test_pages_of_the_door_and_of_rooms_are_built(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # which names of the door need
    command = [sys.executable, "-m", "pdoc", "-d", "numpy", "-t", str(ROOT / "docs" / "pdoc"), "-o", str(tmp_path)]
    done = subprocess.run([*command, "--no-show-source", "meshwise", *ROOMS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not resolve" not in done.stderr and "Couldn't import" not in done.stderr, done.stderr
    door = (tmp_path / "meshwise.html").read_text("utf-8")
    assert set(re.findall(r'<section id="(\w+)">', door)) == set(meshwise.__all__)
    assert "<strong>memory_bandwidth</strong>: Byte/s between the device and its memory." in door
    cited = (tmp_path / "meshwise" / "strategies" / "search" / "algorithms" / "mcts.html").read_text("utf-8")
    assert "<li>[1] Kocsis, Szepesvari" in cited
    for room in ROOMS:
        assert (tmp_path / f"{room.replace('.', '/')}.html").exists()


def test_the_command_names_packages_that_are_there() -> None:
    """A package that is renamed is renamed there: pdoc only warns of one that it does not find."""
    text = (ROOT / ".ci" / "reference").read_text("utf-8")
    done = subprocess.run(["bash", "-c", f"pdoc() {{ printf '%s\\n' \"$@\"; }}\n{_call(text)}"], capture_output=True)
    named = [word for word in done.stdout.decode().split() if word.startswith("meshwise")]
    assert len(named) >= 6
    for name in named:
        path = ROOT.joinpath(*name.split(".")[1:]) if name != "meshwise" else ROOT / "scenarios" / "api"
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def _call(text: str) -> str:
    return text[text.index('"$python" -m pdoc') :].replace('"$python" -m ', "")
