"""Batch normalisation over the samples of all ranks, as one process has it.

torch's own ``SyncBatchNorm`` needs GPUs; this forward has the same statistics by differentiable sums, on any device.
Statistics are the sums of values and of squared distances from the mean, in the dtype of the input or fp32.

References
----------
Ioffe and Szegedy 2015, "Batch normalization", algorithm 1; torch, ``nn.BatchNorm2d`` (running statistics: momentum and
the unbiased variance).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwise.executor.modules.losses import list_batch_norms


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks; its gradient is summed too, since every rank's loss depends on it."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, differentiable on each."""
    result: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return result


def normalise_globally(module: nn.Module) -> int:
    """Have every batch normalisation of a module take its statistics over all ranks; return their number."""
    norms = [norm for _, norm in list_batch_norms(module)]
    for norm in norms:
        plain: Any = norm
        plain.forward = partial(_forward, norm, norm.forward)
    return len(norms)


def _forward(norm: _BatchNorm, plain_forward: Any, x: Tensor) -> Tensor:
    """Return the normalised input; as torch does it where the statistics are not those of the batch."""
    takes_statistics = norm.training or norm.running_mean is None
    if not takes_statistics:
        return _normalise_by_running(norm, plain_forward, x)
    dims = [0, *range(2, x.dim())]
    values = x.float() if x.dtype.itemsize == 2 else x
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = torch.tensor([x.numel() // x.shape[1]], dtype=values.dtype, device=x.device)
    sums = sum_over_ranks(torch.cat((values.sum(dims), count)))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = values - mean.view(shape)
    variance = sum_over_ranks((centred * centred).sum(dims)) / total
    if norm.training and norm.track_running_stats and norm.running_mean is not None:
        _update_statistics(norm, mean.detach(), variance.detach(), float(total))
    normalised = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normalised = normalised * norm.weight.view(shape) + norm.bias.view(shape)
    return normalised.to(x.dtype)


def _normalise_by_running(norm: _BatchNorm, plain_forward: Any, x: Tensor) -> Tensor:
    """Return the input normalised by running statistics; torch does not take those of fp32 with parameters of bf16."""
    running = norm.running_mean
    assert running is not None
    if not norm.affine or norm.weight.dtype == running.dtype:
        result: Tensor = plain_forward(x)
        return result
    weight, bias = norm.weight.to(running.dtype), norm.bias.to(running.dtype)
    values = F.batch_norm(x.to(running.dtype), running, norm.running_var, weight, bias, eps=norm.eps)
    return values.to(x.dtype)


def _update_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor, total: float) -> None:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    unbiased_variance = variance * total / max(total - 1, 1)
    norm.running_var.lerp_(unbiased_variance.to(norm.running_var.dtype), momentum)
