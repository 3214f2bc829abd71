"""Decompositions of operators whose reductions over the batch must be visible, as sums.

A loss of mean reduction becomes a sum over a number of elements, and batch norm computes its statistics as sums
over all samples, on whichever rank they are. torch's own gradient of some mean losses divides by the size of the local
part where the input is sharded; a sum has no such division.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""Numbers by which ATen names a reduction."""


def _reduce(points: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return points.sum() / points.numel()
    return points.sum() if reduction == SUM else points


def mean(points: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean of all elements, as their sum divided by their number."""
    return points.sum(dtype=dtype) / points.numel()


def mean_of_dims(
    points: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the mean along dims, as the sum divided by the number of elements."""
    dims = dim or list(range(points.dim()))
    return points.sum(dims, keepdim, dtype=dtype) / prod(points.shape[index] for index in dims)


def mse_loss(points: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Return the squared differences, reduced."""
    difference = points - target
    return _reduce(difference * difference, reduction)


def l1_loss(points: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Return the absolute differences, reduced."""
    return _reduce((points - target).abs(), reduction)


def huber_loss(points: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """Return Huber's loss: ``min(|d|, delta) * (|d| - min(|d|, delta) / 2)``, reduced."""
    distance = (points - target).abs()
    clamped_distance = distance.clamp(max=delta)
    return _reduce(clamped_distance * (distance - 0.5 * clamped_distance), reduction)


def smooth_l1_loss(points: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Return Huber's loss with ``delta = beta``, divided by ``beta``, reduced."""
    if beta == 0:
        return l1_loss(points, target, reduction)
    return _reduce(huber_loss(points, target, NONE, beta) / beta, reduction)


def binary_cross_entropy_with_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """Return ``softplus(-x) * target + softplus(x) * (1 - target)``, weighted and reduced."""
    positive_losses = functional.softplus(-logits) * target
    points = (positive_losses if pos_weight is None else positive_losses * pos_weight) + functional.softplus(logits) * (
        1 - target
    )
    return _reduce(points if weight is None else points * weight, reduction)


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy over the classes, which are in dim 1, as log-softmax, gather and masked sums."""
    classes = 0 if logits.dim() == 1 else 1
    logs = torch.log_softmax(logits, classes)
    if target.is_floating_point():
        return _soft_cross_entropy(logs, target, weight, reduction, label_smoothing, classes)
    class_share = label_smoothing / logits.shape[classes]
    points, sample_weights = _pick_losses(logs, target, weight, ignore_index, classes)
    if label_smoothing:
        all_losses = -(logs if weight is None else logs * _align_weight(weight, logs, classes)).sum(classes)
        points = (1 - label_smoothing) * points + class_share * all_losses * (target != ignore_index)
    return points.sum() / sample_weights.sum() if reduction == MEAN else _reduce(points, reduction)


def _soft_cross_entropy(
    logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float, classes: int
) -> Tensor:
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logs.shape[classes]
    weighted_logs = logs * target if weight is None else logs * target * _align_weight(weight, logs, classes)
    points = -weighted_logs.sum(classes)
    return points.sum() / (logs.numel() // logs.shape[classes]) if reduction == MEAN else _reduce(points, reduction)


def nll_loss(
    logs: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """Return the negative log-probability of each target's class, reduced over the targets that are not ignored."""
    points, sample_weights = _pick_losses(logs, target, weight, ignore_index, 0 if logs.dim() == 1 else 1)
    return points.sum() / sample_weights.sum() if reduction == MEAN else _reduce(points, reduction)


def _pick_losses(
    logs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of each target, 0 where the target is ignored, and the weight of each target."""
    is_counted = target != ignore_index
    # gather needs a class that exists, also where the target is ignored
    safe_target = torch.where(is_counted, target, 0)
    points = -logs.gather(classes, safe_target.unsqueeze(classes)).squeeze(classes)
    sample_weights = is_counted.to(logs.dtype)
    if weight is not None:
        sample_weights = sample_weights * weight[safe_target]
    return points * sample_weights, sample_weights


def _align_weight(weight: Tensor, reference: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if index == dim else 1 for index in range(reference.dim())])


def batch_norm(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the batch norm over all samples, the statistics of the batch, and the new running statistics.

    Ioffe and Szegedy 2015, "Batch normalization", algorithm 1; dim 1 is the channels.
    """
    other_dims = [dim for dim in range(image.dim()) if dim != 1]
    count = image.numel() // image.shape[1]
    if training:
        average = image.sum(other_dims) / count
        centred_image = image - _align_weight(average, image, 1)
        variance = (centred_image * centred_image).sum(other_dims) / count
        unbiased_variance = variance * (count / max(count - 1, 1))
        running_mean = (1 - momentum) * running_mean + momentum * average
        running_var = (1 - momentum) * running_var + momentum * unbiased_variance
    else:
        variance = running_var
        average = running_mean
        centred_image = image - _align_weight(average, image, 1)
    inverse_std = (variance + epsilon).rsqrt()
    result = centred_image * _align_weight(inverse_std, image, 1)
    if weight is not None:
        result = result * _align_weight(weight, image, 1)
    if bias is not None:
        result = result + _align_weight(bias, image, 1)
    return result, average, inverse_std, running_mean, running_var


def batch_norm_without_running(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch norm over all samples and the statistics of the batch; it has no running statistics."""
    zeros = image.new_zeros(image.shape[1])
    return batch_norm(image, weight, bias, zeros, zeros, True, momentum, epsilon)[:3]


def batch_norm_without_training(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch norm by the running statistics, and empty statistics of the batch."""
    result = batch_norm(image, weight, bias, running_mean, running_var, False, momentum, epsilon)[0]
    return result, image.new_zeros(0), image.new_zeros(0)


def instance_norm(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    *settings: float,
) -> Tensor:
    """Return the norm of each channel of each sample; ``settings`` are momentum, epsilon and whether to use cuDNN.

    torch's own decomposition makes the batch size a number of the graph; it is used only where the norm has running
    statistics. Ulyanov et al. 2016, "Instance normalization".
    """
    if running_mean is not None or not use_input_stats:
        arguments = running_mean, running_var, use_input_stats, *settings
        decomposition: Tensor = aten.instance_norm.default.decompose(image, weight, bias, *arguments)
        return decomposition
    _, epsilon, _ = settings
    inner = list(range(2, image.dim()))
    count = prod(image.shape[2:])
    centred_image = image - image.sum(inner, keepdim=True) / count
    variance = (centred_image * centred_image).sum(inner, keepdim=True) / count
    result = centred_image * (variance + epsilon).rsqrt()
    if weight is not None:
        result = result * _align_weight(weight, image, 1)
    return result if bias is None else result + _align_weight(bias, image, 1)


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the new value in the shape and dtype of the old value, over which it is written in place."""
    return source.to(target.dtype).expand(target.shape).clone()


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_of_dims,
    aten.mse_loss.default: mse_loss,
    aten.l1_loss.default: l1_loss,
    aten.huber_loss.default: huber_loss,
    aten.smooth_l1_loss.default: smooth_l1_loss,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.cross_entropy_loss.default: cross_entropy_loss,
    aten.nll_loss_nd.default: nll_loss,
    aten.nll_loss.default: nll_loss,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_running,
    aten._native_batch_norm_legit_no_training.default: batch_norm_without_training,
    aten.instance_norm.default: instance_norm,
    aten.copy.default: copy,
}
