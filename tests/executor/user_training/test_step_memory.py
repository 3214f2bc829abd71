"""A recorded step has what stays between steps, and what it needs itself."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.user_training.step_memory import StepMemory, count_resident_bytes


def test_a_step_keeps_states_and_needs_gradients() -> None:
    module = nn.Linear(100, 50, bias=False)
    step = parallelize(module, loss=lambda outputs, batch: outputs.square().mean())
    batch = torch.ones(8, 100)
    weight, data = 100 * 50 * 4, 8 * 100 * 4
    assert count_resident_bytes(step, batch) == weight + data
    step(batch)
    scalar = 4  # AdamW counts its steps
    assert count_resident_bytes(step, batch) == 3 * weight + data + scalar
    memory = StepMemory()
    with memory.record(step, batch):
        step(batch)
    assert memory.peak is not None
    # the gradient, and for the update at most two temporary tensors of a weight; and the state of draws
    assert 4 * weight + data <= memory.peak <= 7 * weight + data
