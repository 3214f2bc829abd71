"""A folder has one run at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.executor.launch.processes import lock_folder

ROOT = Path(__file__).parents[3]


def test_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with lock_folder(folder):
        met = f"a run is in progress in this folder, met process {os.getpid()}"
        with pytest.raises(ValueError, match=met), lock_folder(folder):
            raise AssertionError("two runs in one folder")
        with lock_folder(tmp_path / "other"):
            pass
    with lock_folder(folder):
        pass
    assert list(folder.iterdir()) == []


def test_killed_run_gives_its_folder_up(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from meshwise.executor.launch.processes import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"met process {holder.pid}"), lock_folder(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with lock_folder(tmp_path):
        pass


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="the folder cannot be written: Not a directory"),
        lock_folder(tmp_path / "file/run"),
    ):
        pass
