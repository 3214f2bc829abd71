"""Steps go on while copies of states are written, and a failure is told once."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed.checkpoint as dcp

from meshwise.executor.modules.states import list_checkpoints
from meshwise.executor.saving.background import BackgroundWriter, HostCopies
from meshwise.executor.saving.digests import DIGESTS, find_damage
from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.training.checkpoint import CheckpointError

BATCH = torch.ones(4, 3)


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
