"""A user's module and his first batch in this process: how many samples it has, and its operator graph."""

import sys
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from meshwise.executor.capture.capture import capture, format_error
from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import take_tensors
from meshwise.executor.modules.batches import count_samples, count_tokens, list_tensors, select_samples, split_evenly
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import LossFunction, compute_own_loss
from meshwise.executor.modules.quiet import keep_quiet, run_without_gradients
from meshwise.executor.modules.states import find_newest, require_own_names
from meshwise.executor.recording.rank_files import UserError
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
            self.batch = self._read(1)

    def _read(self, num_ranks: int) -> Any:
        """Return the first batch of the first of so many ranks."""
        try:
            return next_batch(open_batches(self.job, self.user_file, 0, num_ranks, 0), self.user_file, 0)
        except UserError as error:
            if self.user_file.divides_data():  # of a rank that a run may not have
                raise ValueError(str(error)) from error
            raise

    def require_parts(self, layout: ModuleLayout) -> None:
        """Raise `UserError` where the batch does not divide into the data ranks and microbatches of a layout."""
        if self.user_file.divides_data() or layout.data * layout.num_microbatches == 1:
            return
        with redirect_stdout(sys.stderr):
            split_evenly(self._read(layout.data), layout.num_microbatches, "microbatches")

    def require_checkpoint(self, checkpoints: Path) -> None:
        """Raise `UserError` where the newest of a run's checkpoints is of another module."""
        with redirect_stdout(sys.stderr):
            module = self.user_file.start_model(self.job.seed).module
        require_own_names(find_newest(checkpoints), module)

    @property
    def samples(self) -> int:
        """Samples of a step on all ranks."""
        return count_samples(self.batch)

    @property
    def tokens(self) -> int | None:
        """Tokens of a step on all ranks; ``None`` where the data are none."""
        return count_tokens(self.batch)

    @cached_property
    def has_weight(self) -> bool:
        """Whether the loss is a pair (sum, weight)."""
        with redirect_stdout(sys.stderr):
            return has_weighted_loss(self.user_file.build_model(self.job.seed), self.batch, self.user_file.loss)

    def capture(self) -> OperatorGraph:
        """Return the operator graph of the module with its loss."""
        return self.capture_module().graph

    def capture_module(self) -> CapturedModule:
        """Return the module with its loss, as `capture_loss` does."""
        with redirect_stdout(sys.stderr):
            module = self.user_file.build_model(self.job.seed)
            return capture_loss(module, self.batch, self.user_file.loss)


def capture_loss(module: nn.Module, batch: Any, loss: LossFunction | None) -> CapturedModule:
    """Return a module with its loss, captured; blocks and operators have the names of a cut module's.

    Raises
    ------
    ValueError
        Where it cannot be captured, with the reason.
    """
    try:
        samples = select_samples(batch, 0, min(count_samples(batch), CAPTURED_SAMPLES))
        with take_tensors(module, samples, loss):
            return capture(module, list_tensors(samples), type(module).__name__.lower())
    except ValueError:
        raise
    except Exception as error:  # torch.export and the user's own code raise anything
        raise ValueError(format_error(error)) from error


def has_weighted_loss(module: nn.Module, batch: Any, loss: LossFunction | None) -> bool:
    """Return whether a loss is a pair (sum, weight)."""
    samples = select_samples(batch, 0, min(count_samples(batch), CAPTURED_SAMPLES))
    with keep_quiet(module):
        return run_without_gradients(lambda: compute_own_loss(module, samples, loss)).weight is not None
