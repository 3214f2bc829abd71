"""Gradient clipping: all gradients are scaled so that the norm of them together is at most `MAX_NORM`.

torch's ``clip_grad_norm_`` takes tensors of one mesh only ("All operands in aten.stack.default must have the same
mesh"), and knows nothing of other pipeline stages. Here squares are summed over the axes along which a gradient is
cut, and then over pipeline ranks.

References
----------
Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.tensors import local

MAX_NORM = 1.0
"""The norm that the field clips to (Brown et al. 2020, "Language models are few-shot learners", appendix B)."""
_EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm."""


class Part(NamedTuple):
    """What a rank has of the gradient of a parameter, and the axes along which others have other parts of it."""

    parameter: nn.Parameter
    values: Tensor
    axes: tuple[str, ...]


def whole_parts(parameters: Iterable[nn.Parameter]) -> Iterator[Part]:
    """Yield the gradients of some parameters, of those that have one."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield Part(parameter, local(parameter.grad), cut_axes(parameter.grad))


def clip(
    parts: Sequence[Part], mesh: DeviceMesh, sums: tuple[str, ...], over: str, copies: Collection[nn.Parameter] = ()
) -> float:
    """Scale gradients in place and return their norm before.

    Parameters
    ----------
    parts
        Of gradients that are cut along the same axes on all ranks, in the same order.
    mesh
        All ranks.
    sums
        The axes along which gradients may be cut.
    over
        The axis whose ranks hold different parameters.
    copies
        Parameters that are kept a second time and count there.
    """
    uncounted = {id(copy) for copy in copies}
    counted = (part for part in parts if id(part.parameter) not in uncounted)
    squares = _squares(counted, torch.device(mesh.device_type))
    with torch.no_grad():
        for axis in sums:
            cut = [key for key in squares if axis in key]
            if cut:
                together = torch.stack([squares[key] for key in cut])
                dist.all_reduce(together, group=mesh[axis].get_group())
                squares |= dict(zip(cut, together, strict=True))
        total = sum(squares.values(), torch.zeros((), dtype=torch.float64, device=mesh.device_type))
        dist.all_reduce(total, group=mesh[over].get_group())
        norm = float(total.sqrt())
        for part in parts:
            part.values.mul_(scale(norm))
    return norm


def scale(norm: float) -> float:
    """Return what gradients of a norm are multiplied by.

    >>> scale(0.5), round(scale(4.0), 6)
    (1.0, 0.25)
    """
    return min(1.0, MAX_NORM / (norm + _EPSILON))


def _squares(parts: Iterable[Part], device: torch.device) -> dict[tuple[str, ...], Tensor]:
    """Return the sum of squares on this rank of the gradients that are cut along the same axes."""
    found: dict[tuple[str, ...], Tensor] = {}
    for part in parts:
        square = part.values.double().square().sum().to(device)
        found[part.axes] = found[part.axes] + square if part.axes in found else square
    return found


def cut_axes(gradient: Tensor) -> tuple[str, ...]:
    """Return the names of the axes along which ranks hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    axes = zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True)
    return tuple(axis for axis, placement in axes if not placement.is_replicate())
