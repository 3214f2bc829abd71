"""A checkpoint is whole or not there, whatever ends the ranks, and whenever."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed.checkpoint as dcp

from meshwise.executor.modules.states import find_newest, list_checkpoints
from meshwise.executor.saving.digests import find_damage
from meshwise.executor.saving.writing import OLD, PARTIAL, write_folder
from meshwise.executor.training.checkpoint import CheckpointError

HERE = Path(__file__).parent


def start_ranks(folder: Path, megabytes: int, steps: int) -> list[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "writing_ranks", str(folder), str(megabytes), str(steps)]
    return [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdin=subprocess.PIPE)
        for rank in range(2)
    ]


def test_ranks_that_are_killed_in_the_middle_leave_the_checkpoints_before(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, 64, 1000)
    draws, checkpoints = random.Random(1), tmp_path / "checkpoints"
    deadline = time.monotonic() + 120
    try:
        while len(list_checkpoints(checkpoints)) < 2 or not list(checkpoints.glob(f"step-*{PARTIAL}/__*")):
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
        time.sleep(draws.uniform(0, 0.03))
        for rank in draws.sample(ranks, 2):
            rank.send_signal(signal.SIGKILL)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert list(checkpoints.glob(f"*{PARTIAL}"))
    names = list_checkpoints(checkpoints)
    assert len(names) >= 2 and not any(find_damage(checkpoints / name) for name in names)
    newest = find_newest(checkpoints)
    values = {f"module.values.{number}": torch.empty(64 * 2**18 // 8) for number in range(8)}
    dcp.load(values, checkpoint_id=newest, no_dist=True)
    for value in values.values():  # of one step, though the module has gone on
        assert (value == int(newest.name[5:])).all()
    (checkpoints / f"mine{PARTIAL}").mkdir()
    write_folder(checkpoints / "step-99999999", {"a": torch.ones(2)}, {}, sweeps=True)
    assert [path.name for path in checkpoints.glob(f"*{PARTIAL}")] == [f"mine{PARTIAL}"]


def test_a_checkpoint_whose_place_cannot_be_taken_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "step-00000001"
    write_folder(target, {"x": torch.ones(1)}, {})
    rename = Path.rename

    def fail(path: Path, other: Path) -> Path:
        if path.name.endswith(f"1{PARTIAL}"):
            raise OSError("no place")
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="no place; what was there before is as it was"):
        write_folder(target, {"x": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert find_damage(target) is None or not find_damage(target)
    states = {"x": torch.zeros(1)}
    dcp.load(states, checkpoint_id=target, no_dist=True)
    assert states["x"] == 1
    target.rename(tmp_path / f"step-00000001{OLD}{PARTIAL}")  # as a run leaves it that is killed between two renames
    write_folder(tmp_path / "step-00000002", {"x": torch.zeros(1)}, {}, sweeps=True)
    assert list_checkpoints(tmp_path) == ["step-00000001", "step-00000002"]
