"""Collectives on a rank's part of a tensor, along one axis of a mesh, and operators on such parts.

Most ATen operators run on parts as on whole tensors. A few must know which part they have, and are replaced here: a
table of which a rank has some rows, a bias that must be added once, a mean over more elements than a rank has.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from meshwise.executor.recording.private_torch import all_gather, reduce_scatter
from meshwise.simulator.collective import Collective
from meshwise.strategies.plan.sharding import Redistribution, ShardingSpec, apply_move, redistribute

Dims = tuple[str, ...]
"""The named dims of a tensor, one for each of its torch dims."""

Change = Callable[[Tensor], Tensor]
"""Turns this rank's part of a tensor in one layout into its part in another: a collective, or a cut without one."""


class CollectiveRecord(NamedTuple):
    """A collective that ran; ``size`` in bytes, as `meshwise.simulator.collectives.choose` counts it, times in ns."""

    collective: Collective
    axis: str
    size: int
    start: int
    end: int


class RankMesh:
    """The mesh as one rank sees it, with its size and the rank's coordinate by axis, and the collectives that ran."""

    def __init__(self, mesh: DeviceMesh, read_clock: Callable[[], int] = perf_counter_ns) -> None:
        self.mesh, self.read_clock = mesh, read_clock
        self.records: list[CollectiveRecord] = []
        names = mesh.mesh_dim_names or ()
        self.size = {name: mesh.size(index) for index, name in enumerate(names)}
        self.coordinate = dict(zip(names, mesh.get_coordinate() or (), strict=True))

    def count_parts(self, axes: tuple[str, ...]) -> int:
        """Return the number of parts into which axes cut a dim: the product of their sizes."""
        return prod(self.size.get(axis, 1) for axis in axes)

    def find_part(self, axes: tuple[str, ...]) -> int:
        """Return the number of this rank's part of a dim that axes cut, the first axis outermost."""
        result = 0
        for axis in axes:
            result = result * self.size.get(axis, 1) + self.coordinate.get(axis, 0)
        return result

    def redistribute(self, local_part: Tensor, dims: Dims, source: ShardingSpec, target: ShardingSpec) -> Tensor:
        """Return this rank's part of a tensor in the layout ``target``, from its part in the layout ``source``."""
        for change in self.list_changes(dims, source, target):
            local_part = change(local_part)
        return local_part.contiguous()

    def list_changes(self, dims: Dims, source: ShardingSpec, target: ShardingSpec) -> tuple[Change, ...]:
        """Return what turns this rank's part in the layout ``source`` into its part in ``target``, one after another.

        It is empty where no rank changes anything, as along axes of one rank.
        """
        layout, changes = source, list[Change]()
        for move in redistribute(source, target):
            changes += [self._cut_dim(dims.index(dim), axis) for dim, axis in move.free_cuts if self._is_divided(axis)]
            if self._is_divided(move.axis):
                changes.append(self._plan_collective(dims, layout, move))
            layout = apply_move(layout, move)
        for index, dim in enumerate(dims):
            new_axes = target.axes(dim)[len(layout.axes(dim)) :]
            changes += [self._cut_dim(index, axis) for axis in new_axes if self._is_divided(axis)]
        return tuple(changes)

    def _is_divided(self, axis: str) -> bool:
        return self.size.get(axis, 1) > 1

    def _cut_dim(self, index: int, axis: str) -> Change:
        return partial(self._cut, index=index, axis=axis)

    def _plan_collective(self, dims: Dims, layout: ShardingSpec, move: Redistribution) -> Change:
        """Return the collective of a move, from a part in ``layout``."""
        cut_dim = next((index for index, dim in enumerate(dims) if move.axis in layout.axes(dim)), -1)
        target_dim = dims.index(move.dim) if move.dim in dims else -1
        return {
            Collective.ALL_REDUCE: partial(self.all_reduce, axis=move.axis),
            Collective.REDUCE_SCATTER: partial(self._reduce_scatter, index=target_dim, axis=move.axis),
            Collective.ALL_GATHER: partial(self._all_gather, index=cut_dim, axis=move.axis),
            Collective.ALL_TO_ALL: partial(self._all_to_all, cut_dim=cut_dim, target_dim=target_dim, axis=move.axis),
        }[move.collective]

    def all_reduce(self, local_part: Tensor, axis: str, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the sum of the parts of all ranks along an axis, or of the ranks of ``group`` along it."""
        total = local_part.clone(memory_format=torch.contiguous_format)
        own_group = group or self.mesh.get_group(axis)
        self._run(Collective.ALL_REDUCE, axis, total, partial(dist.all_reduce, total, group=own_group))
        return total

    def make_group(self, axis: str, positions: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return this rank's group of the ranks at some positions along an axis; ``None`` where it is at none of them.

        Ranks of a group differ only along this axis. Every rank of the mesh must make the same call.
        """
        lines = self.mesh.mesh.movedim(list(self.size).index(axis), -1).reshape(-1, self.size[axis])
        group: dist.ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(lines[:, list(positions)].tolist())  # type: ignore[no-untyped-call]
        return group

    def _cut(self, local_part: Tensor, index: int, axis: str) -> Tensor:
        return local_part.chunk(self.size.get(axis, 1), index)[self.coordinate.get(axis, 0)]

    def _all_gather(self, local_part: Tensor, index: int, axis: str) -> Tensor:
        source = local_part.movedim(index, 0).contiguous()
        result = source.new_empty((self.size[axis] * source.shape[0], *source.shape[1:]))
        call = partial(all_gather, result, source, group=self.mesh.get_group(axis))
        self._run(Collective.ALL_GATHER, axis, result, call)
        return result.movedim(0, index)

    def _reduce_scatter(self, local_part: Tensor, index: int, axis: str) -> Tensor:
        source = local_part.movedim(index, 0).contiguous()
        part = source.new_empty((source.shape[0] // self.size[axis], *source.shape[1:]))
        call = partial(reduce_scatter, part, source, group=self.mesh.get_group(axis))
        self._run(Collective.REDUCE_SCATTER, axis, source, call)
        return part.movedim(0, index)

    def _all_to_all(self, local_part: Tensor, cut_dim: int, target_dim: int, axis: str) -> Tensor:
        parts = torch.stack(local_part.chunk(self.size[axis], target_dim)).contiguous()
        received_parts = torch.empty_like(parts)
        call = partial(dist.all_to_all_single, received_parts, parts, group=self.mesh.get_group(axis))
        self._run(Collective.ALL_TO_ALL, axis, parts, call)
        return torch.cat(received_parts.unbind(), cut_dim)

    def _run(self, collective: Collective, axis: str, largest: Tensor, call: Callable[[], object]) -> None:
        """Run a collective and record it; tensors without data, of which shapes alone are asked, move nowhere."""
        if isinstance(largest, FakeTensor):
            return
        start = self.read_clock()
        call()
        size = largest.numel() * largest.element_size()
        self.records.append(CollectiveRecord(collective, axis, size, start, self.read_clock()))


class SingleBias(torch.autograd.Function):
    """Keeps a bias on one of the ranks whose results are summed; every rank has the gradient of a bias of the sum."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: bool) -> Tensor:
        """Return the bias, or zeros on ranks where it does not count."""
        return bias.view_as(bias) if counts else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient unchanged: it is that of the sum on every rank."""
        return gradients[0], None


aten = torch.ops.aten


class OperatorPart(NamedTuple):
    """The part of an operator that a rank computes.

    Parameters
    ----------
    summed_axes
        Axes over which the result is partial.
    row_axes
        Axes that cut the first dim of the first argument.
    """

    ranks: RankMesh
    summed_axes: tuple[str, ...]
    row_axes: tuple[str, ...]


def find_part_operator(node: Node, part: OperatorPart) -> Callable[..., Any]:
    """Return what computes a node's operator on this rank's part: the operator itself, or what stands for it."""
    part_operator = _PART_OPERATORS.get(node.target) if part.summed_axes else None
    return node.target if part_operator is None else partial(part_operator, part)  # type: ignore[return-value]


def move_options(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return an operator's options, captured on another device, with ``device`` in its place."""
    return {name: device if name == "device" else value for name, value in options.items()}


def _embedding(
    part: OperatorPart,
    table: Tensor,
    indices: Tensor,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return the embeddings whose rows this rank has, and zeros for those of other ranks."""
    start = part.ranks.find_part(part.row_axes) * table.shape[0]
    local_indices = indices - start
    is_local = (local_indices >= 0) & (local_indices < table.shape[0])
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    embeddings = aten.embedding.default(table, local_indices.where(is_local, 0), padding, by_frequency, sparse)
    rows: Tensor = embeddings.where(is_local[..., None], 0)
    return rows


def _count_bias_once(kind: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """Return a product whose bias, an argument, counts on the first of the ranks whose results are summed."""

    def run(part: OperatorPart, *arguments: Any, **options: Any) -> Tensor:
        counts, values = part.ranks.find_part(part.summed_axes) == 0, list(arguments)
        if len(values) > place and values[place] is not None:
            values[place] = SingleBias.apply(values[place], counts)  # type: ignore[no-untyped-call]
        return kind(*values, **options)

    return run


_CONVOLUTIONS = (
    *(aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
)


def _mean(part: OperatorPart, *arguments: Any, **options: Any) -> Tensor:
    kind = aten.mean.default if len(arguments) == 1 else aten.mean.dim
    return kind(*arguments, **options) / part.ranks.count_parts(part.summed_axes)  # type: ignore[no-any-return]


_PART_OPERATORS: Mapping[Any, Callable[..., Tensor]] = {
    aten.embedding.default: _embedding,
    aten.addmm.default: _count_bias_once(aten.addmm.default, 0),
    **{kind: _count_bias_once(kind, 2) for kind in (aten.linear.default, *_CONVOLUTIONS)},
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
}
