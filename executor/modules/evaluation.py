"""Evaluation of a module on the samples of all ranks: figures are summed with their weights, and then divided."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.executor.modules.batches import count_samples
from meshwise.executor.modules.quiet import keep_draws, reshard, run_without_gradients
from meshwise.executor.recording.rank_files import UserError

EvaluateFunction = Callable[[nn.Module, Any], Any]
"""Returns a number of ``(module, batch)``, a pair (sum, weight), or a dict of these by name."""

VALUE = "value"
"""The name of a figure that has none."""
_FORMS = "evaluate(model, batch) returns a number, a pair (sum, weight) or a dict of them"


class EvaluationError(UserError):
    """Figures that cannot be summed over batches and ranks."""


class EvaluationBatch(NamedTuple):
    """A rank's part of a batch; one that is not counted only keeps the ranks together, which run a module together."""

    batch: Any
    is_counted: bool = True


class _Sums:
    """Sums of figures and of their weights, by name."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[float, float]] = {}

    def add(self, figures: Any, num_samples: int) -> None:
        """Add what a user's function returned for some samples."""
        named_figures = figures if isinstance(figures, Mapping) else {VALUE: figures}
        for name, figure in named_figures.items():
            total, weight = self.totals.get(str(name), (0.0, 0.0))
            own_total, own_weight = _read_figure(figure, num_samples)
            self.totals[str(name)] = total + own_total, weight + own_weight

    def reduce(self) -> dict[str, float]:
        """Return the figures over the samples of all ranks."""
        rank_totals: list[Any] = [self.totals]
        if dist.is_initialized():
            rank_totals = [None] * dist.get_world_size()
            dist.all_gather_object(rank_totals, self.totals)
        names = sorted({name for totals in rank_totals for name in totals})
        if not names:
            raise EvaluationError("evaluation_data() has at least one sample, met none")
        return {name: _divide(name, [totals[name] for totals in rank_totals if name in totals]) for name in names}


def _read_figure(figure: Any, num_samples: int) -> tuple[float, float]:
    """Return the sum and the weight of a figure; a number is a mean over samples."""
    is_pair = isinstance(figure, tuple | list) and len(figure) == 2
    try:
        total, weight = map(_to_float, figure) if is_pair else (_to_float(figure) * num_samples, float(num_samples))
    except (TypeError, ValueError, RuntimeError):
        shape = list(figure.shape) if isinstance(figure, Tensor) else type(figure).__name__
        raise EvaluationError(f"{_FORMS}, met {shape}") from None
    return total, weight


def _to_float(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _divide(name: str, pairs: list[tuple[float, float]]) -> float:
    total, weight = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if not weight > 0:
        raise EvaluationError(f"the weights of {name} sum to more than 0 over all samples, met {weight:g}")
    return total / weight


def evaluate_module(
    module: nn.Module, function: EvaluateFunction, batches: Iterable[EvaluationBatch], device: torch.device
) -> dict[str, float]:
    """Return the figures of a module over the batches of all ranks, by name.

    Ranks may have different numbers of batches: those that have no more run their last one again, uncounted, for under
    shards all ranks run a module together.

    Raises
    ------
    EvaluationError
        Where figures cannot be summed, or a rank has no batch while others have.
    """
    sums, last_batch = _Sums(), None
    for item in _keep_together(batches, device):
        if item is None and last_batch is None:
            raise EvaluationError("evaluation_data() has a batch for every rank, met a rank without; nearest: data=1")
        current = item if item is not None else EvaluationBatch(last_batch, False)
        batch = current.batch
        own_batch = dict(batch) if isinstance(batch, dict) else batch  # users take labels out of theirs
        figures = run_without_gradients(partial(function, module, own_batch))
        if current.is_counted:
            sums.add(figures, count_samples(batch))
        last_batch = batch
    return sums.reduce()


def _keep_together(batches: Iterable[EvaluationBatch], device: torch.device) -> Iterator[EvaluationBatch | None]:
    """Yield this rank's batches, and then ``None`` as long as another rank has one."""
    iterator = iter(batches)
    while True:
        item = next(iterator, None)
        is_any = torch.tensor(float(item is not None), device=device)
        if dist.is_initialized():
            dist.all_reduce(is_any, dist.ReduceOp.MAX)
        if not is_any:
            return
        yield item


@contextmanager
def keep_training(module: nn.Module) -> Iterator[None]:
    """Run the body without gradients, in the mode of evaluation; modes, draws and shards are then as before."""
    modes = {part: part.training for part in module.modules()}
    draws = np.random.get_state(), random.getstate()
    module.eval()
    try:
        with torch.no_grad(), keep_draws():
            yield
    finally:
        np.random.set_state(draws[0])
        random.setstate(draws[1])
        for part, is_training in modes.items():
            part.training = is_training
        reshard(module)
