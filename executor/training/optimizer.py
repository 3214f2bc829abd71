"""The optimizer of a rank: plain, with its states sharded over the data axis (ZeRO 1), or on a parameter server.

Gradient clipping scales all gradients so that their global norm is at most `MAX_NORM` [1]_. torch's ``clip_grad_norm_``
takes tensors of one mesh only ("All operands in aten.stack.default must have the same mesh"), and knows nothing of
other pipeline stages. Here the squares are summed over the axes along which a gradient is cut, and then over pipeline
ranks.

References
----------
.. [1] Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwise.executor.options import PEAKS
from meshwise.executor.parallel.sharded_states import (
    CombinedOptimizer,
    OptimizerKind,
    SplitOptimizer,
    StatePlacement,
    list_ranges,
)
from meshwise.executor.recording.accelerator import CORE
from meshwise.executor.recording.tensors import fill, flatten, to_local
from meshwise.strategies.plan.plan import Plan

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": PEAKS["adamw"]}),
    "sgd": (torch.optim.SGD, {"lr": PEAKS["sgd"], "momentum": 0.9}),
}
PLAIN_OPTIONS = CORE.optimizer_options
"""Options of an optimizer that updates one parameter and runs one operation after the other."""


def find_optimizer(name: str, implementation: Mapping[str, Any] = PLAIN_OPTIONS) -> OptimizerKind:
    """Return the class of an optimizer and its options, among them those that choose torch's ``implementation``."""
    optimizer_class, options = OPTIMIZERS[name]
    return OptimizerKind(optimizer_class, {**options, **implementation})


SERVER = "parameter_server"
"""The gradient reduction of a plan whose first data rank updates all parameters: centralised data parallelism
(Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI)."""


class ServerOptimizer(CombinedOptimizer):
    """Updates all parameters on the first rank of ``group``, which broadcasts them to the others."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Any], group: dist.ProcessGroup) -> None:
        super().__init__(optimizers)
        self.parameters, self.group = parameters, group

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, also on ranks that update nothing."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters and broadcast them."""
        super().step()
        parts = [to_local(parameter.detach()) for parameter in self.parameters]
        flat = flatten(parts)
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        fill(parts, flat)


def build_optimizer(
    name: str,
    plan: Plan,
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    placement: StatePlacement | None = None,
    implementation: Mapping[str, Any] = PLAIN_OPTIONS,
) -> Any:
    """Return the optimizer ``name`` of one rank's parameters, of which every rank of ``group`` has a replica.

    ``placement`` says where its states are; ``None`` where they are beside the parameters and of the same precision.
    ``implementation`` are options that choose one of torch's implementations.
    """
    kind = find_optimizer(name, implementation)
    has_server = plan.gradient_reduction == SERVER and group.size() > 1
    if has_server and group.rank() > 0:
        return ServerOptimizer(parameters, (), group)
    result: Any = (
        kind.optimizer_class(parameters, **kind.options)
        if placement is None
        else SplitOptimizer(list_ranges(parameters), kind, placement)
    )
    return ServerOptimizer(parameters, (result,), group) if has_server else result


def unwrap_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that hold this rank's states: those inside combined, server and sharded optimizers."""
    if isinstance(optimizer, CombinedOptimizer):
        for member in optimizer.optimizers:
            yield from unwrap_optimizers(member)
    else:
        yield optimizer


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of the next steps of an optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = rate


MAX_NORM = 1.0
"""The usual norm to clip to (Brown et al. 2020, "Language models are few-shot learners", appendix B)."""
_EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm."""


class GradientPart(NamedTuple):
    """The part of a parameter's gradient that a rank has, and the axes along which other ranks have other parts."""

    parameter: nn.Parameter
    values: Tensor
    axes: tuple[str, ...]


def list_gradient_parts(parameters: Iterable[nn.Parameter]) -> Iterator[GradientPart]:
    """Yield this rank's part of every gradient; parameters without a gradient are left out."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield GradientPart(parameter, to_local(parameter.grad), list_cut_axes(parameter.grad))


def clip_gradients(
    parts: Sequence[GradientPart],
    mesh: DeviceMesh,
    sum_axes: tuple[str, ...],
    stage_axis: str,
    copies: Collection[nn.Parameter] = (),
) -> float:
    """Scale gradients in place and return their global norm as it was before.

    Parameters
    ----------
    parts
        This rank's parts of gradients. On all ranks they are cut along the same axes, in the same order.
    mesh
        All ranks.
    sum_axes
        The axes along which gradients may be cut.
    stage_axis
        The axis whose ranks have different parameters: that of the pipeline.
    copies
        Parameters of which another rank has a second copy: only that copy counts in the norm.
    """
    copy_ids = {id(copy) for copy in copies}
    counted_parts = (part for part in parts if id(part.parameter) not in copy_ids)
    squares = _sum_squares(counted_parts, torch.device(mesh.device_type))
    with torch.no_grad():
        for axis in sum_axes:
            cut_keys = [key for key in squares if axis in key]
            if cut_keys:  # one all-reduce an axis for all sums: every rank has the same keys, so the order agrees
                stacked_squares = torch.stack([squares[key] for key in cut_keys])
                dist.all_reduce(stacked_squares, group=mesh[axis].get_group())
                squares |= dict(zip(cut_keys, stacked_squares, strict=True))
        total = sum(squares.values(), torch.zeros((), dtype=torch.float64, device=mesh.device_type))
        dist.all_reduce(total, group=mesh[stage_axis].get_group())
        norm = float(total.sqrt())
        for part in parts:
            part.values.mul_(clipping_factor(norm))
    return norm


def clipping_factor(norm: float) -> float:
    """Return the factor that clips gradients of a norm.

    >>> clipping_factor(0.5), round(clipping_factor(4.0), 6)
    (1.0, 0.25)
    """
    return min(1.0, MAX_NORM / (norm + _EPSILON))


def _sum_squares(parts: Iterable[GradientPart], device: torch.device) -> dict[tuple[str, ...], Tensor]:
    """Return the sum of squares of this rank's parts of gradients, by the axes along which these are cut."""
    sums: dict[tuple[str, ...], Tensor] = {}
    for part in parts:
        square = part.values.double().square().sum().to(device)
        sums[part.axes] = sums[part.axes] + square if part.axes in sums else square
    return sums


def list_cut_axes(gradient: Tensor) -> tuple[str, ...]:
    """Return the names of the axes along which ranks hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    axes = zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True)
    return tuple(axis for axis, placement in axes if not placement.is_replicate())
