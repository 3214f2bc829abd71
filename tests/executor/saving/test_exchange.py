"""A run goes on from a script of torch as the script itself does, and the script from what a run wrote, in fp64."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed.checkpoint as dcp
from exchange_ranks import PLANS, STEPS, build, list_batches, make_optimizer, make_scheduler
from torch.distributed.checkpoint.state_dict import get_state_dict

from meshwise.executor.launch.launcher import launch_ranks
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.stages.parallelize import parallelize

HERE = Path(__file__).parent


def test_runs_and_scripts_go_on_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    launch_ranks("exchange_ranks", [str(tmp_path)], tmp_path, 2, timeout=120)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(set(found["script"])) == STEPS and found["plans"].keys() == set(PLANS)
    for words, run in found["plans"].items():
        assert run["losses"] == pytest.approx(found["script"], rel=1e-12), words
        assert run["plain"] == pytest.approx(run["rest"], rel=1e-12), words
        assert run["again"] == pytest.approx(run["rest"], rel=1e-12), words


def save_script(folder: Path, changes: Any) -> None:
    """Save what a script of one process has, after a function has changed it."""
    module = build(seed=0)
    optimizer = make_optimizer(module)
    module(list_batches(1, 0)[0]).backward()
    optimizer.step()
    model_states, optimizer_states = get_state_dict(module, optimizer)
    states = changes(
        {"model": model_states, "optimizer": optimizer_states, "lr": make_scheduler(optimizer).state_dict()}
    )
    dcp.save(states, checkpoint_id=folder, no_dist=True)


def begin(folder: Path) -> Any:
    options: dict[str, Any] = {"optimizer": make_optimizer, "scheduler": make_scheduler, "precision": "fp64"}
    step: Any = parallelize(build(seed=1), **options)
    step.start_from(folder)
    step(list_batches(1, 0)[0])
    return step


def test_weights_alone_begin_a_run(tmp_path: Path) -> None:
    save_script(tmp_path, lambda states: {"ema": {"x": states["model"]}, "model": states["model"]})
    step = begin(tmp_path)
    assert {float(state["step"]) for state in step.optimizer_states} == {1.0}
    save_script(tmp_path, lambda states: states)
    assert {float(state["step"]) for state in begin(tmp_path).optimizer_states} == {2.0}


def test_a_schedule_sets_the_rate_that_it_had(tmp_path: Path) -> None:
    def move(states: Any) -> Any:
        states["lr"] |= {"last_epoch": 4, "_last_lr": [0.02, 0.01], "base_lrs": [0.08, 0.04]}
        return states

    save_script(tmp_path, move)
    assert begin(tmp_path).learning_rate == 0.02


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            lambda states: {"model": {"other": torch.ones(2)}},
            "all parameters of the module, met none for .* under no key",
        ),
        (
            lambda states: {"model": {name: value for name, value in states["model"].items() if name != "head.bias"}},
            "met none for head.bias under model",
        ),
        (
            lambda states: states | {"optimizer": {"state": {"0": {"exp_avg": torch.ones(2)}}}},
            r"have the names of parameters, .*, met optimizer.state.0.exp_avg",
        ),
        (
            lambda states: states | {"model": states["model"] | {"head.bias": torch.ones(3)}},
            r"is of this module and optimizer, met .* of shape",
        ),
        (lambda states: states | {"lr": {"last_epoch": 3}}, "is of the same kind, met lr"),
    ],
)
def test_what_is_no_checkpoint_of_the_module_is_one_message(tmp_path: Path, changes: Any, text: str) -> None:
    save_script(tmp_path, changes)
    with pytest.raises(UserError, match=text):
        begin(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    save_script(tmp_path / "inner", lambda states: states)
    with pytest.raises(UserError, match=r"has .metadata, met none; nearest: .*inner"):
        begin(tmp_path)
    (tmp_path / "inner" / ".metadata").write_bytes(b"damaged")
    with pytest.raises(UserError, match="a checkpoint is of this module and optimizer, met"):
        begin(tmp_path / "inner")
    with pytest.raises(UserError, match="safetensors or dcp, met pickle"):
        begin_plainly().export(tmp_path, format="pickle")


def begin_plainly() -> Any:
    step: Any = parallelize(build(seed=1), precision="fp64")
    step(list_batches(1, 0)[0])
    return step


def test_a_run_of_more_layers_is_not_gone_on_from_with_fewer(tmp_path: Path) -> None:
    def build_layers(number: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(number)))

    step = parallelize(build_layers(3), loss=lambda outputs, batch: outputs.sum())
    step(torch.ones(2, 2))
    step.save(tmp_path)
    fewer = parallelize(build_layers(2), loss=lambda outputs, batch: outputs.sum())
    fewer.load(tmp_path)
    with pytest.raises(UserError, match=r"met 2\.bias, which the module has not"):
        fewer(torch.ones(2, 2))
    other = parallelize(build_layers(3), optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9))
    other.loss = step.loss
    other.load(tmp_path)
    with pytest.raises(UserError, match="keeps momentum_buffer, met exp_avg and exp_avg_sq of another one"):
        other(torch.ones(2, 2))
    wider = parallelize(torch.nn.Sequential(torch.nn.Linear(2, 3)), loss=lambda outputs, batch: outputs.sum())
    wider.load(tmp_path)
    with pytest.raises(UserError, match=r"which the module has not"):
        wider(torch.ones(2, 2))
    wider = parallelize(
        torch.nn.Sequential(torch.nn.Linear(2, 3), *build_layers(2)), loss=lambda outputs, batch: outputs.sum()
    )
    wider.load(tmp_path)
    with pytest.raises(UserError, match=r"met 0.weight of shape \[2, 2\]; nearest: \[3, 2\]"):
        wider(torch.ones(2, 2))


def test_states_do_not_take_the_place_of_other_files(tmp_path: Path) -> None:
    step = parallelize(torch.nn.Linear(2, 2), loss=lambda outputs, batch: outputs.sum())
    step(torch.ones(2, 2))
    step.save(tmp_path)
    with pytest.raises(UserError, match=r"a folder of their own, met step-00000001 in it; nearest: .*/dcp"):
        step.export(tmp_path, format="dcp")
    for _ in range(2):
        step.export(tmp_path / "dcp", format="dcp")
    assert (tmp_path / "step-00000001").is_dir()
