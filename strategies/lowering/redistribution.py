"""The collectives of one operator: what moves its tensors from one layout to another, and sums its statistics."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from simulator.collective_kinds import Collective
from simulator.compute import PRODUCTS, read_again
from simulator.operator_graph import Operator, OperatorKind
from strategies.lowering.communicator import Communicator
from strategies.lowering.step import Step, communication
from strategies.sharding import Redistribution, ShardingSpec, after, redistribute

if TYPE_CHECKING:
    from strategies.lowering.operator import BlockLayout

Groups = Mapping[str, Communicator]
"""The groups of a rank, by axis."""

_DEFERRED = PRODUCTS | {OperatorKind.EMBEDDING}


def transfers(
    layout: "BlockLayout", name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Redistribution, float]]:
    """Yield what moves a tensor from one layout to another: the collectives, each with its bytes.

    The bytes are those of the tensor that a group has together, of an exchange those that each rank has before it.
    """
    current = source
    for move in redistribute(source, target):
        exchanges, found = move.collective is Collective.ALL_TO_ALL, move.before(current)
        yield move, float(layout.tensor_bytes(name, found.complete if exchanges else found.without(move.axis)))
        current = after(current, move)


def collectives(
    layout: "BlockLayout", groups: Groups, name: str, source: ShardingSpec, target: ShardingSpec, what: str = ""
) -> list[Step]:
    """Return the collectives that move a tensor, or ``what`` of it, from one layout to another."""
    return [
        communication(groups[move.axis], move.axis, move.collective, size, f"{what}{name}")._replace(tensor=name)
        for move, size in transfers(layout, name, source, target)
        if move.axis in groups
    ]


def exchanged_axes(layout: "BlockLayout") -> frozenset[str]:
    """Return the axes along which redistributions between the operators of a block run all-to-alls."""
    pairs = {
        (layout.produced[name], layout.wanted(operator, name))
        for operator in layout.block.operators
        for name in operator.inputs
    }
    moves = (
        move for have, wanted in pairs for move in (*redistribute(have, wanted), *redistribute(wanted, have.complete))
    )
    return frozenset(move.axis for move in moves if move.collective is Collective.ALL_TO_ALL)


class Around(NamedTuple):
    """What runs around an operator: before its forward, and before and after its backward."""

    forward: list[Step]
    backward: list[Step]
    after: list[Step]


def defers(operator: Operator) -> bool:
    """Return whether an operator's gradients of weights are computed apart: products, and tables without a gradient."""
    return bool(operator.parameters) and operator.kind in _DEFERRED


def kept_cut(layout: "BlockLayout", groups: Groups, operator: Operator, inputs: tuple[str, ...]) -> Around:
    """Return the gathers and scatters of what an operator keeps cut, and the sums of its statistics.

    Parameters
    ----------
    inputs
        What is gathered again for the gradients of its weights.
    """
    names = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    statistics, late = _statistics(layout, groups, operator), defers(operator)
    of_gradients = [step._replace(tensor="") for step in statistics]  # they move nothing that another operator makes
    parameters = {name: _gather(layout, groups, operator, name) for name in names}
    again = chain.from_iterable(_gather(layout, groups, operator, name) for name in inputs)
    weights = chain.from_iterable(parameters[name] for name in read_again(operator) if name in parameters)
    gradients = chain.from_iterable(_scatter(layout, groups, operator, name) for name in names)
    return Around(
        [*chain.from_iterable(parameters.values()), *statistics],
        [*(step._replace(deferred=late) for step in again), *weights, *of_gradients],
        [step._replace(deferred=late) for step in gradients],
    )


def _gather(layout: "BlockLayout", groups: Groups, operator: Operator, name: str) -> list[Step]:
    """Return the collectives that bring a parameter or input from where it is kept to an operator."""
    return collectives(layout, groups, name, layout.kept(operator, name), layout.wanted(operator, name))


def _scatter(layout: "BlockLayout", groups: Groups, operator: Operator, name: str) -> list[Step]:
    """Return the collectives that sum the gradient of a parameter and leave it as the parameter is kept."""
    kept, gradient = layout.kept(operator, name), layout.shardings[operator.name].of_gradient(layout.block.tensor[name])
    gathered = {axis for _, axes in kept.cuts for axis in axes} - {axis for _, axes in gradient.cuts for axis in axes}
    partial = ShardingSpec(gradient.cuts, tuple(axis for axis in gradient.partial if axis in gathered))
    return collectives(layout, groups, name, partial, kept, "gradient of ")


def gathered_again(layout: "BlockLayout") -> dict[str, tuple[str, ...]]:
    """Return the inputs that are gathered again in backward, by the last reader of each: its backward comes first."""
    last: dict[tuple[str, ShardingSpec], str] = {}
    for operator in layout.block.operators:
        again = (name for name in operator.inputs if layout.gathers_again(operator, name))
        last |= {(name, layout.wanted(operator, name)): operator.name for name in again}
    found: dict[str, tuple[str, ...]] = {}
    for (name, _), reader in last.items():
        found[reader] = (*found.get(reader, ()), name)
    return found


def _statistics(layout: "BlockLayout", groups: Groups, operator: Operator) -> list[Step]:
    """Return the sums of an operator's statistics over the ranks that cut what they are of."""
    cuts = dict(layout.shardings[operator.name].cuts)
    every = ((dim, count, axis) for dim, count in operator.statistics for axis in cuts.get(dim, ()) if axis in groups)
    steps = []
    for dim, count, axis in every:
        size = layout.statistics_bytes(operator, dim, count)
        step = communication(groups[axis], axis, Collective.ALL_REDUCE, size, f"statistics of {operator.name}")
        steps.append(step._replace(tensor=operator.outputs[0]))
    return steps
