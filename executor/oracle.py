"""What one rank of a job of any size keeps and sends in a step: the executor's own trainer on tensors without data.

No figure comes from the simulator: parameters, gradients and optimizer states are those that torch makes, the peak is
that of torch's memory tracker, and communications are those that reach torch's dispatcher.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from executor import trainer as executor_trainer
from executor.fake_torch import Message, Tracker, alone, fake_rank, nbytes, really
from executor.host_memory import HostMemory
from executor.job import Job
from executor.model import Network
from executor.optimizer import states
from executor.recorder import Recorder
from executor.trainer import DTYPES, Trainer


class _SilentHeart:
    """Beats for nobody."""

    step = -1

    def beat(self, operation: str) -> None:
        """Do nothing."""


class FakeHostMemory(HostMemory):
    """Tensors without data on the host, which ``tracker`` does not count."""

    def __init__(self, recorder: Recorder, *, tracker: Tracker) -> None:
        super().__init__(recorder)
        self.tracker = tracker

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the host."""
        return self.tracker.uncounted(elements, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.tracker.leaves_out(tensor)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: what stays from step to step, and the most at any moment of a step.

    ``steps`` are the counters that Adam keeps, one fp32 number a parameter tensor; ``optimizer``
    is without them. ``kept_peak`` is the peak of a step that begins with the gradients of the one before, as zeros,
    which frameworks with buffers for gradients do; the executor drops those that are in no bucket.
    """

    parameters: int
    gradients: int
    optimizer: int
    steps: int
    peak: int
    kept_peak: int = 0


@dataclass(frozen=True, slots=True)
class RankOracle:
    """What a rank keeps, and what it sends in one step, in order.

    Parameters
    ----------
    largest_state
        Bytes of optimizer state of the parameter that has most.
    """

    memory: RankMemory
    messages: tuple[Message, ...]
    largest_state: int


class FakeTrainer(Trainer):
    """The executor's trainer, without what needs other ranks."""

    keeps_gradients = False

    def __init__(self, job: Job) -> None:
        super().__init__(job, Recorder(_SilentHeart()))  # type: ignore[arg-type]
        alone(self.runtime)

    def zero_gradients(self) -> None:
        """Drop gradients as the executor does, or keep all."""
        if not self.keeps_gradients:
            super().zero_gradients()

    def oracle(self, tracker: Tracker) -> RankOracle:
        """Return what the rank keeps, and what it did in the step that was tracked."""
        state = states(self.optimizer)
        each = [[value for value in values.values() if isinstance(value, Tensor)] for values in state.values()]
        kept = [value for values in each for value in values]
        memory = RankMemory(
            nbytes(self.parameters),
            nbytes(p.grad for p in self.parameters if p.grad is not None),
            nbytes(value for value in kept if value.dim()),
            nbytes(value for value in kept if not value.dim()),
            tracker.peak,
        )
        largest = max((nbytes(value for value in values if value.dim()) for values in each), default=0)
        return RankOracle(memory, tuple(tracker.messages), largest)


def rank_oracle(job: Job, rank: int, make: Callable[[Job], FakeTrainer] = FakeTrainer) -> RankOracle:
    """Return what ``rank`` does in any step but the first, with the trainer that ``make`` makes."""
    replaced = (
        (executor_trainer, "_device_mesh", really(executor_trainer._device_mesh)),
        (executor_trainer, "initialize", lambda network, seed: None),
        (Network, "to", lambda network, dtype: network),
    )
    with fake_rank(rank, job.plan.mesh.num_ranks, DTYPES[job.training.precision], replaced) as tracker:
        with (
            patch.object(executor_trainer, "DistributedDataParallel", tracker.unsynchronised),
            patch.object(executor_trainer, "HostMemory", partial(FakeHostMemory, tracker=tracker)),
        ):
            trainer = make(job)
        trainer.step(0)  # makes optimizer states
        tracker.reset()
        trainer.step(1)
        found = trainer.oracle(tracker)
        tracker.reset()
        trainer.keeps_gradients = True
        trainer.step(2)
        return replace(found, memory=replace(found.memory, kept_peak=tracker.peak))
