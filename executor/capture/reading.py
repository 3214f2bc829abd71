"""Reads a program node by node, and derives the work of each node and the dims of each value.

It also finds the operator that mixes samples of a batch, so that the loss is not a mean over samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from meshwise.executor.capture.program import Program
from meshwise.executor.capture.rules.dims import Axes, Dim, Dims, leaves
from meshwise.executor.capture.rules.table import name_of, rule_of
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, Unknown, Work, present
from meshwise.simulator.operator_graph import OperatorKind

Value = tuple[Node, int]
"""A node and the index of one of its values."""

_WITHOUT_GRADIENT = frozenset(
    {"detach", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli"}
    | {"round", "floor", "ceil", "sign"}
)


@dataclass
class Reading:
    """Facts about the nodes of a program.

    Parameters
    ----------
    axes
        Dims of the values of each node.
    works
        Work of each node that is neither a placeholder nor a constant nor a part of another node.
    constant
        Nodes that depend on neither parameters nor inputs.
    differentiable
        Nodes whose value has a gradient.
    flowing
        Nodes that the loss reads on some path without an operator that ends gradients, as ``detach`` does.
    """

    program: Program
    dims: Dims = field(default_factory=Dims)
    axes: dict[Node, tuple[Axes, ...]] = field(default_factory=dict)
    works: dict[Node, Work] = field(default_factory=dict)
    constant: set[Node] = field(default_factory=set)
    differentiable: set[Node] = field(default_factory=set)
    flowing: set[Node] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def root(self, node: Node) -> Value:
        """Return the value that a node is a view of; the node's own value where it is no view."""
        if node in self.constant or node.op == "placeholder":
            return node, 0
        if is_part(node):
            source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
            assert isinstance(source, Node)
            views = self.works.get(source)
            if views is None or views.kind is not None:
                return source, index
            return self.root(source.all_input_nodes[index if len(source.all_input_nodes) > index else 0])
        return self.root(node.all_input_nodes[0]) if self.works[node].kind is None else (node, 0)


def read(program: Program, batch: int) -> Reading:
    """Return the reading of a program whose inputs have ``batch`` samples."""
    reading = Reading(program)
    _flow(reading, program.module.graph.output_node())
    samples = reading.dims.new(batch, batch=True)
    for node in list(program.module.graph.nodes):  # a copy: rules insert aliases into the graph
        if node.op == "placeholder":
            _placeholder(reading, node, samples)
        elif is_part(node):
            source, index = node.args
            reading.axes[node] = (reading.axes[source][index],)
            if source in reading.constant:
                reading.constant.add(node)
            _note_gradient(reading, node)
        elif node.op == "call_function":
            _call(reading, node)
    return reading


def _flow(reading: Reading, output: Node) -> None:
    """Record the nodes that gradients of the loss can reach."""
    left = list(output.all_input_nodes)
    while left:
        node = left.pop()
        if node not in reading.flowing:
            reading.flowing.add(node)
            left += [] if _stops(node) else node.all_input_nodes


def _stops(node: Node) -> bool:
    return node.op == "call_function" and not is_part(node) and name_of(node.target) in _WITHOUT_GRADIENT


def is_part(node: Node) -> bool:
    """Return whether a node only selects one of the values of another node."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the values of a node."""
    value = node.meta["val"]
    return tuple(tuple(each.shape) for each in (value if isinstance(value, tuple | list) else (value,)))


def _placeholder(reading: Reading, node: Node, samples: Dim) -> None:
    (shape,) = shapes(node)
    axes = reading.dims.axes(shape)
    if node.name in reading.program.inputs:
        axes = (samples, *axes[1:])
        reading.dims.keep_apart(axes)
    elif node.name not in reading.program.parameters:
        reading.constant.add(node)
    elif node.name in reading.program.trained:
        reading.differentiable.add(node)
    reading.axes[node] = (axes,)


def _call(reading: Reading, node: Node) -> None:
    if all(each in reading.constant for each in node.all_input_nodes):
        reading.constant.add(node)
        reading.axes[node] = tuple(reading.dims.axes(shape) for shape in shapes(node))
        return
    try:
        _note(reading, node, _work(reading, node))
    except Unknown as reason:
        reading.warnings.append(f"{node.target}: {reason}; it is replicated ({_where(node)})")
        _note(reading, node, _replicated(reading, node))


def _work(reading: Reading, node: Node) -> Work:
    rule: Rule | None = rule_of(node.target)
    if rule is None:
        raise Unknown("no rule says what it does to named dims")

    def renamed(alias: Node, work: Work) -> None:
        if node in reading.flowing and not _stops(node):  # the reader of the alias, which comes after the flow is noted
            reading.flowing.add(alias)
        _note(reading, alias, work)
        if alias.all_input_nodes[0] in reading.constant:
            reading.constant.add(alias)

    call = Call(node, reading.dims, reading.axes, reading.differentiable.__contains__, renamed)
    try:
        work = rule(call)
    except (KeyError, IndexError) as error:
        raise Unknown(f"its rule does not cover this call ({type(error).__name__}: {error})") from error
    sizes = tuple(tuple(1 if axis is None else axis.size for axis in axes) for axes in work.outputs)
    if sizes != shapes(node):
        raise Unknown(f"its rule says shapes {sizes} where torch says {shapes(node)}")
    return work


def _replicated(reading: Reading, node: Node) -> Work:
    outputs = tuple(reading.dims.axes(shape) for shape in shapes(node))
    made = tuple(axis for axes in outputs for axis in present(axes))
    operands = tuple(node.all_input_nodes)
    return Work(outputs, OperatorKind.ELEMENTWISE, uncut=made, space=made, saves=(*operands, RESULT))


def _note(reading: Reading, node: Node, work: Work) -> None:
    reading.axes[node] = work.outputs
    reading.works[node] = work
    _note_gradient(reading, node)


def _note_gradient(reading: Reading, node: Node) -> None:
    value = node.meta["val"]
    floats = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
    reads = any(each in reading.differentiable for each in node.all_input_nodes)
    if reads and floats and node in reading.flowing and not _stops(node):
        reading.differentiable.add(node)


def _where(node: Node) -> str:
    return module_path(node) or "in forward of the module itself"


def module_path(node: Node) -> str:
    """Return the qualified name of the module that a node is part of; the module itself is ``""``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


_LINEAR = frozenset({"add", "sub", "rsub", "neg", "sum", "cat", "stack", "_to_copy", "clone", "select", "slice"})
_PRODUCTS = frozenset({"mul", "mm", "bmm", "matmul", "linear", "addmm"})


def mixing_node(program: Program, batch: int, values: Sequence[Mapping[str, Any]]) -> Node | None:
    """Return the first node that is not linear in a sum over samples, or that cannot be cut along the batch.

    Parameters
    ----------
    batch
        Number of samples of the program's inputs.
    values
        Values of the program's nodes by name, for each of several batches. A sum that is the same for all of these
        batches, as a count without padding is, counts as a constant.
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
    """Return whether a node has the same value in all batches; False where a value is not known."""
    every = [batch.get(node.name) for batch in values]
    first = every[0] if every else None
    return isinstance(first, Tensor) and all(isinstance(each, Tensor) and torch.equal(first, each) for each in every)
