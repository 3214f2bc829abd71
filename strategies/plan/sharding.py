"""Layouts of tensors over the mesh, and the collectives that change one layout into another.

An operator's sharding says which axes cut which dims of its iteration space. The layouts of
its tensors follow: a tensor is cut along the dims it shares with the operator, an output is
*partial* over the axes that cut a reduced dim, and the gradient of an input is partial
over the axes that cut dims which the input does not have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import Operator, Tensor


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The layout of one tensor: the axes that cut each dim, outermost first, and the axes over which it is partial."""

    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[str, ...] = ()

    __repr__ = brief_repr()

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that cut ``dim``."""
        return dict(self.cuts).get(dim, ())

    @property
    def cut_axes(self) -> frozenset[str]:
        """The axes that cut a dim."""
        return frozenset(axis for _, axes in self.cuts for axis in axes)

    @property
    def without_partial(self) -> "ShardingSpec":
        """The layout with the same cuts and no partial axes."""
        return ShardingSpec(self.cuts)

    def without_axis(self, axis: str) -> "ShardingSpec":
        """Return the layout without the cuts of ``axis`` and without partial axes."""
        cuts = ((dim, tuple(other_axis for other_axis in axes if other_axis != axis)) for dim, axes in self.cuts)
        return ShardingSpec(tuple((dim, axes) for dim, axes in cuts if axes))

    def with_cut(self, dim: str, axis: str) -> "ShardingSpec":
        """Return the layout in which ``axis`` also cuts ``dim``, inside the axes that cut it already."""
        return ShardingSpec(tuple((dict(self.cuts) | {dim: (*self.axes(dim), axis)}).items()), self.partial)

    def __str__(self) -> str:
        cuts = ", ".join(f"{dim}/{'*'.join(axes)}" for dim, axes in self.cuts)
        return f"[{cuts}]" + (f" partial over {'*'.join(self.partial)}" if self.partial else "")


REPLICATED = ShardingSpec()


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """The cuts of an operator's iteration space; ``operator`` is named ``block.operator``.

    Parameters
    ----------
    kept
        The cuts of parameters and inputs that are kept in another layout than the operator reads. They are gathered
        for every pass that reads them, and gradients of parameters are scattered.
    """

    operator: str
    cuts: tuple[tuple[str, tuple[str, ...]], ...]
    kept: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = ()

    __repr__ = brief_repr()

    def find_kept_spec(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which a parameter or an input is kept."""
        kept_cuts = dict(self.kept).get(tensor.name)
        return self.find_input_spec(tensor) if kept_cuts is None else ShardingSpec(kept_cuts)

    def find_input_spec(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the operator reads ``tensor``."""
        return ShardingSpec(tuple((dim, axes) for dim, axes in self.cuts if dim in tensor.dims))

    def find_output_spec(self, operator: Operator, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the operator leaves ``tensor``."""
        partial = tuple(axis for dim, axes in self.cuts if dim in operator.reduced for axis in axes)
        cuts = tuple((dim, axes) for dim, axes in self.cuts if dim in tensor.dims and dim not in operator.reduced)
        return ShardingSpec(cuts, partial)

    def find_gradient_spec(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the backward pass leaves the gradient of the input ``tensor``."""
        input_spec = self.find_input_spec(tensor)
        partial = tuple(axis for dim, axes in self.cuts if dim not in tensor.dims for axis in axes)
        return ShardingSpec(input_spec.cuts, tuple(axis for axis in partial if axis not in input_spec.cut_axes))


@dataclass(frozen=True, slots=True)
class Redistribution:
    """One collective along one axis that moves a tensor to another layout.

    Parameters
    ----------
    dim
        The dim that the axis cuts afterwards; of an all-gather the dim that it cut before; empty for an all-reduce.
    free_cuts
        The dims, each with an axis, that ranks cut before the collective without communication, by keeping their
        part of a whole dim.
    """

    collective: Collective
    axis: str
    dim: str
    free_cuts: tuple[tuple[str, str], ...] = ()

    def apply_free_cuts(self, layout: ShardingSpec) -> ShardingSpec:
        """Return the layout at the start of the collective: ``layout`` with the free cuts."""
        for dim, axis in self.free_cuts:
            layout = layout.with_cut(dim, axis)
        return layout


@lru_cache(maxsize=4096)
def redistribute(source: ShardingSpec, target: ShardingSpec) -> tuple[Redistribution, ...]:
    """Return the collectives that turn ``source`` into ``target``; cutting a whole dim is free.

    Where several axes cut a dim, each cuts the parts of the axes before it: only the last axis can be removed, and a
    new axis becomes the last. All-gathers come last, so that no other collective moves more bytes than it must.

    >>> redistribute(ShardingSpec(partial=("tensor",)), REPLICATED)
    (Redistribution(collective=<Collective.ALL_REDUCE: 'all_reduce'>, axis='tensor', dim='', free_cuts=()),)
    """
    if target.partial:
        raise ValueError(f"a tensor is not made partial, met {target}")
    return tuple(_list_moves(source, target))


def _list_moves(source: ShardingSpec, target: ShardingSpec) -> Iterator[Redistribution]:
    target_dims = {axis: dim for dim, axes in target.cuts for axis in axes}
    layout = source
    while (move := _find_next_move(layout, target, target_dims)) is not None:
        yield move
        layout = apply_move(layout, move)


def _find_next_move(
    layout: ShardingSpec, target: ShardingSpec, target_dims: Mapping[str, str]
) -> Redistribution | None:
    """Return the next collective; ``None`` where only free cuts are missing."""
    for axis in layout.partial:  # sums first: they shrink the tensor, or leave its size
        if axis not in target_dims:
            return Redistribution(Collective.ALL_REDUCE, axis, "")
        if (free_cuts := _find_free_cuts(layout, target, target_dims[axis], axis)) is not None:
            return Redistribution(Collective.REDUCE_SCATTER, axis, target_dims[axis], free_cuts)
    last_axes = [(axes[-1], dim) for dim, axes in layout.cuts if axes != target.axes(dim)[: len(axes)]]
    for axis, dim in last_axes:
        if (
            target_dims.get(axis, dim) != dim
            and (free_cuts := _find_free_cuts(layout, target, target_dims[axis], axis)) is not None
        ):
            return Redistribution(Collective.ALL_TO_ALL, axis, target_dims[axis], free_cuts)
    gather_order = sorted(
        last_axes, key=lambda pair: pair[0] in target_dims
    )  # first an axis that cuts no dim of the target
    return Redistribution(Collective.ALL_GATHER, *gather_order[0]) if gather_order else None


def _find_free_cuts(
    layout: ShardingSpec, target: ShardingSpec, dim: str, axis: str
) -> tuple[tuple[str, str], ...] | None:
    """Return the free cuts needed before ``axis`` can cut ``dim``; ``None`` where it cannot do so yet."""
    current_axes, target_axes = layout.axes(dim), target.axes(dim)
    missing_axes = target_axes[len(current_axes) : target_axes.index(axis)]
    cut_axes = layout.cut_axes.union(layout.partial)
    if current_axes != target_axes[: len(current_axes)] or not cut_axes.isdisjoint(missing_axes):
        return None
    return tuple((dim, other_axis) for other_axis in missing_axes)


def apply_move(layout: ShardingSpec, move: Redistribution) -> ShardingSpec:
    """Return the layout after a collective.

    >>> exchange = Redistribution(Collective.ALL_TO_ALL, "expert", "experts")
    >>> print(apply_move(ShardingSpec((("batch", ("expert",)),)), exchange))
    [experts/expert]
    """
    layout = move.apply_free_cuts(layout)
    spec = ShardingSpec(
        layout.without_axis(move.axis).cuts, tuple(axis for axis in layout.partial if axis != move.axis)
    )
    if move.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        return spec.with_cut(move.dim, move.axis)
    return spec
