"""Runs whose optimizer states are on hosts, or whose main weights are apart, go on from checkpoints like any other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from meshwise.executor.check.reference import train
from meshwise.executor.check.verification import distance
from meshwise.executor.job import checkpoints_folder
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.run import read_losses, run_jobs
from meshwise.executor.options import RunOptions
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.training import shards
from meshwise.executor.training.checkpoint import Checkpoint, folder_name
from meshwise.executor.training.continuation import prepare_job
from meshwise.executor.training.trainer import Trainer
from meshwise.strategies.plan.offloading import offloading

from .test_continuation import SAVED, STEPS, resumed, trained

RUNS = {
    "host": trained(data=2, zero=1, offload=offloading({"optimizer": 0.3})),
    "streamed": trained(data=2, zero=3, offload=offloading({"optimizer": {"fraction": 0.6, "step": "device"}})),
    "bf16": trained(precision="bf16", data=2, zero=1, dump=False),
    "bf16 zero-3": trained(precision="bf16", data=2, zero=3, dump=False),
}
ON = {
    ("host", "tensor"): trained(tensor=2, microbatch=4),
    ("streamed", "host"): RUNS["host"],
    ("host", "streamed"): RUNS["streamed"],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("resume")
    jobs = [(each, top / name) for name, each in RUNS.items()]
    for name, each in RUNS.items():
        again = replace(resumed(top / name, each), checkpoint_every=SAVED)
        jobs.append((again, top / f"{name} again"))
    run_jobs(jobs + [(resumed(top / a, each), top / f"{a} on {b}") for (a, b), each in ON.items()])
    return top


@pytest.mark.parametrize("name", RUNS)
def test_the_same_plan_goes_on_bit_for_bit(ran: Path, name: str) -> None:
    plan = RUNS[name].plan
    assert read_losses(plan, STEPS - SAVED, ran / f"{name} again") == read_losses(plan, STEPS, ran / name)[SAVED:]
    ends = [checkpoints_folder(ran / folder) / folder_name(STEPS) for folder in (name, f"{name} again")]
    one, other = (whole(Checkpoint.open(end)) for end in ends)
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("pair", ON, ids="-".join)
def test_another_plan_goes_on_as_one_process_would(ran: Path, pair: tuple[str, str]) -> None:
    plan, folder = ON[pair].plan, ran / f"{pair[0]} on {pair[1]}"
    expected_losses, expected = train(replace(ON[pair], checkpoint_every=0))
    error = distance(2, folder, read_losses(plan, STEPS - SAVED, folder), expected_losses[SAVED:], expected)
    assert error.loss_error < 1e-12 and error.gradient_error < 1e-12 and error.equal, error


def whole(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint, put together from their pieces."""
    result = {}
    for name, shape in checkpoint.shapes.items():
        result[name] = np.full(shape, np.nan, checkpoint.dtypes[name])
        for piece in checkpoint.pieces[name]:
            count = piece.box.volume
            part = np.frombuffer(checkpoint.map_file(piece.file), checkpoint.dtypes[name], count, piece.start)
            place = tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))
            result[name][place] = part.reshape(piece.box.sizes)
    return result


@pytest.mark.parametrize("name", RUNS)
def test_what_one_process_reads_it_writes_again(ran: Path, name: str, tmp_path: Path) -> None:
    saved = Checkpoint.open(checkpoints_folder(ran / name) / folder_name(SAVED))
    one = trained(precision=RUNS[name].training.precision, microbatch=4)
    with join_process_group(tmp_path, 60):
        trainer = Trainer(one, Recorder(Heartbeat(tmp_path, 0)))
        shards.load_checkpoint(trainer, saved.folder)
        shards.save_checkpoint(trainer, SAVED, tmp_path / "again")
    before, after = whole(saved), whole(Checkpoint.open(tmp_path / "again" / folder_name(SAVED)))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    kinds = {dtype for key, dtype in saved.dtypes.items() if key.startswith("parameter")}
    assert kinds == {"float32" if "bf16" in name else "float64"}


def test_a_schedule_without_a_flush_has_no_checkpoints(tmp_path: Path) -> None:
    job = replace(trained(pipeline=2, schedule="pipedream"), checkpoint_every=0)
    with pytest.raises(ValueError, match="microbatches are under way, which no checkpoint has, met pipedream"):
        prepare_job(job.spec, job.training, job.plan, RunOptions(checkpoint_every=2), tmp_path)
