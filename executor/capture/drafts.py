"""Operators of a program, before dims have names and operators belong to blocks."""

from dataclasses import dataclass

from torch.fx import Node

from executor.capture.dims import Axes, Dim, leaves
from executor.capture.reading import Reading, Value, module_path
from executor.capture.rules.table import name_of
from executor.capture.rules.work import MASK, RESULT, Work
from simulator.operator_graph import OperatorKind


@dataclass(frozen=True, eq=False)
class Draft:
    """One operator: what flows in and out as values of nodes, and its dims."""

    node: Node
    name: str
    path: str
    kind: OperatorKind
    space: tuple[Dim, ...]
    reduced: tuple[Dim, ...]
    uncut: tuple[Dim, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    flops: float
    executed: float

    @property
    def values(self) -> tuple[Value, ...]:
        """All values that it names."""
        return tuple(dict.fromkeys((*self.inputs, *self.parameters, *self.outputs, *self.saved)))


def drafts(reading: Reading) -> tuple[Draft, ...]:
    """Return the operators in the order of the program; aliases that nothing reads are none."""
    nodes = (node for node in reading.program.module.graph.nodes if node in reading.works and node.users)
    return tuple(
        _draft(reading, node, work)
        for node in nodes
        if node not in reading.constant and (work := reading.works[node]).kind is not None
    )


def _draft(reading: Reading, node: Node, work: Work) -> Draft:
    operands = node.all_input_nodes
    views = [axes for each in operands for axes in reading.axes[each][:1]] + list(work.outputs)
    reduced = leaves(work.reduced)
    space = leaves(work.space) if work.space else leaves(axis for axes in (*work.outputs, *views) for axis in axes)
    space = tuple(dict.fromkeys((*space, *reduced)))
    closed = {*leaves(work.uncut), *_inner(views)}
    roots = [reading.root(each) for each in operands]
    is_parameter = [value[0].name in reading.program.parameters for value in roots]
    read = [value for value, mine in zip(roots, is_parameter, strict=True) if not mine]
    owned = [value for value, mine in zip(roots, is_parameter, strict=True) if mine]
    kind, read = _sound(work.kind, read, owned)
    return Draft(
        node,
        name_of(node.target),
        module_path(node),
        kind,
        space,
        reduced,
        tuple(dim for dim in space if dim in closed),
        tuple(read),
        tuple(dict.fromkeys(owned)),
        tuple((node, index) for index in range(len(work.outputs))),
        tuple(dict.fromkeys(_saved(reading, node, work))),
        work.flops,
        work.executed,
    )


def _inner(views: list[Axes]) -> set[Dim]:
    """Return the dims that lie within others in a torch dim: a contiguous part of it is no part of theirs."""
    return {leaf for axes in views for axis in axes if axis is not None for leaf in axis.leaves[1:]}


def _sound(kind: OperatorKind | None, read: list[Value], owned: list[Value]) -> tuple[OperatorKind, list[Value]]:
    """Return the kind as its cost is told: a product has two operands, and a table is a parameter."""
    assert kind is not None
    products = (OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.CONVOLUTION)
    once = list(dict.fromkeys(read))
    if kind in products and (not read or len(once) + len(owned) < 2):
        return OperatorKind.ELEMENTWISE, once
    if kind is OperatorKind.EMBEDDING and not owned:
        return OperatorKind.ELEMENTWISE, once
    return kind, once


def _saved(reading: Reading, node: Node, work: Work) -> list[Value]:
    if node not in reading.differentiable:
        return []
    result: list[Value] = []
    for each in work.saves:
        if each == RESULT:
            result.append((node, 0))
        elif each == MASK:
            result.append((node, 1))
        elif isinstance(each, Node):
            root = reading.root(each)
            if root[0].name not in reading.program.parameters:
                result.append(root)
    return result
