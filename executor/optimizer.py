"""The optimizer of a rank: plain, with its states shared over the data axis (ZeRO 1), or on a server."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.accelerator import CORE
from executor.data_parallel import Unit
from executor.learning_rate import PEAKS
from executor.sharded_states import ShardedOptimizer
from executor.split_optimizer import Kind, SplitOptimizer, States, whole
from executor.tensors import fill, flatten, local
from strategies.plan import Plan

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
