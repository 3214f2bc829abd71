"""The optimizer of a rank: plain, or with its states split over the data axis (ZeRO-1).

torch's ZeroRedundancyOptimizer cannot hold DTensors ("aten.cat.default got mixed torch.Tensor
and DTensor"), so with tensor parallelism `PartitionedOptimizer` does the same by hand.

References
----------
Rajbhandari et al. 2020, "ZeRO", section 5.1 (optimizer state partitioning).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from executor.accelerator import CORE
from executor.data_parallel import fill, flatten, local
from executor.host_memory import HostMemory
from executor.learning_rate import PEAKS
from executor.split_optimizer import Kind, SplitOptimizer
from strategies.offloading import StepPlace
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


class States(NamedTuple):
    """Where optimizer states are: a fraction of them on the host, updated there or on the device."""

    host: HostMemory
    on_host: float = 0.0
    place: StepPlace = StepPlace.HOST


SERVER = "parameter_server"
"""What a plan says where the first data rank updates all parameters: centralised data parallelism (Li et al. 2014,
"Scaling distributed machine learning with the parameter server", OSDI)."""


class PartitionedOptimizer:
    """Steps the parameters that this rank owns and receives the others from their owners.

    A parameter goes, largest first, to the one of the first ``owners`` ranks of ``group`` that owns least.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        kind: type[torch.optim.Optimizer],
        group: dist.ProcessGroup,
        options: dict[str, Any],
        owners: int | None = None,
        states: States | None = None,
    ) -> None:
        self.parameters, self.group = parameters, group
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(group.size())]
        load = [0] * (owners or group.size())
        for parameter in sorted(parameters, key=lambda p: -local(p).numel()):
            owner = load.index(min(load))
            self.owned[owner].append(parameter)
            load[owner] += local(parameter).numel()
        mine = self.owned[group.rank()]
        self.optim = _stepped(mine, kind, options, states) if mine else None

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer state of the owned parameters."""
        return self.optim.state if self.optim is not None else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of the owned parameters."""
        return self.optim.param_groups if self.optim is not None else []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the owned parameters and broadcast them."""
        if self.optim is not None:
            self.optim.step()
        for owner, parameters in enumerate(self.owned):
            parts = [local(parameter.detach()) for parameter in parameters]
            if parts:
                flat = flatten(parts)
                dist.broadcast(flat, dist.get_global_rank(self.group, owner), group=self.group)
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


def _stepped(
    parameters: Sequence[nn.Parameter],
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    states: States | None,
) -> Any:
    if states is None:
        return kind(parameters, **options)
    return SplitOptimizer(parameters, Kind(kind, options), states.host, states.on_host, states.place)


def build(
    name: str,
    plan: Plan,
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    states: States | None = None,
    how: Mapping[str, Any] = PLAIN,
) -> Any:
    """Return the optimizer ``name`` for one rank's parameters; ``group`` are the ranks that share its states.

    ``states`` says where they are, if not with the parameters, and as precise as these; ``how`` which of torch's
    implementations it is.
    """
    kind, options = kind_of(name, how)
    if plan.gradient_reduction == SERVER and group.size() > 1:
        return PartitionedOptimizer(parameters, kind, group, options, owners=1, states=states)
    if plan.zero != 1 or group.size() == 1:  # nothing is shared, or parameters are shards already
        return _stepped(parameters, kind, options, states)
    if plan.tensor > 1 or plan.expert > 1 or states is not None:
        return PartitionedOptimizer(parameters, kind, group, options, states=states)
    # parameters as views of one bucket a rank: one broadcast a rank instead of one a parameter
    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=kind, process_group=group, parameters_as_bucket_view=True, **options
    )


def inner(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step this rank's own part of the parameters, of those that share or combine."""
    for each in optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,):
        if isinstance(each, PartitionedOptimizer | ZeroRedundancyOptimizer):
            if each.optim is not None:
                yield each.optim
        else:
            yield each


def states(optimizer: Any) -> Any:
    """Return the state tensors by name of every parameter whose states this rank keeps."""
    return (optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer).state


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Make the next steps of an optimizer have a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
