"""The interface of rules: the call that a rule gets, and the work that it returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from meshwise.executor.capture.rules.dims import Dim, DimUnifier, TensorDims, list_leaves
from meshwise.simulator.operator_graph import OperatorKind

ALIAS = torch.ops.aten.alias.default


class RuleError(Exception):
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
    reduced_dims, uncut_dims
        Dims that are summed over, and dims that no mesh axis may cut.
    space
        Dims of the iteration space; empty where it is all dims of outputs and operands.
    flops
        FLOP for one point of the iteration space.
    saves
        Operands that backward reads; `RESULT` is the operator's first value, `MASK` its second.
    executed_fraction
        Fraction of the iteration space that the kernel executes.
    is_pointwise
        Whether every point of the dims that may be cut is computed alone: then also where they are inner dims of a
        merged torch dim, of which a part is not contiguous, as of the tokens of all samples.
    """

    outputs: tuple[TensorDims, ...]
    kind: OperatorKind | None = None
    reduced_dims: tuple[Dim, ...] = ()
    uncut_dims: tuple[Dim, ...] = ()
    space: tuple[Dim, ...] = ()
    flops: float = 0.0
    saves: tuple["Node | str", ...] = ()
    executed_fraction: float = 1.0
    is_pointwise: bool = False


RESULT, MASK = "result", "mask"


@dataclass
class Call:
    """One node as a rule sees it: its arguments by their names in the schema, and the dims of its operands.

    Parameters
    ----------
    known_dims
        Dims of the values of every node before this one.
    is_differentiable
        Tells whether a node's value has a gradient.
    add_alias
        Called with every new ``alias`` node by which an operand is read under other dims, and its work.
    arguments
        Argument name -> value, with the defaults of the schema.
    """

    node: Node
    unifier: DimUnifier
    known_dims: dict[Node, tuple[TensorDims, ...]]
    is_differentiable: Callable[[Node], bool]
    add_alias: Callable[[Node, Work], None]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target: Any = self.node.target
        schema = target._schema.arguments
        defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        self.argument_names = [argument.name for argument in schema]
        positional = dict(zip(self.argument_names, self.node.args, strict=False))
        self.arguments = {**defaults, **positional, **self.node.kwargs}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get_argument(self, index: int) -> Any:
        """Return the value of the argument at ``index`` of the schema, or its default."""
        return self.arguments.get(self.argument_names[index])

    def get_dims(self, operand: Node) -> TensorDims:
        """Return the dims of an operand."""
        return self.known_dims[operand][0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the values."""
        return list_shapes(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first value."""
        return self.shapes[0]

    def align(self, operand: Node, wanted_dims: Mapping[int, Dim | None]) -> Node:
        """Unify dims of an operand with the given dims, by torch dim; return the node to read: the operand or an alias.

        The alias has new dims where the operand's own cannot be unified. Raises `RuleError` where these cannot either.
        """
        dims = self.get_dims(operand)
        failed_places = [
            place
            for place, dim in wanted_dims.items()
            if dim is not None and dims[place] is not None and not self._unify(dims[place], dim)
        ]
        if not failed_places:
            return operand
        wanted_leaves = {leaf for dim in wanted_dims.values() if dim is not None for leaf in dim.leaves}
        other_places = (place for place in range(len(dims)) if place not in wanted_dims)
        clashing_places = [place for place in other_places if wanted_leaves & set(list_leaves(dims[place : place + 1]))]
        alias = self.rename(operand, failed_places + clashing_places)
        for place in failed_places:
            if not self._unify(self.get_dims(alias)[place], wanted_dims[place]):
                raise RuleError(f"dim {place} of {operand.name} is not one with that of another operand")
        return alias

    def _unify(self, left_dim: Dim | None, right_dim: Dim | None) -> bool:
        assert left_dim is not None and right_dim is not None
        return left_dim.size == right_dim.size and self.unifier.unify(left_dim, right_dim)

    def separate(self, operand: Node, places: Iterable[int], other_dims: Sequence[Dim | None]) -> Node:
        """Return a node whose dims at ``places`` are not in ``other_dims``: the operand, or an alias with new dims."""
        other_leaves, dims = set(list_leaves(other_dims)), self.get_dims(operand)
        clashing_places = [place for place in places if other_leaves & set(list_leaves(dims[place : place + 1]))]
        return self.rename(operand, clashing_places) if clashing_places else operand

    def rename(self, operand: Node, places: Sequence[int]) -> Node:
        """Insert an alias of an operand, which has new dims at ``places``, before this node and return it."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            alias = graph.call_function(ALIAS, (operand,))
        alias.meta = {**self.node.meta, "val": operand.meta["val"]}
        dims = self.get_dims(operand)
        old_dims = tuple(dim for place in places if (dim := dims[place]) is not None)
        new_dims = tuple(
            self.unifier.create_dim(dim.size) if dim is not None and place in places else dim
            for place, dim in enumerate(dims)
        )
        self.unifier.keep_apart(new_dims)
        present_dims = tuple(dim for dim in dims if dim is not None)
        self.add_alias(alias, Work((new_dims,), OperatorKind.VIEW, uncut_dims=old_dims, space=present_dims))
        return alias

    def replace_operand(self, name: str, operand: Node | list[Node]) -> None:
        """Replace the node's argument ``name`` by ``operand``."""
        self.arguments[name] = operand
        index = self.argument_names.index(name)
        if index < len(self.node.args):
            self.node.update_arg(index, operand)
        else:
            self.node.update_kwarg(name, operand)

    def read(self, name: str, operand: Node, item: int | None = None) -> Node:
        """Make the node read ``operand`` as its argument ``name``, or as an item of that list; return the operand."""
        values = [self.arguments[name]] if item is None else list(self.arguments[name])
        if operand is not values[item or 0]:
            values[item or 0] = operand
            self.replace_operand(name, operand if item is None else values)
        return operand

    def normalise_index(self, index: int, dims: TensorDims) -> int:
        """Return a torch dim as an index from 0; a negative ``index`` counts from the end."""
        return index % len(dims) if dims else 0


Rule = Callable[[Call], Work]


def list_values(node: Node) -> tuple[Any, ...]:
    """Return examples of the values of a node."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def list_shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the values of a node."""
    return tuple(tuple(tensor.shape) for tensor in list_values(node))


def drop_none(dims: Iterable[Dim | None]) -> tuple[Dim, ...]:
    """Return the dims of a size above 1."""
    return tuple(dim for dim in dims if dim is not None)
