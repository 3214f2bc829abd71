"""Collectives on one rank's part of a tensor, along one axis of a mesh."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from executor.private_torch import all_gather, reduce_scatter
from simulator.collective_kinds import Collective
from strategies.sharding import Redistribution, ShardingSpec, after, redistribute

Dims = tuple[str, ...]
"""The named dims of a tensor, one for each of its torch dims."""


class Ran(NamedTuple):
    """A collective that ran: ``size`` as `simulator.collective` counts it, in bytes; ns of the host's clock."""

    collective: Collective
    axis: str
    size: int
    start: int
    end: int


class Ranks:
    """The mesh as one rank sees it; notes every collective that it runs."""

    def __init__(self, mesh: DeviceMesh, now: Callable[[], int] = perf_counter_ns) -> None:
        self.mesh, self.now = mesh, now
        self.ran: list[Ran] = []
        names = mesh.mesh_dim_names or ()
        self.size = {name: mesh.size(index) for index, name in enumerate(names)}
        self.coordinate = {name: mesh.get_local_rank(name) for name in names}

    def ways(self, axes: tuple[str, ...]) -> int:
        """Return into how many parts some axes cut a dim."""
        result = 1
        for axis in axes:
            result *= self.size.get(axis, 1)
        return result

    def part(self, axes: tuple[str, ...]) -> int:
        """Return which of these parts this rank has."""
        result = 0
        for axis in axes:
            result = result * self.size.get(axis, 1) + self.coordinate.get(axis, 0)
        return result

    def redistribute(self, local: Tensor, dims: Dims, source: ShardingSpec, target: ShardingSpec) -> Tensor:
        """Return this rank's part of a tensor in the layout ``target``, from that in ``source``."""
        layout = source
        for move in redistribute(source, target):
            local = self.run(local, dims, layout, move)
            layout = after(layout, move)
        for dim in dims:
            for axis in target.axes(dim)[len(layout.axes(dim)) :]:
                local = self._cut(local, dims.index(dim), axis)
        return local.contiguous()

    def run(self, local: Tensor, dims: Dims, layout: ShardingSpec, move: Redistribution) -> Tensor:
        """Return this rank's part of a tensor after one collective."""
        for dim, axis in move.sliced:
            local = self._cut(local, dims.index(dim), axis)
        if self.size.get(move.axis, 1) == 1:
            return local
        cut = next((index for index, dim in enumerate(dims) if move.axis in layout.axes(dim)), -1)
        to = dims.index(move.dim) if move.dim in dims else -1
        run: Callable[[], Tensor] = {
            Collective.ALL_REDUCE: lambda: self.all_reduce(local, move.axis),
            Collective.REDUCE_SCATTER: lambda: self._reduce_scatter(local, to, move.axis),
            Collective.ALL_GATHER: lambda: self._all_gather(local, cut, move.axis),
            Collective.ALL_TO_ALL: lambda: self._all_to_all(local, cut, to, move.axis),
        }[move.collective]
        return run()

    def all_reduce(self, local: Tensor, axis: str, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the sum of every rank's part along an axis, or of those of some ranks along it."""
        total = local.clone(memory_format=torch.contiguous_format)
        with self._noted(Collective.ALL_REDUCE, axis, total):
            dist.all_reduce(total, group=group or self.mesh.get_group(axis))
        return total

    def some(self, axis: str, places: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of the ranks at some places along an axis that differ in nothing else, if this rank is one.

        Every rank of the mesh calls this alike.
        """
        lines = self.mesh.mesh.movedim(list(self.size).index(axis), -1).reshape(-1, self.size[axis])
        group: dist.ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(lines[:, list(places)].tolist())  # type: ignore[no-untyped-call]
        return group

    def _cut(self, local: Tensor, index: int, axis: str) -> Tensor:
        return local.chunk(self.size.get(axis, 1), index)[self.coordinate.get(axis, 0)]

    def _all_gather(self, local: Tensor, index: int, axis: str) -> Tensor:
        first = local.movedim(index, 0).contiguous()
        whole = first.new_empty((self.size[axis] * first.shape[0], *first.shape[1:]))
        with self._noted(Collective.ALL_GATHER, axis, whole):
            all_gather(whole, first, group=self.mesh.get_group(axis))
        return whole.movedim(0, index)

    def _reduce_scatter(self, local: Tensor, index: int, axis: str) -> Tensor:
        first = local.movedim(index, 0).contiguous()
        part = first.new_empty((first.shape[0] // self.size[axis], *first.shape[1:]))
        with self._noted(Collective.REDUCE_SCATTER, axis, first):
            reduce_scatter(part, first, group=self.mesh.get_group(axis))
        return part.movedim(0, index)

    def _all_to_all(self, local: Tensor, cut: int, to: int, axis: str) -> Tensor:
        parts = torch.stack(local.chunk(self.size[axis], to)).contiguous()
        received = torch.empty_like(parts)
        with self._noted(Collective.ALL_TO_ALL, axis, parts):
            dist.all_to_all_single(received, parts, group=self.mesh.get_group(axis))
        return torch.cat(received.unbind(), cut)

    @contextmanager
    def _noted(self, collective: Collective, axis: str, largest: Tensor) -> Iterator[None]:
        start = self.now()
        yield
        size = largest.numel() * largest.element_size()
        self.ran.append(Ran(collective, axis, size, start, self.now()))
