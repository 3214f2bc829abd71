"""Layouts of tensors over the mesh, and the collectives that change one layout into another.

An operator's sharding says which axes cut which dims of its iteration space. The layouts of
its tensors follow: a tensor is cut along the dims it shares with the operator, an output is
*partial* over the axes that cut a reduced dim, and the gradient of an input is partial
over the axes that cut dims which the input does not have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwise.simulator.brief import brief
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import Operator, Tensor


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The layout of one tensor: the axes that cut each dim, outermost first, and the axes over which it is partial."""

    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[str, ...] = ()

    __repr__ = brief()

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that cut ``dim``."""
        return dict(self.cuts).get(dim, ())

    @property
    def placed(self) -> frozenset[str]:
        """The axes that cut a dim."""
        return frozenset(axis for _, axes in self.cuts for axis in axes)

    @property
    def complete(self) -> "ShardingSpec":
        """The layout with the same cuts and no partial axes."""
        return ShardingSpec(self.cuts)

    def without(self, axis: str) -> "ShardingSpec":
        """Return the layout without the cuts of ``axis`` and without partial axes."""
        cuts = ((dim, tuple(each for each in axes if each != axis)) for dim, axes in self.cuts)
        return ShardingSpec(tuple((dim, axes) for dim, axes in cuts if axes))

    def cut(self, dim: str, axis: str) -> "ShardingSpec":
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

    __repr__ = brief()

    def of_kept(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which a parameter or an input is kept."""
        kept = dict(self.kept).get(tensor.name)
        return self.of_input(tensor) if kept is None else ShardingSpec(kept)

    def of_input(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the operator reads ``tensor``."""
        return ShardingSpec(tuple((dim, axes) for dim, axes in self.cuts if dim in tensor.dims))

    def of_output(self, operator: Operator, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the operator leaves ``tensor``."""
        partial = tuple(axis for dim, axes in self.cuts if dim in operator.reduced for axis in axes)
        cuts = tuple((dim, axes) for dim, axes in self.cuts if dim in tensor.dims and dim not in operator.reduced)
        return ShardingSpec(cuts, partial)

    def of_gradient(self, tensor: Tensor) -> ShardingSpec:
        """Return the layout in which the backward pass leaves the gradient of the input ``tensor``."""
        layout = self.of_input(tensor)
        placed = {axis for _, axes in layout.cuts for axis in axes}
        partial = tuple(axis for dim, axes in self.cuts if dim not in tensor.dims for axis in axes)
        return ShardingSpec(layout.cuts, tuple(axis for axis in partial if axis not in placed))


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
    sliced: tuple[tuple[str, str], ...] = ()

    def before(self, layout: ShardingSpec) -> ShardingSpec:
        """Return the layout at the start of the collective: ``layout`` with the free cuts."""
        for dim, axis in self.sliced:
            layout = layout.cut(dim, axis)
        return layout


@lru_cache(maxsize=4096)
def redistribute(source: ShardingSpec, target: ShardingSpec) -> tuple[Redistribution, ...]:
    """Return the collectives that turn ``source`` into ``target``; cutting a whole dim is free.

    Where several axes cut a dim, each cuts the parts of the axes before it: only the last axis can be removed, and a
    new axis becomes the last. All-gathers come last, so that no other collective moves more bytes than it must.

    >>> redistribute(ShardingSpec(partial=("tensor",)), REPLICATED)
    (Redistribution(collective=<Collective.ALL_REDUCE: 'all_reduce'>, axis='tensor', dim='', sliced=()),)
    """
    if target.partial:
        raise ValueError(f"a tensor is not made partial, met {target}")
    return tuple(_moves(source, target))


def _moves(source: ShardingSpec, target: ShardingSpec) -> Iterator[Redistribution]:
    wanted = {axis: dim for dim, axes in target.cuts for axis in axes}
    layout = source
    while (move := _next(layout, target, wanted)) is not None:
        yield move
        layout = after(layout, move)


def _next(layout: ShardingSpec, target: ShardingSpec, wanted: Mapping[str, str]) -> Redistribution | None:
    """Return the next collective; ``None`` where only free cuts are missing."""
    for axis in layout.partial:  # sums first: they shrink the tensor, or leave its size
        if axis not in wanted:
            return Redistribution(Collective.ALL_REDUCE, axis, "")
        if (sliced := _free_cuts(layout, target, wanted[axis], axis)) is not None:
            return Redistribution(Collective.REDUCE_SCATTER, axis, wanted[axis], sliced)
    last = [(axes[-1], dim) for dim, axes in layout.cuts if axes != target.axes(dim)[: len(axes)]]
    for axis, dim in last:
        if wanted.get(axis, dim) != dim and (sliced := _free_cuts(layout, target, wanted[axis], axis)) is not None:
            return Redistribution(Collective.ALL_TO_ALL, axis, wanted[axis], sliced)
    gathered = sorted(last, key=lambda each: each[0] in wanted)  # first an axis that cuts no dim of the target
    return Redistribution(Collective.ALL_GATHER, *gathered[0]) if gathered else None


def _free_cuts(layout: ShardingSpec, target: ShardingSpec, dim: str, axis: str) -> tuple[tuple[str, str], ...] | None:
    """Return the free cuts needed before ``axis`` can cut ``dim``; ``None`` where it cannot do so yet."""
    have, axes = layout.axes(dim), target.axes(dim)
    missing = axes[len(have) : axes.index(axis)]
    taken = {*layout.partial, *(each for _, others in layout.cuts for each in others)}
    if have != axes[: len(have)] or not taken.isdisjoint(missing):
        return None
    return tuple((dim, each) for each in missing)


def after(layout: ShardingSpec, move: Redistribution) -> ShardingSpec:
    """Return the layout after a collective.

    >>> exchange = Redistribution(Collective.ALL_TO_ALL, "expert", "experts")
    >>> print(after(ShardingSpec((("batch", ("expert",)),)), exchange))
    [experts/expert]
    """
    layout = move.before(layout)
    left = ShardingSpec(layout.without(move.axis).cuts, tuple(axis for axis in layout.partial if axis != move.axis))
    if move.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        return left.cut(move.dim, move.axis)
    return left
