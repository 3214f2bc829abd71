"""A run that goes on from a checkpoint, under the same or any other plan, is the run that was not interrupted."""

from dataclasses import replace
from errno import ENOSPC
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tiny_jobs import TINY, job

from meshwise.executor.check.reference import train
from meshwise.executor.check.verification import distance
from meshwise.executor.job import Job, checkpoints_folder, tensors_file
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.run import read_losses, run_jobs
from meshwise.executor.options import LearningRate
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.training import shards
from meshwise.executor.training.checkpoint import CheckpointError, find_last_good, folder_name
from meshwise.executor.training.trainer import Trainer

STEPS, SAVED = 4, 2
TIED = replace(TINY, tied_embeddings=True)
LLAMA = replace(TINY, kv_heads=2, ffn_kind="swiglu", positions="rotary")


def trained(spec: Any = TINY, **layout: Any) -> Job:
    """Return a job of four steps with a checkpoint after two, of its own length and seed."""
    return replace(job(spec, steps=STEPS, **layout), checkpoint_every=SAVED, seed=3)


def scheduled(plain: Job) -> Job:
    """Return the job with clipped gradients and a learning rate that differs from step to step."""
    training = replace(plain.training, gradient_clipping=True)
    return replace(plain, training=training, learning_rate=LearningRate(0.01, 2, 5, 0.001))


FOUR = {
    "data 4": trained(data=4),
    "zero-3 tensor": trained(data=2, tensor=2, zero=3, microbatch=2),
}
FOUR_ON = {("zero-3 tensor", "data pipeline"): trained(data=2, pipeline=2, zero=1)}
TWO = {
    "data": trained(data=2),
    "tensor": trained(tensor=2, microbatch=4, sequence_parallel=True),
    "pipeline": trained(pipeline=2, microbatch=2, stages=(3, 1)),
    "zero-1": trained(data=2, zero=1),
    "zero-3": trained(data=2, zero=3),
    "server": trained(data=2, gradient_reduction="parameter_server", profile=True),
    "tied": trained(TIED, tensor=2, microbatch=4),
    "llama": scheduled(trained(LLAMA, tensor=2, microbatch=4, optimizer="sgd")),
}
TWO_ON = {
    ("tensor", "zero-3"): TWO["zero-3"],
    ("pipeline", "tensor"): TWO["tensor"],
    ("zero-3", "interleaved"): trained(pipeline=2, chunks=2, microbatch=2, schedule="interleaved"),
    ("zero-1", "tensor"): TWO["tensor"],
    ("data", "zero-2"): trained(data=2, zero=2, microbatch=2),
    ("server", "zero-1"): TWO["zero-1"],
    ("tied", "zero-3"): trained(TIED, data=2, zero=3),
    ("llama", "zero-3"): scheduled(trained(LLAMA, data=2, zero=3, optimizer="sgd")),
    ("zero-3 tensor", "data"): TWO["data"],
}
AGAIN = ("data 4", "zero-3 tensor", "data", "pipeline", "zero-1", "zero-3")
_reference = cache(train)


def resumed(saved: Path, plan_job: Job) -> Job:
    return replace(
        plan_job, resume=str(checkpoints_folder(saved) / folder_name(SAVED)), first_step=SAVED, checkpoint_every=0
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every run: whole, resumed under the same plan (``again``) and under another."""
    top = tmp_path_factory.mktemp("resume")
    for whole, others in ((FOUR, FOUR_ON), (TWO, TWO_ON)):
        jobs = [(each, top / name) for name, each in whole.items()]
        jobs += [(resumed(top / name, each), top / f"{name} again") for name, each in whole.items() if name in AGAIN]
        jobs += [(resumed(top / a, each), top / f"{a} on {b}") for (a, b), each in others.items()]
        run_jobs(jobs)
    return top


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_plan_goes_on_bit_for_bit(ran: Path, name: str) -> None:
    whole = {**FOUR, **TWO}[name]
    expected = read_losses(whole.plan, STEPS, ran / name)
    assert read_losses(whole.plan, STEPS - SAVED, ran / f"{name} again") == expected[SAVED:]
    for rank in range(whole.plan.mesh.num_ranks):
        before, after = (tensors_file(ran / folder, rank) for folder in (name, f"{name} again"))
        assert before.exists() == after.exists()
        if before.exists():
            with np.load(before) as one, np.load(after) as other:
                assert one.files == other.files
                assert all(np.array_equal(one[key], other[key]) for key in one.files), f"rank {rank}"


@pytest.mark.parametrize(
    ("pair", "other"),
    {**FOUR_ON, **TWO_ON}.items(),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_another_plan_goes_on_as_one_process_would(ran: Path, pair: tuple[str, str], other: Job) -> None:
    folder = ran / f"{pair[0]} on {pair[1]}"
    expected_losses, expected = _reference(replace(other, checkpoint_every=0, plan=TWO["data"].plan))
    found = read_losses(other.plan, STEPS - SAVED, folder)
    error = distance(other.plan.mesh.num_ranks, folder, found, expected_losses[SAVED:], expected)
    assert error.loss_error < 1e-12 and error.gradient_error < 1e-12 and error.equal, error


def test_the_newest_two_checkpoints_stay_and_are_good(ran: Path) -> None:
    place = checkpoints_folder(ran / "tensor")
    assert sorted(path.name for path in place.iterdir()) == [folder_name(2), folder_name(4)]
    checkpoint, damaged = find_last_good(place)
    assert (checkpoint.step, damaged) == (4, ())


def test_every_parameter_is_kept_once_with_its_moments(ran: Path) -> None:
    checkpoint, _ = find_last_good(checkpoints_folder(ran / "data 4"))
    layer = 4 * 32**2 + 2 * 32 * 64 + 7 * 32 + 4 * 32  # four square and two 32 x 64 products, biases, two norms
    ends = 256 * 32 + 16 * 32 + 2 * 32 + 256 * 32  # tokens, positions, norm, logits
    kept = dict.fromkeys(("parameter", "exp_avg", "exp_avg_sq"), 0)
    for name, shape in checkpoint.shapes.items():
        if (kind := name.partition(" ")[0]) in kept:
            kept[kind] += int(np.prod(shape))
    assert set(kept.values()) == {4 * layer + ends}
    stored = sum(size for size, _ in checkpoint.files.values())
    assert 3 * 8 * (4 * layer + ends) < stored < 1.01 * 3 * 8 * (4 * layer + ends)
    assert len(checkpoint.files) == 4  # what four ranks hold alike, each writes a part of


@pytest.mark.parametrize("saved", ["tensor", "server", "zero-3 tensor"])
def test_one_process_goes_on(ran: Path, saved: str, tmp_path: Path) -> None:
    one = trained(microbatch=4)
    with join_process_group(tmp_path, 60):
        trainer = Trainer(one, Recorder(Heartbeat(tmp_path, 0)))
        shards.load_checkpoint(trainer, checkpoints_folder(ran / saved) / folder_name(SAVED))
        found = [trainer.step(step) for step in range(SAVED, STEPS)]
    expected, _ = _reference(replace(one, checkpoint_every=0, plan=TWO["data"].plan))
    assert found == pytest.approx(expected[SAVED:], abs=1e-12, rel=0)


def test_a_full_disk_is_one_message_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shards.write_file

    def full(path: Path, chunks: Any) -> Any:
        write(path, list(chunks)[:5])
        raise OSError(ENOSPC, "No space left on device")

    place = tmp_path / "checkpoints"
    with join_process_group(tmp_path, 60):
        trainer = Trainer(trained(microbatch=4), Recorder(Heartbeat(tmp_path, 0)))
        trainer.step(0)
        shards.save_checkpoint(trainer, 1, place)
        monkeypatch.setattr(shards, "write_file", full)
        with pytest.raises(CheckpointError) as caught:
            shards.save_checkpoint(trainer, 2, place)
    held = "the disk is full; the checkpoints before are as they were"
    assert str(caught.value) == f"rank 0 cannot write a checkpoint into {place}: {held}"
    assert [path.name for path in place.iterdir()] == [folder_name(1)]
    assert find_last_good(place)[0].step == 1
