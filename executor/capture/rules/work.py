"""The interface of rules: the call that a rule gets, and the work that it returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from meshwise.executor.capture.rules.dims import Axes, Dim, Dims, leaves
from meshwise.simulator.operator_graph import OperatorKind

ALIAS = torch.ops.aten.alias.default


class Unknown(Exception):
    """Raised where a rule does not cover a call; the operator is then replicated."""


@dataclass(frozen=True)
class Work:
    """The work of an operator: dims of its values, its cost, and which dims can be cut.

    Parameters
    ----------
    outputs
        Dims of each value of the operator.
    kind
        Kind of the operator; None for a view, which is sharded as its first operand.
    reduced, uncut
        Dims that are summed over, and dims that no mesh axis may cut.
    space
        Dims of the iteration space; empty where it is all dims of outputs and operands.
    flops
        FLOP for one point of the iteration space.
    saves
        Operands that backward reads; `RESULT` is the operator's first value, `MASK` its second.
    executed
        Fraction of the iteration space that the kernel executes.
    """

    outputs: tuple[Axes, ...]
    kind: OperatorKind | None = None
    reduced: tuple[Dim, ...] = ()
    uncut: tuple[Dim, ...] = ()
    space: tuple[Dim, ...] = ()
    flops: float = 0.0
    saves: tuple["Node | str", ...] = ()
    executed: float = 1.0


RESULT, MASK = "result", "mask"


@dataclass
class Call:
    """One node as a rule sees it: its arguments by their names in the schema, and the dims of its operands.

    Parameters
    ----------
    known
        Dims of the values of every node before this one.
    differentiable
        Tells whether a node's value has a gradient.
    renamed
        Called with every new ``alias`` node by which an operand is read under other dims, and its work.
    given
        Argument name -> value, with the defaults of the schema.
    """

    node: Node
    dims: Dims
    known: dict[Node, tuple[Axes, ...]]
    differentiable: Callable[[Node], bool]
    renamed: Callable[[Node, Work], None]
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema: Any = self.node.target
        defaults = {each.name: each.default_value for each in schema._schema.arguments if each.has_default_value()}
        placed = {each.name: value for each, value in zip(schema._schema.arguments, self.node.args, strict=False)}
        self.given = {**defaults, **placed, **self.node.kwargs}
        self.order = [each.name for each in schema._schema.arguments]

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def value(self, index: int) -> Any:
        """Return the value of the argument at ``index`` of the schema, or its default."""
        name = self.order[index]
        return self.given.get(name)

    def axes(self, operand: Node) -> Axes:
        """Return the dims of an operand."""
        return self.known[operand][0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the values."""
        value = self.node.meta["val"]
        values = value if isinstance(value, tuple | list) else (value,)
        return tuple(tuple(int(size) for size in each.shape) for each in values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first value."""
        return self.shapes[0]

    def operands(self) -> list[Node]:
        """Return the tensors that the node reads."""
        return self.node.all_input_nodes

    def align(self, operand: Node, wanted: Mapping[int, Dim | None]) -> Node:
        """Unify dims of an operand with the given dims, by torch dim; return the node to read: the operand or an alias.

        The alias has new dims where the operand's own cannot be unified. Raises `RuleError` where these cannot either.
        """
        axes = self.axes(operand)
        failed = [
            place
            for place, dim in wanted.items()
            if dim is not None and axes[place] is not None and not self._unify(axes[place], dim)
        ]
        if not failed:
            return operand
        sought = {leaf for dim in wanted.values() if dim is not None for leaf in dim.leaves}
        others = (place for place in range(len(axes)) if place not in wanted)
        taken = [place for place in others if sought & set(leaves(axes[place : place + 1]))]
        alias = self.rename(operand, failed + taken)
        for place in failed:
            if not self._unify(self.axes(alias)[place], wanted[place]):
                raise Unknown(f"dim {place} of {operand.name} is not one with that of another operand")
        return alias

    def _unify(self, one: Dim | None, other: Dim | None) -> bool:
        assert one is not None and other is not None
        return one.size == other.size and self.dims.unify(one, other)

    def separate(self, operand: Node, places: Iterable[int], others: Sequence[Dim | None]) -> Node:
        """Return a node whose dims at ``places`` are not in ``others``: the operand, or an alias with new dims."""
        taken, axes = set(leaves(others)), self.axes(operand)
        same = [place for place in places if taken & set(leaves(axes[place : place + 1]))]
        return self.rename(operand, same) if same else operand

    def rename(self, operand: Node, places: Sequence[int]) -> Node:
        """Insert an alias of an operand, which has new dims at ``places``, before this node and return it."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            alias = graph.call_function(ALIAS, (operand,))
        alias.meta = {**self.node.meta, "val": operand.meta["val"]}
        axes = self.axes(operand)
        old = tuple(axis for place in places if (axis := axes[place]) is not None)
        renewed = tuple(
            self.dims.new(axis.size) if axis is not None and place in places else axis
            for place, axis in enumerate(axes)
        )
        self.dims.keep_apart(renewed)
        kept = tuple(axis for axis in axes if axis is not None)
        self.renamed(alias, Work((renewed,), OperatorKind.VIEW, uncut=old, space=kept))
        return alias

    def read(self, name: str, operand: Node) -> None:
        """Replace the node's argument ``name`` by ``operand``."""
        self.given[name] = operand
        index = self.order.index(name)
        if index < len(self.node.args):
            self.node.update_arg(index, operand)
        else:
            self.node.update_kwarg(name, operand)

    def read_item(self, name: str, item: int, operand: Node) -> None:
        """Replace an item of the node's list argument ``name`` by ``operand``."""
        values = list(self.given[name])
        values[item] = operand
        self.given[name] = values
        self.node.update_arg(self.order.index(name), values)

    def place(self, index: int, axes: Axes) -> int:
        """Return a torch dim as an index from 0; a negative ``index`` counts from the end."""
        return index % len(axes) if axes else 0


Rule = Callable[[Call], Work]


def present(axes: Iterable[Dim | None]) -> tuple[Dim, ...]:
    """Return the dims of a size above 1."""
    return tuple(axis for axis in axes if axis is not None)
