"""What is built to be installed has all that the program needs: a source archive, and a wheel made of it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("simulator", "strategies", "executor", "reports", "scenarios")
BUILD = "import sys\nfrom setuptools import build_meta as made\nprint(getattr(made, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, target: Path) -> Path:
    """Build an archive of the project in a folder, and return it."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, what, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True, timeout=300)
    return target / done.stdout.splitlines()[-1]


def needed() -> set[str]:
    """Return the files of all packages: modules, and data beside them or below in folders that are no package."""
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            name = path.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in name.parts and not is_result(name):
                found.add(installed(name))
    return found


def installed(name: Path) -> str:
    """Return where a file of the tree is installed: the door is the package itself."""
    inside = name.relative_to("scenarios/api") if name.parts[:2] == ("scenarios", "api") else name
    return f"meshwise/{inside.as_posix()}"


def is_result(name: Path) -> bool:
    """Return whether a file is of a report on the program itself, which the repository keeps and nothing reads."""
    results = {("reports", "accuracy"), ("reports", "search"), ("reports", "executor"), ("reports", "long-checks.md")}
    return name.parts[:2] in results


def test_the_wheel_of_the_source_archive_has_every_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    archive = build("build_sdist", source, tmp_path / "built")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= {path.name for path in unpacked.iterdir()}
    wheel = build("build_wheel", unpacked, tmp_path / "built")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert needed() - names == set()
    assert {
        f"meshwise/scenarios/{name}" for name in ("scenario.schema.json", "starter.yaml", "local/dp2.yaml")
    } <= names
    own = {name for name in names if ".dist-info/" not in name}
    assert own - needed() == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)
