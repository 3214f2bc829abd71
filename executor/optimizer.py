"""The optimizer of a rank: plain, or with its states split over the data axis (ZeRO-1).

torch's ZeroRedundancyOptimizer cannot hold DTensors ("aten.cat.default got mixed torch.Tensor
and DTensor"), so with tensor parallelism `PartitionedOptimizer` does the same by hand.

References
----------
Rajbhandari et al. 2020, "ZeRO", section 5.1 (optimizer state partitioning).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from executor.data_parallel import fill, flatten, local
from strategies.plan import Plan

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "foreach": False}),
}


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
    ) -> None:
        self.parameters, self.group = parameters, group
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(group.size())]
        load = [0] * (owners or group.size())
        for parameter in sorted(parameters, key=lambda p: -local(p).numel()):
            owner = load.index(min(load))
            self.owned[owner].append(parameter)
            load[owner] += local(parameter).numel()
        mine = self.owned[group.rank()]
        self.optim = kind(mine, **options) if mine else None

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer state of the owned parameters."""
        return self.optim.state if self.optim is not None else {}

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
        parts = (getattr(each, "optim", each).state for each in self.optimizers)
        return {parameter: values for part in parts for parameter, values in part.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Update all parameters."""
        for each in self.optimizers:
            each.step()


def build(name: str, plan: Plan, families: Sequence[tuple[Sequence[nn.Parameter], dist.ProcessGroup]]) -> Any:
    """Return the optimizer ``name`` for one rank's parameters, and the ranks that share the states of each family."""
    built = [_build(name, plan, parameters, group) for parameters, group in families if parameters]
    return built[0] if len(built) == 1 else Several(built)


def _build(name: str, plan: Plan, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Any:
    kind, options = OPTIMIZERS[name]
    if plan.gradient_reduction == SERVER and group.size() > 1:
        return PartitionedOptimizer(parameters, kind, group, options, owners=1)
    if plan.zero != 1 or group.size() == 1:  # nothing is shared, or parameters are shards already
        return kind(parameters, **options)
    if plan.tensor > 1 or plan.expert > 1:
        return PartitionedOptimizer(parameters, kind, group, options)
    # parameters as views of one bucket a rank: one broadcast a rank instead of one a parameter
    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=kind, process_group=group, parameters_as_bucket_view=True, **options
    )
