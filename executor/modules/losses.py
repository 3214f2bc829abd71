"""What a step's loss is over the global batch, whatever part of it a rank and a microbatch has.

A loss is a mean over samples, or a pair (sum, weight): the step's loss is then the sum over the global batch over the
sum of weights, as of tokens that count. A mean over samples is checked: the loss of a batch must be the mean of the
losses of its halves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwise.executor.modules.batches import count_samples, gather_samples, select_samples
from meshwise.executor.modules.quiet import keep_quiet
from meshwise.executor.recording.rank_files import UserError

LossFunction = Callable[[Any, Any], Any]
"""Returns the loss of ``(outputs, batch)``."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Fraction by which the loss of a batch may differ from the mean of its halves by rounding alone."""


MOST_CHECKED = 8
"""Samples of all ranks together on which a loss is checked, at least one a rank."""


class LossError(UserError):
    """A loss that cannot be added up over ranks and microbatches."""


class WeightedLoss(NamedTuple):
    """The sum of a loss, and its weight; ``weight`` is ``None`` for a mean over samples, in ``total``."""

    total: Tensor
    weight: Tensor | None = None


def call_module(module: nn.Module, batch: Any) -> Any:
    """Return the outputs of a module: a dict gives arguments by name, a tuple or list by position."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def read_loss(outputs: Any, batch: Any, loss: LossFunction | None) -> WeightedLoss:
    """Return the loss of a forward; `LossError` where there is none.

    Parameters
    ----------
    loss
        Its function of outputs and batch; without one outputs are the loss, or have it as ``loss`` (transformers).
    """
    value = outputs if loss is None else loss(outputs, batch)
    if loss is None and not isinstance(value, Tensor | tuple):
        value = value.get("loss") if isinstance(value, dict) else getattr(value, "loss", None)
    if isinstance(value, tuple) and len(value) == 2 and all(map(_is_scalar, value)):
        total, weight = value
        return WeightedLoss(total, torch.as_tensor(weight, device=total.device).detach())
    if isinstance(value, tuple) and loss is None and value and _is_scalar(value[0]):
        value = value[0]  # (loss, outputs ...)
    if not isinstance(value, Tensor) or not _is_scalar(value):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise LossError(
            f"a forward returns a scalar loss or a pair (sum, weight), met {shape}; nearest: a function "
            "loss(outputs, batch)"
        )
    return WeightedLoss(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


class StepLoss:
    """Adds up the losses of a rank's microbatches, and then those of all ranks.

    Parameters
    ----------
    num_microbatches
        Those of a rank.
    num_parts
        Ranks with samples of their own; other ranks add nothing.
    """

    def __init__(self, num_microbatches: int, num_parts: int, device: torch.device) -> None:
        self.num_microbatches, self.num_parts, self.device = num_microbatches, num_parts, device
        self.total: Tensor | None = None
        self.weight: Tensor | None = None
        self.is_mean = True

    def add(self, loss: WeightedLoss) -> Tensor:
        """Add the loss of a microbatch, and return what backward begins with."""
        part = loss.total if loss.weight is not None else loss.total / self.num_microbatches
        detached_part = part.detach().double()
        self.total = detached_part if self.total is None else self.total + detached_part
        if loss.weight is not None:
            weight = loss.weight.double()
            self.weight = weight if self.weight is None else self.weight + weight
        return part

    def reduce(self) -> tuple[float, float]:
        """Return the loss of the global batch, and the factor of gradients that are means over ranks."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        has_weight = nothing if self.weight is None else nothing + 1
        sums = torch.stack([nothing if x is None else x.reshape(()) for x in (self.total, self.weight, has_weight)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        total, total_weight, num_weights = sums.tolist()
        self.is_mean = not num_weights
        if self.is_mean:
            return total / self.num_parts, 1.0
        if not total_weight > 0:
            raise LossError(f"the weights of a step's losses sum to more than 0, met {total_weight:g}")
        return total / total_weight, self.num_parts / total_weight


def list_batch_norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return the parts of a module, with their names, that take statistics over the samples of a batch."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]


def require_mean_over_samples(
    module: nn.Module, batch: Any, loss: LossFunction | None, tolerance: float | None = None
) -> None:
    """Raise `LossError` where the loss of a batch is not the mean of the losses of its halves.

    It runs without gradients on the first samples of all ranks. Of a pair (sum, weight) the sums are checked. A forward
    that draws other random numbers than those of dropout cannot be checked.
    """
    samples = gather_samples(batch, MOST_CHECKED)
    num_samples = count_samples(samples) // 2 * 2
    if num_samples < 2:
        return
    half = num_samples // 2
    ranges = ((0, num_samples), (0, num_samples), (0, half), (half, num_samples))
    with keep_quiet(module), torch.no_grad():
        parts = [select_samples(samples, first, end) for first, end in ranges]
        losses = [read_loss(call_module(module, part), part, loss) for part in parts]
    whole, again, first_half, second_half = (float(item.total) for item in losses)
    limit = TOLERANCES.get(losses[0].total.dtype, 1e-3) if tolerance is None else tolerance
    limit *= max(abs(whole), abs(first_half), abs(second_half), 1e-6)
    if abs(whole - again) > limit:
        return
    if losses[0].weight is not None:
        expected, rule = first_half + second_half, "the sum of a loss (sum, weight) is that of its samples"
    else:
        expected, rule = (first_half + second_half) / 2, "a loss is a mean over samples"
    if abs(whole - expected) > limit:
        raise LossError(
            f"{rule}, so that ranks and microbatches add up to it: met {whole:.6g} for {num_samples} samples, and "
            f"{first_half:.6g} and {second_half:.6g} for their halves; nearest: return (sum, weight), or keep the "
            "batch whole"
        )
