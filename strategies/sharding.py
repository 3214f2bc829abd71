"""Layouts of tensors over the mesh, and the layout each operator asks for and leaves.

An operator's sharding says which dims of its iteration space are cut by which axes. The
layouts of all its tensors follow: a tensor is cut along the dims it shares, an output is
*partial* over the axes that cut a reduced dim, and the gradient of an input is partial
over the axes that cut dims which that input does not have.
"""

from dataclasses import dataclass

from simulator.collective_kinds import Collective
from simulator.operator_graph import Operator, Tensor


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Layout of one tensor: per cut dim its axes, outermost first; and the ``partial`` axes."""

    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[str, ...] = ()

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that cut ``dim``."""
        return dict(self.cuts).get(dim, ())

    @property
    def complete(self) -> "ShardingSpec":
        """The same cuts with nothing left to sum."""
        return ShardingSpec(self.cuts)

    def without(self, axis: str) -> "ShardingSpec":
        """Return the layout in which an axis cuts nothing, and nothing is left to sum."""
        cuts = ((dim, tuple(each for each in axes if each != axis)) for dim, axes in self.cuts)
        return ShardingSpec(tuple((dim, axes) for dim, axes in cuts if axes))

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
    """One collective along one axis that moves a tensor to another layout."""

    collective: Collective
    axis: str
    dim: str


def redistribute(source: ShardingSpec, target: ShardingSpec) -> tuple[Redistribution, ...]:
    """Return the collectives that turn ``source`` into ``target``; cutting what is whole is free.

    What is gathered is gathered last, so that no other collective moves more than it must.

    >>> redistribute(ShardingSpec(partial=("tensor",)), REPLICATED)
    (Redistribution(collective=<Collective.ALL_REDUCE: 'all_reduce'>, axis='tensor', dim=''),)
    """
    if target.partial:
        raise ValueError(f"a tensor is not made partial, met {target}")
    steps: list[Redistribution] = []
    placed = {axis: dim for dim, axes in source.cuts for axis in axes}
    wanted = {axis: dim for dim, axes in target.cuts for axis in axes}
    for axis in source.partial:
        collective = Collective.REDUCE_SCATTER if axis in wanted else Collective.ALL_REDUCE
        steps.append(Redistribution(collective, axis, wanted.get(axis, "")))
    moved = (axis for axis, dim in placed.items() if wanted.get(axis, dim) != dim)
    steps += [Redistribution(Collective.ALL_TO_ALL, axis, wanted[axis]) for axis in moved]
    gathered = ((axis, dim) for axis, dim in placed.items() if axis not in wanted)
    return (*steps, *(Redistribution(Collective.ALL_GATHER, axis, dim) for axis, dim in gathered))


def after(layout: ShardingSpec, move: Redistribution) -> ShardingSpec:
    """Return the layout that a collective leaves.

    >>> exchange = Redistribution(Collective.ALL_TO_ALL, "expert", "experts")
    >>> print(after(ShardingSpec((("batch", ("expert",)),)), exchange))
    [experts/expert]
    """
    cuts = dict(layout.without(move.axis).cuts)
    if move.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        cuts[move.dim] = (*cuts.get(move.dim, ()), move.axis)
    partial = tuple(axis for axis in layout.partial if axis != move.axis)
    return ShardingSpec(tuple(cuts.items()), partial)
