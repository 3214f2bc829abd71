"""What a rule is given, and what it says of an operator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from meshwise.executor.capture.rules.dims import Axes, Dim, Dims, leaves
from meshwise.simulator.operator_graph import OperatorKind

ALIAS = torch.ops.aten.alias.default


class Unknown(Exception):
    """A rule does not cover a call: the operator is treated as replicated."""


@dataclass(frozen=True)
class Work:
    """What an operator does.

    Parameters
    ----------
    outputs
        Dims of each value.
    kind
        None for a view: it follows its first operand.
    reduced, uncut
        Dims that are summed away, and dims that no axis may cut.
    space
        The iteration space where it is not all dims of outputs and operands.
    flops
        FLOP for one point of the iteration space.
    saves
        Operands that backward reads; `RESULT` is the first value, `MASK` the second.
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
    """One node as its rule sees it: operands by the names of the schema, and their dims.

    Parameters
    ----------
    known
        Dims of the values of every node before this one.
    differentiable
        Nodes whose value has a gradient.
    renamed
        Receives a new ``alias`` node wherever an operand is read under other dims.
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
        """Return the value of the argument at ``index``, its default where it was left out."""
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
        """Make torch dims of an operand those that are wanted; return what is then read: the operand or its alias."""
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
        """Make dims of an operand others than some; return what is then read: the operand or its alias."""
        taken, axes = set(leaves(others)), self.axes(operand)
        same = [place for place in places if taken & set(leaves(axes[place : place + 1]))]
        return self.rename(operand, same) if same else operand

    def rename(self, operand: Node, places: Sequence[int]) -> Node:
        """Read an operand as an alias, whose dims at some places are new ones."""
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
        """Make the node read ``operand`` as its argument ``name``."""
        self.given[name] = operand
        index = self.order.index(name)
        if index < len(self.node.args):
            self.node.update_arg(index, operand)
        else:
            self.node.update_kwarg(name, operand)

    def read_item(self, name: str, item: int, operand: Node) -> None:
        """Make the node read ``operand`` as an item of its list argument ``name``."""
        values = list(self.given[name])
        values[item] = operand
        self.given[name] = values
        self.node.update_arg(self.order.index(name), values)

    def place(self, index: int, axes: Axes) -> int:
        """Return a torch dim that may count from the end as one that counts from 0."""
        return index % len(axes) if axes else 0


Rule = Callable[[Call], Work]


def present(axes: Iterable[Dim | None]) -> tuple[Dim, ...]:
    """Return the dims of more than one."""
    return tuple(axis for axis in axes if axis is not None)
