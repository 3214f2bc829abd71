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
from meshwise.executor.parallel.data_parallel import Unit
from meshwise.executor.parallel.sharded_states import Kind, ShardedOptimizer, SplitOptimizer, States, whole
from meshwise.executor.recording.accelerator import CORE
from meshwise.executor.recording.tensors import fill, flatten, local
from meshwise.strategies.plan.plan import Plan

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": PEAKS["adamw"]}),
    "sgd": (torch.optim.SGD, {"lr": PEAKS["sgd"], "momentum": 0.9}),
}
PLAIN = CORE.optimizer_options
"""Options of an optimizer that updates one parameter and runs one operation after the other."""


def kind_of(name: str, how: Mapping[str, Any] = PLAIN) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer and its options, among them those that choose torch's ``implementation``."""
    kind, options = OPTIMIZERS[name]
    return kind, {**options, **how}


SERVER = "parameter_server"
"""The gradient reduction of a plan whose first data rank updates all parameters: centralised data parallelism
(Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI)."""


class ServerOptimizer:
    """Updates all parameters on the first rank of ``group``, which broadcasts them to the others."""

    def __init__(self, parameters: Sequence[nn.Parameter], optim: Any, group: dist.ProcessGroup) -> None:
        self.parameters, self.group = parameters, group
        self.optim = optim if group.rank() == 0 else None

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of all parameters on the first rank; empty on the others."""
        return self.optim.state if self.optim is not None else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of all parameters on the first rank; empty on the others."""
        return self.optim.param_groups if self.optim is not None else []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters and broadcast them."""
        if self.optim is not None:
            self.optim.step()
        parts = [local(parameter.detach()) for parameter in self.parameters]
        flat = flatten(parts)
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        fill(parts, flat)


class Several:
    """Several optimizers of different parameters, used as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of all parameters that this rank updates."""
        parts = (states(each) for each in self.optimizers)
        return {parameter: values for part in parts for parameter, values in part.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, with their learning rates."""
        return [group for each in self.optimizers for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Update all parameters."""
        for each in self.optimizers:
            each.step()


def build(
    name: str,
    plan: Plan,
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    states: States | None = None,
    how: Mapping[str, Any] = PLAIN,
) -> Any:
    """Return the optimizer ``name`` of one rank's parameters, of which every rank of ``group`` has a replica.

    Parameters
    ----------
    placement
        Where its states are; ``None`` where they are beside the parameters and of the same precision.
    implementation
        Options that choose one of torch's implementations.
    """
    make, options = kind_of(name, how)
    serves = plan.gradient_reduction == SERVER and group.size() > 1
    optim: Any = None
    if not serves or group.rank() == 0:
        if states is None:
            optim = make(parameters, **options)
        else:
            optim = SplitOptimizer(whole(parameters), Kind(make, options), states)
    return ServerOptimizer(parameters, optim, group) if serves else optim


def sharded(name: str, units: Sequence[Unit], states: States, how: Mapping[str, Any] = PLAIN) -> ShardedOptimizer:
    """Return the optimizer ``name`` whose states are sharded over ranks (ZeRO 1)."""
    return ShardedOptimizer(units, Kind(*kind_of(name, how)), states)


def inner(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that hold this rank's states: those inside combined, server and sharded optimizers."""
    for each in optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,):
        if isinstance(each, ServerOptimizer | ShardedOptimizer):
            if each.optim is not None:
                yield each.optim
        else:
            yield each


def states(optimizer: Any) -> Any:
    """Return the state tensors by name, of every parameter whose states this rank has."""
    return optimizer.state


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of the next steps of an optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = rate


MAX_NORM = 1.0
"""The usual norm to clip to (Brown et al. 2020, "Language models are few-shot learners", appendix B)."""
_EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm."""


class Part(NamedTuple):
    """The part of a parameter's gradient that a rank has, and the axes along which other ranks have other parts."""

    parameter: nn.Parameter
    values: Tensor
    axes: tuple[str, ...]


def whole_parts(parameters: Iterable[nn.Parameter]) -> Iterator[Part]:
    """Yield this rank's part of every gradient; parameters without a gradient are left out."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield Part(parameter, local(parameter.grad), cut_axes(parameter.grad))


def clip(
    parts: Sequence[Part], mesh: DeviceMesh, sums: tuple[str, ...], over: str, copies: Collection[nn.Parameter] = ()
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
    uncounted = {id(copy) for copy in copies}
    counted = (part for part in parts if id(part.parameter) not in uncounted)
    squares = _squares(counted, torch.device(mesh.device_type))
    with torch.no_grad():
        for axis in sums:
            cut = [key for key in squares if axis in key]
            if cut:  # one all-reduce an axis for all sums: every rank has the same keys, so the order agrees
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
    """Return the factor that clips gradients of a norm.

    >>> scale(0.5), round(scale(4.0), 6)
    (1.0, 0.25)
    """
    return min(1.0, MAX_NORM / (norm + _EPSILON))


def _squares(parts: Iterable[Part], device: torch.device) -> dict[tuple[str, ...], Tensor]:
    """Return the sum of squares of this rank's parts of gradients, by the axes along which these are cut."""
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
