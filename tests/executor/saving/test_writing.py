"""A checkpoint is whole or not there: whatever ends the ranks, and whenever; and damage is found before it is read."""

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
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.saving.background import BackgroundWriter, HostCopies
from meshwise.executor.saving.digests import DIGESTS, find_damage
from meshwise.executor.saving.writing import PARTIAL, write_folder
from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.training.checkpoint import CheckpointError

HERE = Path(__file__).parent
BATCH = torch.ones(4, 3)


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
    write_folder(checkpoints / "step-99999999", {"a": torch.ones(2)}, {}, sweeps=True)
    assert not list(checkpoints.glob(f"*{PARTIAL}"))


def test_steps_go_on_while_copies_are_written(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    step = parallelize(module, loss=lambda outputs, batch: outputs.square().mean(), learning_rate=0.1)
    step(BATCH)
    weights = {}
    for _ in range(3):
        folder = step.save(tmp_path, in_background=True)
        weights[folder] = module.weight.detach().clone()
        step(BATCH)
    step.finish_saving()
    assert list_checkpoints(tmp_path) == sorted(folder.name for folder in weights)
    for folder, weight in weights.items():
        values = {"module.weight": torch.empty(2, 3)}
        dcp.load(values, checkpoint_id=folder, no_dist=True)
        assert torch.equal(values["module.weight"], weight)
        assert subprocess.run(["sha256sum", "-c", "--quiet", DIGESTS], cwd=folder).returncode == 0


def test_copies_fill_the_memory_that_they_had() -> None:
    copies, values = HostCopies(), torch.arange(4.0)
    first = copies.take({"a": {"b": values, "lr": [0.1]}})["a"]["b"]
    assert first.data_ptr() != values.data_ptr() and torch.equal(first, values)
    second = copies.take({"a": {"b": values + 1, "lr": [0.1]}})["a"]["b"]
    assert second.data_ptr() == first.data_ptr() and torch.equal(second, values + 1)
    assert copies.take({"a": {"b": values[:2]}}) == {"a": {"b": pytest.approx([0.0, 1.0])}}


def test_what_cannot_be_written_is_told_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, writer = {"a": torch.ones(2)}, BackgroundWriter()
    writer.write(tmp_path / "one", states, {"facts": b"1"})

    def fail(self: object, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail)
    for target in (tmp_path / "one", tmp_path / "two"):
        writer.write(target, states, {}, in_background=True)
        with pytest.raises(CheckpointError, match=rf"rank 0 cannot write {target}: .*the disk is full.*as it was"):
            writer.finish()
        writer.finish()  # it is told once
    assert not find_damage(tmp_path / "one") and not (tmp_path / "two").exists()
    writer.write(tmp_path / "two", states, {}, in_background=True)
    with pytest.raises(CheckpointError):
        writer.write(tmp_path / "three", states, {}, in_background=True)


@pytest.mark.parametrize("name", [".metadata", "facts.json", "__0_0.distcp", DIGESTS])
def test_a_changed_byte_is_found_before_states_are_read(tmp_path: Path, name: str) -> None:
    def build() -> object:
        torch.manual_seed(0)
        return parallelize(torch.nn.Linear(3, 2), loss=lambda outputs, batch: outputs.square().mean())

    step = build()
    for _ in range(2):
        step(BATCH)
        newest = step.save(tmp_path)
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    again = build()
    with pytest.raises(UserError, match=r"step-00000002.*(the SHA-256 that|cannot be read|names files|has version)"):
        again.load(tmp_path)
        again(BATCH)
    (newest / name).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        again.load(tmp_path)
        again(BATCH)


def test_the_checkpoint_before_a_damaged_one_is_named(tmp_path: Path) -> None:
    step = parallelize(torch.nn.Linear(3, 2), loss=lambda outputs, batch: outputs.square().mean())
    for _ in range(2):
        step(BATCH)
        newest = step.save(tmp_path)
    (newest / "__0_0.distcp").write_bytes(b"none")
    with pytest.raises(UserError, match="nearest: step-00000001, once step-00000002 is removed"):
        step.load(tmp_path)
