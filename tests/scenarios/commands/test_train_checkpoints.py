"""``meshwise train`` from a checkpoint of a script of torch and to one, and a checkpoint that cannot be written."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshwise.scenarios.commands.main import run

FILE = """
import torch
BATCH = 4

def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

def data():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(16.0).view(8, 2) / 16), batch_size=4)

def loss(outputs, batch):
    return outputs.square().mean()
"""
BATCHES = (torch.arange(16.0).view(8, 2) / 16).double().split(4)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        loss = module(BATCHES[number % 2]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_a_run_goes_on_from_a_script_and_the_script_from_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, optimizer = build()
    train(module, optimizer, 4)
    model_states, optimizer_states = get_state_dict(module, optimizer)
    dcp.save({"model": model_states, "optim": optimizer_states}, checkpoint_id="script", no_dist=True)
    words = ["--plan", "data=2,zero=3", "--no-calibrate", "--precision", "fp64", "--json"]
    options = ["--from-checkpoint", "script", "--weights", "dcp", "--verify", "--checkpoint-every", "2"]
    assert run(["train", "mine.py", *words, "--steps", "4", *options]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(train(module, optimizer, 4), rel=1e-12)
    assert sorted(path.name for path in Path("meshwise-train/checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    assert run(["train", "mine.py", *words, "--steps", "6", "--resume"]) == 0
    rest = json.loads(capsys.readouterr().out)["loss"]
    assert rest == pytest.approx(train(module, optimizer, 2), rel=1e-12)
    module, optimizer = build()
    model_states, optimizer_states = get_state_dict(module, optimizer)
    states = {"model": model_states, "optimizer": optimizer_states}
    Path("meshwise-train/checkpoints/step-00000006").rename("unused")
    assert run(["train", "mine.py", *words, "--steps", "5", "--resume", "--weights", "dcp"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(rest[:1], rel=1e-12)
    dcp.load(states, checkpoint_id="meshwise-train/weights", no_dist=True)
    set_state_dict(module, optimizer, model_state_dict=model_states, optim_state_dict=states["optimizer"])
    loss = float(module(BATCHES[1]).square().mean().detach())
    assert loss == pytest.approx(rest[1], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-checkpoint", "none"], "that torch.distributed.checkpoint.save wrote has .metadata, met none"),
        (["--from-checkpoint", "none", "--resume"], "met both; nearest: --resume"),
        (["--weights", "pickle"], "--weights: safetensors or dcp, met pickle; nearest: safetensors"),
    ],
)
def test_bad_checkpoints_are_one_message(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "mine.py", "--plan", "data=2", "--steps", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_checkpoint_that_cannot_be_written_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "meshwise-train").mkdir()
    (folder / "mine.py").write_text(FILE + "\nopen('meshwise-train/checkpoints', 'w').close()\n")
    words = ["--plan", "data=2", "--no-calibrate", "--steps", "3", "--checkpoint-every", "1"]
    assert run(["train", "mine.py", *words]) == 1
    error = capsys.readouterr().err
    assert "cannot write" in error and "what was there before is as it was" in error
