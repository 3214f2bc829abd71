"""Where samples of a batch meet: the operator after which a loss is no mean over samples any more."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from executor.capture.dims import leaves
from executor.capture.program import Program
from executor.capture.reading import Reading, is_part, read
from executor.capture.rules.table import name_of
from simulator.operator_graph import OperatorKind

_LINEAR = frozenset({"add", "sub", "rsub", "neg", "sum", "cat", "stack", "_to_copy", "clone", "select", "slice"})
_PRODUCTS = frozenset({"mul", "mm", "bmm", "matmul", "linear", "addmm"})


def mixing_node(program: Program, batch: int, values: Sequence[Mapping[str, Any]]) -> Node | None:
    """Return the first node that computes something of a sum over samples that is not linear in it.

    Parameters
    ----------
    batch
        Samples of the program's inputs.
    values
        The values of the program's nodes by name for each of several batches: a sum that is the same in all of them,
        as a count without padding, is a number.
    """
    reading = read(program, batch)
    sums: set[Node] = set()
    nodes: list[Node] = list(program.module.graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node in reading.constant or _is_number(node, values):
            continue
        sources = [each for each in node.all_input_nodes if each in sums]
        if is_part(node):
            sums.update([node] if sources else [])
            continue
        work = reading.works[node]
        if any(dim.batch for dim in leaves(work.uncut)):
            return node
        if sources and (_has_batch(reading, node) or not _is_linear(node, work.kind, sums)):
            return node
        if sources or any(dim.batch for dim in leaves(work.reduced)):
            sums.add(node)
    return None


def summing_node(program: Program, batch: int) -> Node | None:
    """Return the last node that sums over samples."""
    reading = read(program, batch)
    nodes = [node for node in reading.works if any(dim.batch for dim in leaves(reading.works[node].reduced))]
    return nodes[-1] if nodes else None


def _has_batch(reading: Reading, node: Node) -> bool:
    return any(dim.batch for axes in reading.axes[node] for dim in leaves(axes))


def _is_linear(node: Node, kind: OperatorKind | None, sums: set[Node]) -> bool:
    name = name_of(node.target)
    operands = [argument in sums for argument in node.args if isinstance(argument, Node)]
    if name in _PRODUCTS:
        return sum(operands) == 1
    if name == "div":
        return operands == [True] or operands == [True, False]
    return kind is None or kind is OperatorKind.VIEW or name in _LINEAR


def _is_number(node: Node, values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a node has one value in all batches, as far as it is known."""
    every = [each.get(node.name) for each in values]
    first = every[0] if every else None
    return isinstance(first, Tensor) and all(isinstance(each, Tensor) and torch.equal(first, each) for each in every)
