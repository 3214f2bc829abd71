"""Collectives on one rank's part of a tensor, along one axis of a mesh, and operators on such parts.

Values and their gradients move between layouts by autograd functions.

ATen operators on the parts that a rank has, where that is not the same call.

Most operators do on parts what they do on wholes. Here are those that must know which part they have: a table of
which a rank has some rows, a bias that must be added once, a mean over more than a rank has.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from meshwise.executor.recording.private_torch import all_gather, reduce_scatter
from meshwise.simulator.collective import Collective
from meshwise.strategies.plan.sharding import Redistribution, ShardingSpec, after, redistribute

Dims = tuple[str, ...]
"""The named dims of a tensor, one for each of its torch dims."""


class Ran(NamedTuple):
    """A collective that ran; ``size`` in bytes as `meshwise.simulator.collectives.choose` counts it, times in ns."""

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


class Move(torch.autograd.Function):
    """A value to the layout in which it is read; its gradient back to the layout of the value."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, ranks: Ranks, dims: Dims, have: ShardingSpec, wanted: ShardingSpec, back: ShardingSpec
    ) -> Tensor:
        """Return the part of a rank in the layout ``wanted``.

        Parameters
        ----------
        have
            The layout of ``local``.
        back
            The layout in which the gradient comes back. It is given on as the value is, ``have`` with nothing left
            to sum.
        """
        ctx.ranks, ctx.dims, ctx.source, ctx.gradient_layout = ranks, dims, have, back
        result = ranks.redistribute(local, dims, have, wanted)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the value as it was."""
        source, target = ctx.gradient_layout, ctx.source.complete
        return ctx.ranks.redistribute(gradients[0], ctx.dims, source, target), None, None, None, None, None


class Once(torch.autograd.Function):
    """A bias of results that ranks sum, on one of them; its gradient is that of a bias of the sum, on every rank."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: bool) -> Tensor:
        """Return the bias, or zeros."""
        return bias.view_as(bias) if counts else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient."""
        return gradients[0], None


aten = torch.ops.aten


class Part(NamedTuple):
    """What a rank has of an operator.

    Parameters
    ----------
    summed
        Axes over which its result is partial.
    rows
        Axes that cut the first dim of its first argument.
    """

    ranks: Ranks
    summed: tuple[str, ...]
    rows: tuple[str, ...]


def run_on_part(node: Node, part: Part, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return what the operator of a node makes of a rank's part."""
    special = _SPECIAL.get(node.target) if part.summed else None
    if special is not None:
        return special(part, *arguments, **options)
    return node.target(*arguments, **options)  # type: ignore[operator]


def on_device(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options of an operator that was captured on another device."""
    return {name: device if name == "device" else value for name, value in options.items()}


def _embedding(
    part: Part, table: Tensor, indices: Tensor, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Tensor:
    """Return the rows that a rank has, and zeros for those that others have."""
    start = part.ranks.part(part.rows) * table.shape[0]
    own = indices - start
    held = (own >= 0) & (own < table.shape[0])
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    found = aten.embedding.default(table, own.where(held, 0), padding, by_frequency, sparse)
    rows: Tensor = found.where(held[..., None], 0)
    return rows


def _once(part: Part, bias: Tensor | None) -> Tensor | None:
    """Return a bias that counts on the first of the ranks whose results are summed."""
    if bias is None:
        return None
    once: Tensor = Once.apply(bias, part.ranks.part(part.summed) == 0)  # type: ignore[no-untyped-call]
    return once


def _linear(part: Part, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return aten.linear.default(inputs, weight, _once(part, bias))  # type: ignore[no-any-return]


def _addmm(part: Part, bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return aten.addmm.default(_once(part, bias), first, second)  # type: ignore[no-any-return]


def _convolution(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution whose bias, its third argument, counts once."""

    def run(part: Part, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        return kind(inputs, weight, _once(part, bias), *rest)

    return run


_CONVOLUTIONS = (
    *(aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
)


def _mean(part: Part, *arguments: Any, **options: Any) -> Tensor:
    kind = aten.mean.default if len(arguments) == 1 else aten.mean.dim
    return kind(*arguments, **options) / part.ranks.ways(part.summed)  # type: ignore[no-any-return]


_SPECIAL: Mapping[Any, Callable[..., Tensor]] = {
    aten.embedding.default: _embedding,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    **{kind: _convolution(kind) for kind in _CONVOLUTIONS},
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
}
