"""What is kept on the host changes no bit of a run, and is not on the device between steps."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from meshwise.executor.parallel.offload import _Layer
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.stages.parallelize import parallelize

BATCH = torch.linspace(-1, 1, 32).view(8, 4)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda module: torch.optim.AdamW(
        [
            {"params": module.get_parameter("layers.0.linear.weight"), "lr": 0.1},
            {"params": list(module.parameters())[1:]},
        ]
    ),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(kind: str, words: str, folder: Path) -> list[float]:
    """Return the losses of a run that goes on from its own checkpoint, on the host or not."""
    losses = []
    for part in range(2):
        torch.manual_seed(part)
        step = parallelize(
            Network(),
            words,
            optimizer=OPTIMIZERS[kind],
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            max_norm=0.5,
        )
        if part:
            step.load(folder)
        losses += [step(BATCH) for _ in range(2)]
        step.save(folder)
        if "optimizer" in words:
            states = [value for row in step.optimizer_states for value in row.values() if value.dim()]
            assert all(map(step.holds_on_host, states)) and not any(map(step.holds_on_host, step.module.parameters()))
    return losses


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("words", ["optimizer", "activations", "optimizer+activations,num_microbatches=2,recompute=2"])
def test_a_run_is_equal_to_the_bit(kind: str, words: str, tmp_path: Path) -> None:
    plain = "num_microbatches=2" if "num_microbatches" in words else "data=1"
    assert train(kind, f"offload={words}", tmp_path / "host") == train(kind, plain, tmp_path / "device")


def test_a_parameter_that_is_changed_between_steps_is_stepped_as_it_is() -> None:
    losses = []
    for words in ("data=1", "offload=optimizer"):
        torch.manual_seed(0)
        module = Network()
        step = parallelize(module, words, optimizer=OPTIMIZERS["sgd"])
        losses.append(step(BATCH))
        with torch.no_grad():
            module.layers[0].linear.weight.mul_(2)  # type: ignore[union-attr, operator]
        losses += [step(BATCH), step(BATCH)]
    assert losses[:3] == losses[3:]


def test_a_module_without_blocks_has_none_on_the_host() -> None:
    step = parallelize(nn.Linear(4, 4), "offload=activations", loss=lambda outputs, batch: outputs.square().mean())
    with pytest.raises(UserError, match="equal modules in a list, met none; nearest: none"):
        step(BATCH)


def test_steps_leave_nothing_of_the_steps_before() -> None:
    module = Network()
    step = parallelize(module, "data=1,offload=activations")
    counts = []
    for _ in range(6):
        step.global_batch(BATCH)
        gc.collect()
        counts.append(sum(type(item) is _Layer for item in gc.get_objects()))
    assert counts[1] == counts[-1]
