"""Data parallelism: gradients become the mean over data ranks, on all of them or on one that updates for all.

With ZeRO 1 each rank gets the mean of its own shard only (`meshwise.executor.parallel.sharded_states`).

DistributedDataParallel averages gradients where it can. It cannot take DTensors ("aten.cat.default got mixed
torch.Tensor and DTensor"), so with tensor parallelism, or where the plan wants no overlap, the gradients of a stage are
reduced as one flat buffer: as soon as its last backward has ended, or after the last backward of the rank.

`Sharing` says which ranks have the same parameters and shard their states: for experts they are others than for the
dense parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwise.executor.recording.private_torch import flatten_axes
from meshwise.executor.recording.tensors import fill, flatten, to_local
from meshwise.strategies.plan.mesh import GROUPS, REPLICA


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ranks that have the same part of the model as this one.

    Parameters
    ----------
    shards
        The ranks over which ZeRO shards states, as one axis.
    replicas
        The ranks whose gradients are averaged, as one axis: those of all groups that shard states.
    states
        The mesh of shards, with an outer axis of replicas where several groups shard states (hybrid sharding).
    """

    shards: DeviceMesh
    replicas: DeviceMesh
    states: DeviceMesh

    @property
    def axis(self) -> str:
        """The name of the axis along which states are sharded."""
        return str((self.shards.mesh_dim_names or ("",))[0])


def find_sharing(mesh: DeviceMesh, kind: str) -> Sharing:
    """Return the ranks that have the same parameters of a kind, one of `meshwise.strategies.plan.mesh.GROUPS`."""
    shards = flatten_axes(mesh, GROUPS[kind])
    if mesh[REPLICA].size() == 1:
        return Sharing(shards, shards, shards)
    states = mesh[REPLICA, (shards.mesh_dim_names or ())[0]]
    return Sharing(shards, flatten_axes(mesh, (REPLICA, *GROUPS[kind])), states)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters whose gradients are complete at one time and reduced together, and the ranks that have them too."""

    parameters: tuple[nn.Parameter, ...]
    sharing: Sharing

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's parts of the gradients."""
        return [to_local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]


Finish = Callable[[], None]
"""Waits for a reduction and copies its result into the gradients."""


def average(unit: Unit, *, on_server: bool = False) -> Finish:
    """Begin to average the gradients of a unit over all ranks that have the same parameters.

    With ``on_server`` only the first rank of the group gets the mean; the other ranks drop theirs.
    """
    group, gradients = unit.sharing.replicas.get_group(), unit.gradients
    flat = flatten(gradients)
    work: Any = (
        dist.reduce(flat, dist.get_global_rank(group, 0), group=group, async_op=True)
        if on_server
        else dist.all_reduce(flat, group=group, async_op=True)
    )

    def finish() -> None:
        work.wait()
        if not on_server or group.rank() == 0:
            fill(gradients, flat.div_(group.size()))
            return
        for parameter in unit.parameters:
            parameter.grad = None

    return finish


class GradientReducer:
    """Reduces the gradients of units, one stage or the token table each; ``begin`` begins the reduction of a unit.

    With ``overlap`` a unit is reduced at once, while other stages still run backward, else at the end.
    """

    def __init__(self, begin: Callable[[Unit], Finish], overlap: bool) -> None:
        self.begin, self.overlap = begin, overlap
        self._pending_units: list[Unit] = []
        self._pending_reductions: list[Finish] = []

    def add_unit(self, unit: Unit) -> None:
        """Add a unit whose gradients are complete on this rank, to be reduced."""
        if unit.sharing.replicas.size() == 1:
            return
        self._pending_units.append(unit)
        if self.overlap:
            self._launch()

    def _launch(self) -> None:
        self._pending_reductions += map(self.begin, self._pending_units)
        self._pending_units.clear()

    def finish(self) -> None:
        """Reduce what is not reduced yet, and return when every gradient is."""
        self._launch()
        while self._pending_reductions:
            self._pending_reductions.pop(0)()
