"""The optimizer of a rank: plain, with its states shared over the data axis (ZeRO 1), or on a server.

Gradient clipping: all gradients are scaled so that the norm of them together is at most `MAX_NORM`.

torch's ``clip_grad_norm_`` takes tensors of one mesh only ("All operands in aten.stack.default must have the same
mesh"), and knows nothing of other pipeline stages. Here squares are summed over the axes along which a gradient is
cut, and then over pipeline ranks.

References
----------
Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
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
"""One parameter and operation after the other."""


def kind_of(name: str, how: Mapping[str, Any] = PLAIN) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer and what it is made with; ``how`` says which of torch's implementations."""
    kind, options = OPTIMIZERS[name]
    return kind, {**options, **how}


SERVER = "parameter_server"
"""What a plan says where the first data rank updates all parameters: centralised data parallelism (Li et al. 2014,
"Scaling distributed machine learning with the parameter server", OSDI)."""


class ServerOptimizer:
    """Steps all parameters on the first rank of ``group``, from which the others receive them."""

    def __init__(self, parameters: Sequence[nn.Parameter], optim: Any, group: dist.ProcessGroup) -> None:
        self.parameters, self.group = parameters, group
        self.optim = optim if group.rank() == 0 else None

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer state of all parameters, on the first rank."""
        return self.optim.state if self.optim is not None else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of all parameters, on the first rank."""
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
    """Optimizers of different parameters as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer state of all parameters that this rank owns."""
        parts = (states(each) for each in self.optimizers)
        return {parameter: values for part in parts for parameter, values in part.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all, with their learning rates."""
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
    """Return the optimizer ``name`` for one rank's parameters, which ``group`` has too.

    ``states`` says where its states are, if not with the parameters, and as precise as these; ``how`` which of torch's
    implementations it is.
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
    """Return the optimizer ``name`` whose states ranks share (ZeRO 1)."""
    return ShardedOptimizer(units, Kind(*kind_of(name, how)), states)


def inner(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step this rank's own part of the parameters, of those that share or combine."""
    for each in optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,):
        if isinstance(each, ServerOptimizer | ShardedOptimizer):
            if each.optim is not None:
                yield each.optim
        else:
            yield each


def states(optimizer: Any) -> Any:
    """Return the state tensors by name of every parameter whose states this rank keeps."""
    return optimizer.state


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Make the next steps of an optimizer have a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


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
