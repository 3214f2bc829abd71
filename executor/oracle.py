"""What one rank of a job of any size keeps and sends in a step: the executor's own trainer on tensors without data.

No figure comes from the simulator: parameters, gradients and optimizer states are those that torch makes, the peak is
that of torch's memory tracker, and communications are those that reach torch's dispatcher.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from executor import trainer as executor_trainer
from executor.accelerator import Accelerator
from executor.fake_torch import Message, Tracker, alone, fake_rank, nbytes, really
from executor.host_memory import HostMemory
from executor.job import Job
from executor.model import Network
from executor.optimizer import states
from executor.recorder import Recorder
from executor.tensors import local
from executor.trainer import DTYPES, Trainer
from simulator.brief import brief


class _SilentHeart:
    """Beats for nobody."""

    step = -1

    def beat(self, operation: str) -> None:
        """Do nothing."""


class FakeHostMemory(HostMemory):
    """Tensors without data on the host, which ``tracker`` does not count."""

    def __init__(self, recorder: Recorder, accelerator: Accelerator, *, tracker: Tracker) -> None:
        super().__init__(recorder, accelerator)
        self.tracker = tracker

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the host."""
        return self.tracker.uncounted(elements, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.tracker.leaves_out(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host: itself or a copy."""
        return tensor if self.holds(tensor) else self.copy(tensor)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: what stays from step to step, and the most at any moment of a step.

    Shards of 16 bits are the main weights, which are among ``optimizer``.
    ``steps`` are the counters that Adam keeps, one fp32 number a parameter tensor; ``optimizer`` is without them.
    """

    parameters: int
    gradients: int
    optimizer: int
    steps: int
    peak: int


@dataclass(frozen=True, slots=True)
class RankOracle:
    """What a rank keeps, and what it sends in one step, in order."""

    memory: RankMemory
    messages: tuple[Message, ...]

    __repr__ = brief()


class FakeTrainer(Trainer):
    """The executor's trainer, without what needs other ranks."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Recorder(_SilentHeart()))  # type: ignore[arg-type]
        alone(self.runtime)

    def oracle(self, tracker: Tracker) -> RankOracle:
        """Return what the rank keeps, and what it did in the step that was tracked."""
        each = (values.values() for values in states(self.optimizer).values())
        kept = [value for values in each for value in values if isinstance(value, Tensor)]
        here = [parameter for parameter in self.parameters if not self.host.holds(local(parameter.detach()))]
        mains = [parameter for parameter in here if parameter.dtype is not DTYPES[self.job.training.precision]]
        memory = RankMemory(
            nbytes(here) - nbytes(mains),
            nbytes(p.grad for p in here if p.grad is not None),
            nbytes(value for value in kept if value.dim()) + nbytes(mains),
            nbytes(value for value in kept if not value.dim()),
            tracker.peak,
        )
        return RankOracle(memory, tuple(tracker.messages))


def _converted(network: Network, dtype: torch.dtype) -> Network:
    """Do as ``Module.to`` does, which refuses tensors that something knows by weak references, as the tracker does."""
    made: dict[Tensor, nn.Parameter] = {}  # tied ones once
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.dtype is not dtype:
                setattr(module, name, made.setdefault(parameter, nn.Parameter(parameter.detach().to(dtype))))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return network


def rank_oracle(job: Job, rank: int, make: Callable[[Job], FakeTrainer] = FakeTrainer) -> RankOracle:
    """Return what ``rank`` does in any step but the first, with the trainer that ``make`` makes."""
    replaced = (
        (executor_trainer, "_device_mesh", really(executor_trainer._device_mesh)),
        (executor_trainer, "initialize", lambda network, seed: None),
        (Network, "to", _converted),
    )
    with fake_rank(rank, job.plan.mesh.num_ranks, replaced) as tracker:
        with (
            patch.object(executor_trainer, "DistributedDataParallel", tracker.unsynchronised),
            patch.object(executor_trainer, "HostMemory", partial(FakeHostMemory, tracker=tracker)),
        ):
            trainer = make(job)
        trainer.step(0)  # makes optimizer states
        tracker.reset()
        trainer.step(1)
        return trainer.oracle(tracker)
