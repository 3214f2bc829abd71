"""The most bytes of tensors that one step of a rank has on cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.cut_modules.step import CutStep
from meshwise.executor.modules.batches import list_tensors
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.tensor_memory import count_bytes, record_tensor_peak

RECORDED_STEP = 2
"""The step of a run that is recorded: optimizer states are there, and buckets of gradients as they stay."""
FEWEST_STEPS = 5
"""Steps of a run of which one is recorded, which takes longer: the median step is another one."""


class StepMemory:
    """Records a step; ``peak`` is ``None`` before that."""

    def __init__(self) -> None:
        self.peak: int | None = None

    @contextmanager
    def record(self, step: TrainingStep | CutStep, batch: Any) -> Iterator[None]:
        """Record the body, a step on a batch."""
        resident = count_resident_bytes(step, batch)
        with record_tensor_peak(keeps_results=False) as peak:  # gradients are dropped
            yield
        self.peak = resident + peak.size


def count_resident_bytes(step: TrainingStep | CutStep, batch: Any) -> int:
    """Return the bytes of what a rank has between two steps: parameters, states, buffers and the next batch.

    `DistributedDataParallel` also has buckets of all gradients, in memory of its own.
    """
    states = (
        value
        for row in step.optimizer_states
        for value in row.values()
        if isinstance(value, Tensor) and not (isinstance(step, TrainingStep) and step.holds_on_host(value))
    )
    module = step.module
    resident = count_bytes(chain(module.parameters(), module.buffers(), states, list_tensors(batch)))
    if not isinstance(module, DistributedDataParallel):
        return resident
    return resident + sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters() if parameter.requires_grad
    )
