"""A compiled module trains as one that is not, under the names of the module itself, and goes on from checkpoints."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwise.executor.modules.courses import CompilerError, require_compiled_units
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.stages.parallelize import parallelize


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


BATCH = torch.ones(4, 4)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    module = Model()
    if kind == "in place":
        module.compile(backend="aot_eager")
    return torch.compile(module, backend="aot_eager") if kind == "wrapped" else module


def train(kind: str, folder: Path, words: str) -> tuple[list[float], TrainingStep]:
    step = parallelize(build(kind), words, learning_rate=0.1)
    losses = [step(BATCH) for _ in range(2)]
    step.save(folder)
    step = parallelize(build(kind), words, learning_rate=0.1)
    step.load(folder)
    return [*losses, *(step(BATCH) for _ in range(2))], step


@pytest.mark.parametrize("words", ["num_microbatches=2", "recompute=full", "recompute=selective:1"])
def test_a_compiled_module_trains_and_goes_on_as_itself(tmp_path: Path, words: str) -> None:
    expected, _ = train("plain", tmp_path / "plain", words)
    for kind in ("in place", "wrapped"):
        losses, step = train(kind, tmp_path / kind, words)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert step.module._compiled_call_impl is not None
        step.export(tmp_path / kind)
        assert load_file(tmp_path / kind / "model.safetensors").keys() == Model().state_dict().keys()


def test_what_is_gathered_block_by_block_is_compiled_block_by_block() -> None:
    module = Model()
    require_compiled_units(list(module.layers), module)
    for layer in module.layers:
        layer.compile()
    require_compiled_units(list(module.layers), module)
    module.compile()
    with pytest.raises(CompilerError, match="met Model, which is compiled whole"):
        require_compiled_units(list(module.layers), module)


def test_draws_of_a_gpu_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: draws[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", draws.append)
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or draws.append(torch.tensor([seed])))
    parallelize(Model())(BATCH)
    assert seeds and draws[-1] is draws[0]
