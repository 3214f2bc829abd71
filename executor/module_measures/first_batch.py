"""A user's module and his first batch in this process: how many samples it has, and its operator graph."""

import sys
from contextlib import redirect_stdout
from typing import Any

from torch import Tensor, nn

from meshwise.executor.capture.capture import capture, format_error
from meshwise.executor.modules.batches import count_samples, count_tokens, list_tensors, map_tensors, select_samples
from meshwise.executor.modules.losses import LossFunction, compute_own_loss
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import load_source, next_batch, open_batches
from meshwise.executor.user_training.user_file import UserFile
from meshwise.simulator.operator_graph import OperatorGraph

CAPTURED_SAMPLES = 3
"""Samples with which a module is captured: its graph is of one, and dims of this size are rare."""


class FirstBatch:
    """The first batch of a user's file, of all ranks together."""

    def __init__(self, job: TrainJob) -> None:
        self.job = job
        with redirect_stdout(sys.stderr):  # the user's file may print
            self.user_file: UserFile = load_source(job)
            self.batch = next_batch(open_batches(job, self.user_file, 0, 1, 0), self.user_file, 0)

    @property
    def samples(self) -> int:
        """Samples of a step on all ranks."""
        return count_samples(self.batch)

    @property
    def tokens(self) -> int | None:
        """Tokens of a step on all ranks; ``None`` where the data are none."""
        return count_tokens(self.batch)

    def capture(self) -> OperatorGraph:
        """Return the operator graph of the module with its loss.

        Raises
        ------
        ValueError
            Where it cannot be captured, with the reason.
        """
        with redirect_stdout(sys.stderr):
            try:
                module = self.user_file.build_model(self.job.seed)
                samples = select_samples(self.batch, 0, min(self.samples, CAPTURED_SAMPLES))
                wrapped = _LossModule(module, samples, self.user_file.loss)
                return capture(wrapped, list_tensors(samples), "module").graph
            except ValueError:
                raise
            except Exception as error:  # torch.export and the user's own code raise anything
                raise ValueError(format_error(error)) from error


class _LossModule(nn.Module):
    """A module that takes the tensors of a batch in order and returns the loss."""

    def __init__(self, module: nn.Module, batch: Any, loss: LossFunction | None) -> None:
        super().__init__()
        self.module, self.loss, self.batch = module, loss, batch

    def forward(self, *tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        batch = map_tensors(self.batch, lambda tensor: next(remaining))
        return compute_own_loss(self.module, batch, self.loss).mean
