"""Layouts of tensors over the mesh, and the layout each operator asks for and leaves.

An operator's sharding says which dims of its iteration space are cut by which axes. The
layouts of all its tensors follow: a tensor is cut along the dims it shares, an output is
*partial* over the axes that cut a reduced dim, and the gradient of an input is partial
over the axes that cut dims which that input does not have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwise.simulator.brief import brief
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import Operator, Tensor


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Layout of one tensor: per cut dim its axes, outermost first; and the ``partial`` axes."""

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
        """The same cuts with nothing left to sum."""
        return ShardingSpec(self.cuts)

    def without(self, axis: str) -> "ShardingSpec":
        """Return the layout in which an axis cuts nothing, and nothing is left to sum."""
        cuts = ((dim, tuple(each for each in axes if each != axis)) for dim, axes in self.cuts)
        return ShardingSpec(tuple((dim, axes) for dim, axes in cuts if axes))

    def cut(self, dim: str, axis: str) -> "ShardingSpec":
        """Return the layout in which ``axis`` cuts the parts of ``dim`` once more."""
        return ShardingSpec(tuple((dict(self.cuts) | {dim: (*self.axes(dim), axis)}).items()), self.partial)

    def __str__(self) -> str:
        cuts = ", ".join(f"{dim}/{'*'.join(axes)}" for dim, axes in self.cuts)
        return f"[{cuts}]" + (f" partial over {'*'.join(self.partial)}" if self.partial else "")


REPLICATED = ShardingSpec()


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """Which dims of an operator's iteration space are cut, by operator name ``block.operator``.

    Parameters
    ----------
    kept
        The cuts of parameters and inputs that are kept in another layout than the operator reads: they are
        gathered for each pass that reads them, and gradients of parameters are scattered.
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
        The dim that the axis cuts afterwards, or cut before where it is gathered; empty where there is none.
    sliced
        The dims, each with an axis, that ranks cut before, for free: each keeps its part of what is whole.
    """

    collective: Collective
    axis: str
    dim: str
    sliced: tuple[tuple[str, str], ...] = ()

    def before(self, layout: ShardingSpec) -> ShardingSpec:
        """Return the layout that the collective finds: ``layout`` with what is cut for free."""
        for dim, axis in self.sliced:
            layout = layout.cut(dim, axis)
        return layout


@lru_cache(maxsize=4096)
def redistribute(source: ShardingSpec, target: ShardingSpec) -> tuple[Redistribution, ...]:
    """Return the collectives that turn ``source`` into ``target``; cutting what is whole is free.

    Of several axes that cut a dim, each cuts the parts of those before it: only the last one can leave, and what
    comes, comes last. What is gathered is gathered last, so that no other collective moves more than it must.

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
    """Return the next collective; ``None`` where free cuts are all that is missing."""
    for axis in layout.partial:
        if axis not in wanted:
            return Redistribution(Collective.ALL_REDUCE, axis, "")
        if (sliced := _free_cuts(layout, target, wanted[axis], axis)) is not None:
            return Redistribution(Collective.REDUCE_SCATTER, axis, wanted[axis], sliced)
    last = [(axes[-1], dim) for dim, axes in layout.cuts if axes != target.axes(dim)[: len(axes)]]
    for axis, dim in last:
        if wanted.get(axis, dim) != dim and (sliced := _free_cuts(layout, target, wanted[axis], axis)) is not None:
            return Redistribution(Collective.ALL_TO_ALL, axis, wanted[axis], sliced)
    gathered = sorted(last, key=lambda each: each[0] in wanted)  # first what no dim of the target has
    return Redistribution(Collective.ALL_GATHER, *gathered[0]) if gathered else None


def _free_cuts(layout: ShardingSpec, target: ShardingSpec, dim: str, axis: str) -> tuple[tuple[str, str], ...] | None:
    """Return what is cut for free before ``axis`` may come to ``dim``; ``None`` where it may not yet."""
    have, axes = layout.axes(dim), target.axes(dim)
    missing = axes[len(have) : axes.index(axis)]
    taken = {*layout.partial, *(each for _, others in layout.cuts for each in others)}
    if have != axes[: len(have)] or not taken.isdisjoint(missing):
        return None
    return tuple((dim, each) for each in missing)


def after(layout: ShardingSpec, move: Redistribution) -> ShardingSpec:
    """Return the layout that a collective leaves.

    >>> exchange = Redistribution(Collective.ALL_TO_ALL, "expert", "experts")
    >>> print(after(ShardingSpec((("batch", ("expert",)),)), exchange))
    [experts/expert]
    """
    layout = move.before(layout)
    left = ShardingSpec(layout.without(move.axis).cuts, tuple(axis for axis in layout.partial if axis != move.axis))
    if move.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        return left.cut(move.dim, move.axis)
    return left
