"""What a step's loss is over the global batch, whatever part of it a rank and a microbatch has.

A loss is a mean over samples, or a pair (sum, weight): the step's loss is then the sum over the global batch over the
sum of weights, as of tokens that count. A mean over samples is checked: the loss of a batch must be the mean of the
losses of its halves. A forward that takes the number of labels of the step returns its share of the step's loss, and
another model of transformers whose loss is a mean over labels is weighted by their number.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwise.executor.modules.batches import count_samples, gather_samples, select_samples
from meshwise.executor.modules.calls import (
    LABELS,
    NUM_ITEMS,
    call_module,
    count_labels,
    is_of_transformers,
    mask_labels,
    may_take_num_items,
    takes_num_items,
)
from meshwise.executor.modules.quiet import keep_quiet, run_without_gradients
from meshwise.executor.modules.sharding import count_ranks
from meshwise.executor.recording.rank_files import UserError

LossFunction = Callable[[Any, Any], Any]
"""Returns the loss of ``(outputs, batch)``."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Fraction by which the loss of a batch may differ from the mean of its halves by rounding alone."""


MOST_CHECKED = 8
"""Samples of all ranks together on which a loss is checked, at least one a rank."""


class LossError(UserError):
    """A loss that cannot be added up over ranks and microbatches."""


class LossKind(Enum):
    """How the losses of parts of a batch make the loss of the whole."""

    SAMPLES = "mean over samples, or (sum, weight)"
    SHARES = "sum of shares, each divided by the number of labels of the step"
    LABELS = "mean over labels that count"


class WeightedLoss(NamedTuple):
    """The sum of a loss, and its weight; ``weight`` is ``None`` for a mean over samples, in ``total``.

    ``is_share`` says that ``total`` is this part's share of the loss of the step.
    """

    total: Tensor
    weight: Tensor | None = None
    is_share: bool = False

    @property
    def mean(self) -> Tensor:
        """The loss of this part alone."""
        return self.total if self.weight is None else self.total / self.weight


def compute_loss(
    module: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    kind: LossKind = LossKind.SAMPLES,
    num_items: Tensor | None = None,
) -> WeightedLoss:
    """Return the loss of a forward on a batch.

    Parameters
    ----------
    num_items
        For `LossKind.SHARES` the labels that count in the whole step.
    """
    outputs = call_module(module, batch, has_loss=loss is not None, num_items=num_items)
    result = read_loss(outputs, batch, loss)
    if result.weight is not None:
        return result
    if num_items is not None:
        return WeightedLoss(result.total, is_share=True)
    if kind is LossKind.LABELS and (count := count_labels(module, batch)) is not None:
        # a mean over no labels is no number; without a branch, so that it can be exported
        total = torch.where(count > 0, result.total, result.total.nan_to_num())
        return WeightedLoss(total * count, count)
    return result


def compute_own_loss(module: nn.Module, batch: Any, loss: LossFunction | None) -> WeightedLoss:
    """Return the loss of a batch that is a whole step, with its own number of labels where forward takes that."""
    num_items = count_labels(module, batch) if takes_num_items(module) and loss is None else None
    return compute_loss(module, batch, loss, num_items=num_items)


def measure_loss(module: nn.Module, batch: Any, *, loss: LossFunction | None) -> dict[str, Any]:
    """Return the loss of a batch as a figure of an evaluation, weighted by labels where it is a mean over them."""
    num_items = count_labels(module, batch) if loss is None and takes_num_items(module) else None
    kind = LossKind.LABELS if loss is None and is_of_transformers(module) else LossKind.SAMPLES
    part = compute_loss(module, batch, loss, kind, num_items)
    if part.is_share and num_items is not None:
        return {"loss": (part.total * num_items, num_items)}
    return {"loss": part.total if part.weight is None else (part.total, part.weight)}


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
    has_shares
        Whether losses are shares of the step's loss.
    is_counted
        Whether this rank's losses count; else another rank has the same ones.

    When the losses are reduced, ``is_mean`` says whether they are means over samples, so that ranks need equally many.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_parts: int,
        device: torch.device,
        *,
        has_shares: bool = False,
        is_counted: bool = True,
    ) -> None:
        self.num_microbatches, self.num_parts, self.device = num_microbatches, num_parts, device
        self.total: Tensor | None = None
        self.weight: Tensor | None = None
        self.is_mean, self.has_shares, self.is_counted = True, has_shares, is_counted

    def add(self, loss: WeightedLoss) -> Tensor:
        """Add the loss of a microbatch, and return what backward begins with."""
        is_mean = loss.weight is None and not loss.is_share
        part = loss.total / self.num_microbatches if is_mean else loss.total
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
        own = (self.total, self.weight) if self.is_counted else (None, None)
        sums = torch.stack([nothing if x is None else x.reshape(()) for x in (*own, has_weight)])
        if count_ranks() > 1:
            dist.all_reduce(sums)
        total, total_weight, num_weights = sums.tolist()
        self.is_mean = not num_weights and not self.has_shares
        if self.has_shares:
            return total, float(self.num_parts)
        if self.is_mean:
            return total / self.num_parts, 1.0
        if not total_weight > 0:
            raise LossError(f"the weights of a step's losses sum to more than 0, met {total_weight:g}")
        return total / total_weight, self.num_parts / total_weight


def list_batch_norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return the parts of a module, with their names, that take statistics over the samples of a batch."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]


def find_loss_kind(module: nn.Module, batch: Any, loss: LossFunction | None) -> LossKind:
    """Return how the losses of a module add up, by trying models of transformers on first samples of all ranks."""
    if loss is not None:
        return LossKind.SAMPLES
    if takes_num_items(module):
        return LossKind.SHARES
    if not is_of_transformers(module):
        return LossKind.SAMPLES
    kinds = (LossKind.SAMPLES, LossKind.LABELS, LossKind.SHARES)
    place = kinds.index(_try_labels(module, batch))
    if dist.is_initialized():  # samples may be of this rank alone
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place)
        place = max(places)
    return kinds[place]


def _try_labels(module: nn.Module, batch: Any) -> LossKind:
    samples = gather_samples(batch, MOST_CHECKED)
    count = count_labels(module, samples)
    if not count:
        return LossKind.SAMPLES
    with keep_quiet(module), torch.no_grad():  # models of transformers take no gradients themselves
        if may_take_num_items(module):
            once, twice = (float(compute_loss(module, samples, None, num_items=count * n).total) for n in (1, 2))
            if abs(once - 2 * twice) <= 1e-2 * abs(once):
                return LossKind.SHARES
        return LossKind.LABELS if _is_mean_over_labels(module, samples) else LossKind.SAMPLES


def _is_mean_over_labels(module: nn.Module, samples: Any) -> bool:
    """Return whether a loss is a mean over the labels that count, of samples with different numbers of them."""
    num_samples = count_samples(samples) // 2 * 2
    if num_samples < 2 or not isinstance(samples, Mapping) or samples[LABELS].dim() < 2:
        return False
    masked = mask_labels(select_samples(samples, 0, num_samples))
    half = num_samples // 2
    ranges = ((0, num_samples), (0, half), (half, num_samples))
    parts = [compute_loss(module, select_samples(masked, *ends), None, LossKind.LABELS) for ends in ranges]
    totals = [float(part.total) for part in parts]
    limit = 10 * TOLERANCES.get(parts[0].total.dtype, 1e-3) * max(map(abs, totals))
    return abs(totals[0] - totals[1] - totals[2]) <= limit


def require_mean_over_samples(
    module: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    tolerance: float | None = None,
    kind: LossKind = LossKind.SAMPLES,
) -> bool:
    """Raise `LossError` where the loss of a batch is not the mean of the losses of its halves.

    It runs without gradients on the first samples of all ranks. Of a pair (sum, weight) the sums are checked. A forward
    that draws other random numbers than those of dropout cannot be checked.

    Returns whether it was checked: not with one sample, random draws, or losses that are no numbers.
    """
    samples = gather_samples(batch, MOST_CHECKED)
    num_samples = count_samples(samples) // 2 * 2
    if num_samples < 2:
        return False
    half = num_samples // 2
    ranges = ((0, num_samples), (0, num_samples), (0, half), (half, num_samples))
    parts = [select_samples(samples, first, end) for first, end in ranges]
    num_items = count_labels(module, parts[0]) if kind is LossKind.SHARES else None

    def compute_losses() -> list[WeightedLoss]:
        losses = (compute_loss(module, part, loss, kind, num_items) for part in parts)
        return [item._replace(total=item.total.detach()) for item in losses]

    with keep_quiet(module):
        losses = run_without_gradients(compute_losses)
    whole, again, first_half, second_half = (float(item.total) for item in losses)
    limit = TOLERANCES.get(losses[0].total.dtype, 1e-3) if tolerance is None else tolerance
    limit *= max(abs(whole), abs(first_half), abs(second_half), 1e-6)
    if abs(whole - again) > limit:
        return False
    if losses[0].is_share:
        expected, rule = first_half + second_half, f"a loss over {NUM_ITEMS} is a sum over samples"
    elif losses[0].weight is not None:
        expected, rule = first_half + second_half, "the sum of a loss (sum, weight) is that of its samples"
    else:
        expected, rule = (first_half + second_half) / 2, "a loss is a mean over samples"
    if abs(whole - expected) > limit:
        raise LossError(
            f"{rule}, so that ranks and microbatches add up to it: met {whole:.6g} for {num_samples} samples, and "
            f"{first_half:.6g} and {second_half:.6g} for their halves; nearest: return (sum, weight), divide by "
            f"{NUM_ITEMS} that forward takes, or keep the batch whole"
        )
    return isfinite(whole - expected)
