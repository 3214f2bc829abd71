"""Data parallelism: gradients become the mean over the data axis, on all its ranks or on one that updates for all.

With ZeRO 1 each rank gets the mean of its own part alone (`meshwise.executor.parallel.sharded_states`).

DistributedDataParallel does it where it can. It cannot hold DTensors ("aten.cat.default got
mixed torch.Tensor and DTensor"), so with tensor parallelism, or where the plan wants no
overlap, a stage's gradients are summed as one flat buffer: as soon as its last backward
ended, or after the last backward of the rank.

Which ranks keep the same parameters, and share their states: of experts other ones than of the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.recording.private_torch import flattened
from meshwise.executor.recording.tensors import fill, flatten, local
from meshwise.strategies.plan.mesh import GROUPS, REPLICA


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ranks that have the same part of the model as this one.

    Parameters
    ----------
    shards
        Those that ZeRO shares states over, as one axis.
    replicas
        Those whose gradients are averaged, as one axis: of all groups that share states.
    states
        The mesh of shards, with replicas outside where there are any.
    """

    shards: DeviceMesh
    replicas: DeviceMesh
    states: DeviceMesh

    @property
    def axis(self) -> str:
        """The name of the axis along which states are shared."""
        return str((self.shards.mesh_dim_names or ("",))[0])


def sharing(mesh: DeviceMesh, kind: str) -> Sharing:
    """Return the ranks with the same part of the model: ``kind`` is one of `meshwise.strategies.plan.mesh.GROUPS`."""
    shards = flattened(mesh, GROUPS[kind])
    if mesh[REPLICA].size() == 1:
        return Sharing(shards, shards, shards)
    states = mesh[REPLICA, (shards.mesh_dim_names or ())[0]]
    return Sharing(shards, flattened(mesh, (REPLICA, *GROUPS[kind])), states)


def reduces_itself(module: nn.Module) -> bool:
    """Return whether a module's gradients are averaged as backward makes them."""
    return isinstance(module, DistributedDataParallel)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters whose gradients are whole at one moment and leave together, and the ranks that have the same ones."""

    parameters: tuple[nn.Parameter, ...]
    sharing: Sharing

    @property
    def gradients(self) -> list[Tensor]:
        """What this rank has of the gradients."""
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]


Finish = Callable[[], None]
"""Waits for a reduction and puts what it made where it belongs."""


def average(unit: Unit) -> Finish:
    """Begin to make gradients the mean over all ranks that have the same parameters."""
    group, gradients = unit.sharing.replicas.get_group(), unit.gradients
    flat = flatten(gradients)
    work: Any = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        fill(gradients, flat.div_(group.size()))

    return finish


def average_on_server(unit: Unit) -> Finish:
    """Begin to make gradients the mean on the first rank of a group; the others keep none."""
    group, gradients = unit.sharing.replicas.get_group(), unit.gradients
    flat = flatten(gradients)
    work: Any = dist.reduce(flat, dist.get_global_rank(group, 0), group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if group.rank() == 0:
            fill(gradients, flat.div_(group.size()))
            return
        for parameter in unit.parameters:
            parameter.grad = None

    return finish


class GradientReducer:
    """Reduces the gradients of whole stages.

    Parameters
    ----------
    begin
        Begins the reduction of a unit.
    overlap
        Whether a stage is reduced while earlier ones still run backward.
    """

    def __init__(self, begin: Callable[[Unit], Finish], overlap: bool) -> None:
        self.begin, self.overlap = begin, overlap
        self._waiting: list[Unit] = []
        self._running: list[Finish] = []

    def done(self, unit: Unit) -> None:
        """Take note that the gradients of a unit, together, are this rank's whole ones."""
        if unit.sharing.replicas.size() == 1:
            return
        self._waiting.append(unit)
        if self.overlap:
            self._launch()

    def _launch(self) -> None:
        self._running += map(self.begin, self._waiting)
        self._waiting.clear()

    def finish(self) -> None:
        """Return when every gradient is reduced."""
        self._launch()
        while self._running:
            self._running.pop(0)()
