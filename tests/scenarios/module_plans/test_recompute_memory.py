"""The memory that is predicted for blocks that are computed again is what a step of a rank has."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from meshwise.executor.module_measures.live_module import LiveModule
from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.modules.optimizers import make_adamw
from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.user_training.step_memory import StepMemory
from meshwise.scenarios.module_plans import prediction
from meshwise.scenarios.module_plans.choosing import choose
from meshwise.scenarios.module_plans.prediction import StepPredictor, build_model
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

KINDS = (Recompute.FULL, Recompute.SELECTIVE)
WORDS = ("none", "1", "3", "full", "selective", "selective:2")
NUM_SAMPLES = 8


class Layer(nn.Module):
    """A convolution, a norm and an activation, and a product in the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width)
        self.last = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.silu(self.norm(self.first(x)))
        return x + self.last(inner.transpose(1, 2)).transpose(1, 2)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measure_peak(words: str, batch: torch.Tensor) -> int:
    """Return the most bytes of tensors of a rank in a step."""
    step, memory = parallelize(Network(), words), StepMemory()
    step(batch)
    with memory.record(step, batch):
        step(batch)
    assert memory.peak is not None
    return memory.peak


def test_memory_of_blocks_that_are_computed_again_is_as_measured_and_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(NUM_SAMPLES, 16, 512)
    live = LiveModule(
        Network(),
        batch,
        is_global=True,
        optimizer=make_adamw(1e-3),
        loss=None,
        precision="fp32",
        device=torch.device("cpu"),
    )
    model = build_model(live.measure(0.2), live.capture(), NUM_SAMPLES, "fp32", "cpu")
    predictor = StepPredictor(model, memory=1e9)
    plans = [f"recompute={word}" for word in WORDS]
    predicted = [predictor.predict(parse_layout(words, ModuleLayout())) for words in plans]
    peaks = [measure_peak(words, batch) for words in plans]
    assert [row.peak_memory for row in predicted] == pytest.approx(peaks, rel=0.05)
    on_host = ["offload=activations", "offload=optimizer", "offload=optimizer+activations,num_microbatches=2"]
    host_peaks = [measure_peak(words, batch) for words in on_host]
    host_predictions = [predictor.predict(parse_layout(words, ModuleLayout())) for words in on_host]
    assert [row.peak_memory for row in host_predictions] == pytest.approx(host_peaks, rel=0.08)
    assert peaks[0] > 1.5 * host_peaks[0] and peaks[0] > host_peaks[1]
    # they differ by more than that error
    assert peaks[0] > 1.1 * peaks[1] > 1.2 * peaks[2] > 1.2 * peaks[3]
    assert peaks[0] > 1.1 * peaks[4]
    none, one, three, full, selective, _ = (row.step_time for row in predicted)
    assert none < one < three < full and none < selective < full
    every_choice = [Recompute.NONE, *KINDS, *(FirstLayers(kind, count) for kind in KINDS for count in (1, 2, 3))]
    every_plan = [predictor.predict(ModuleLayout(recompute=choice)) for choice in every_choice]
    for fraction in (0.05, 0.3, 0.8):
        limit = predicted[0].peak_memory * (1 - fraction) + predicted[3].peak_memory * fraction
        monkeypatch.setattr(prediction, "read_device_memory", lambda device, limit=limit: limit)
        planned = choose(model, [1], keep=lambda layout: layout.num_microbatches == 1)
        fitting = [plan.step_time for plan in every_plan if plan.peak_memory <= limit]
        assert planned.prediction is not None and planned.prediction.fits
        assert planned.prediction.step_time == min(fitting) > none
