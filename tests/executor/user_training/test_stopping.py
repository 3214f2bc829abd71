"""A command that is asked to end reaches its ranks, which write a checkpoint and end; a run goes on from there."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import train
from meshwise.executor.user_training.stopping import StopRequest

SLOW = """
import time
import torch
BATCH = 4

def model():
    return torch.nn.Linear(2, 1)

def data():
    return torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2) / 24)

def loss(outputs, batch):
    time.sleep(0.05)
    return outputs.square().mean()
"""


def wait_for_steps(log: Path, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_ends_the_run_with_a_checkpoint(number: int, code: int, tmp_path: Path) -> None:
    file, out = tmp_path / "slow.py", tmp_path / "run"
    file.write_text(SLOW)
    command = [sys.executable, "-m", "meshwise", "train", str(file), "--plan", "data=2,zero=1", "--out", str(out)]
    process = subprocess.Popen([*command, "--steps", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(out / "metrics.jsonl", process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 2
    process.send_signal(number)
    printed, told = process.communicate(timeout=60)
    assert process.returncode == code and printed == "" and "Traceback" not in told
    assert "the same command with --resume goes on" in told
    assert not any(rank.is_running() for rank in ranks)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{len(rows):08d}"]


def test_a_second_signal_ends_at_once_and_handlers_come_back(tmp_path: Path) -> None:
    earlier, told = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(KeyboardInterrupt), StopRequest(tmp_path, told.append) as request:
        request.pass_on()
        assert list(tmp_path.iterdir()) == []
        signal.raise_signal(signal.SIGTERM)
        request.pass_on()
        assert len(list(tmp_path.iterdir())) == 1 and request.number == signal.SIGTERM and len(told) == 1
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is earlier


ENDING = """
import torch
BATCH = 4
NUM_BATCHES = 3

def model():
    return torch.nn.Linear(2, 1)

def data(rank, world):
    # rank 1 has a batch fewer
    for number in range(NUM_BATCHES + 1 - rank):
        yield torch.full((BATCH // world, 2), number / 4)

def loss(outputs, batch):
    return outputs.square().mean()
"""


def test_data_that_end_leave_a_checkpoint_of_all_ranks(tmp_path: Path) -> None:
    file, out = tmp_path / "ending.py", tmp_path / "run"
    file.write_text(ENDING)
    job = TrainJob(str(file), ModuleLayout(2, zero=1), 6)
    with pytest.raises(UserError, match=r"ending.py: .* met its end at step 3; what is done is kept, and"):
        train(job, out)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    file.write_text(ENDING.replace("NUM_BATCHES = 3", "NUM_BATCHES = 6"))
    run = train(replace(job, resume=True), out)
    whole = train(job, tmp_path / "whole")
    assert run.first_step == 3 and run.losses == whole.losses[3:]
