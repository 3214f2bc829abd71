"""Reads a program node by node, and derives the work of each node and the dims of each value.

It also finds the operator that mixes samples of a batch, so that the loss is not a mean over samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from meshwise.executor.capture.captured import Program, is_part
from meshwise.executor.capture.rules.dims import Dim, DimUnifier, TensorDims, list_leaves
from meshwise.executor.capture.rules.table import find_rule, get_name
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, RuleError, Work, drop_none, list_shapes
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
    node_dims
        Dims of the values of each node.
    works
        Work of each node that is neither a placeholder nor a constant nor a part of another node.
    constants
        Nodes that depend on neither parameters nor inputs.
    differentiable_nodes
        Nodes whose value has a gradient.
    flow_nodes
        Nodes that the loss reads on some path without an operator that ends gradients, as ``detach`` does.
    """

    program: Program
    unifier: DimUnifier = field(default_factory=DimUnifier)
    node_dims: dict[Node, tuple[TensorDims, ...]] = field(default_factory=dict)
    works: dict[Node, Work] = field(default_factory=dict)
    constants: set[Node] = field(default_factory=set)
    differentiable_nodes: set[Node] = field(default_factory=set)
    flow_nodes: set[Node] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def find_root(self, node: Node) -> Value:
        """Return the value that a node is a view of; the node's own value where it is no view."""
        if node in self.constants or node.op == "placeholder":
            return node, 0
        if is_part(node):
            source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
            assert isinstance(source, Node)
            views = self.works.get(source)
            if views is None or views.kind is not None:
                return source, index
            return self.find_root(source.all_input_nodes[index if len(source.all_input_nodes) > index else 0])
        return self.find_root(node.all_input_nodes[0]) if self.works[node].kind is None else (node, 0)


def read_program(program: Program, batch: int) -> Reading:
    """Return the reading of a program whose inputs have ``batch`` samples."""
    reading = Reading(program)
    _mark_flow(reading, program.module.graph.output_node())
    batch_dim = reading.unifier.create_dim(batch, batch=True)
    for node in list(program.module.graph.nodes):  # a copy: rules insert aliases into the graph
        if node.op == "placeholder":
            _read_placeholder(reading, node, batch_dim)
        elif is_part(node):
            source, index = node.args
            reading.node_dims[node] = (reading.node_dims[source][index],)
            if source in reading.constants:
                reading.constants.add(node)
            _note_gradient(reading, node)
        elif node.op == "call_function":
            _read_call(reading, node)
    return reading


def _mark_flow(reading: Reading, output: Node) -> None:
    """Record the nodes that gradients of the loss can reach."""
    pending = list(output.all_input_nodes)
    while pending:
        node = pending.pop()
        if node not in reading.flow_nodes:
            reading.flow_nodes.add(node)
            pending += [] if _stops_gradient(node) else node.all_input_nodes


def _stops_gradient(node: Node) -> bool:
    return node.op == "call_function" and not is_part(node) and get_name(node.target) in _WITHOUT_GRADIENT


def _read_placeholder(reading: Reading, node: Node, batch_dim: Dim) -> None:
    (shape,) = list_shapes(node)
    dims = reading.unifier.create_dims(shape)
    if node.name in reading.program.inputs:
        dims = (batch_dim, *dims[1:])
        reading.unifier.keep_apart(dims)
    elif node.name not in reading.program.parameters:
        reading.constants.add(node)
    elif node.name in reading.program.trained_parameters:
        reading.differentiable_nodes.add(node)
    reading.node_dims[node] = (dims,)


def _read_call(reading: Reading, node: Node) -> None:
    if all(operand in reading.constants for operand in node.all_input_nodes):
        reading.constants.add(node)
        reading.node_dims[node] = tuple(reading.unifier.create_dims(shape) for shape in list_shapes(node))
        return
    try:
        _note_work(reading, node, _apply_rule(reading, node))
    except RuleError as reason:
        module = find_module_path(node) or "in forward of the module itself"
        reading.warnings.append(f"{node.target}: {reason}; it is replicated ({module})")
        _note_work(reading, node, _replicate(reading, node))


def _apply_rule(reading: Reading, node: Node) -> Work:
    rule: Rule | None = find_rule(node.target)
    if rule is None:
        raise RuleError("no rule says what it does to named dims")

    def add_alias(alias: Node, work: Work) -> None:
        # the alias, which comes after the flow is noted, is read by the node
        if node in reading.flow_nodes and not _stops_gradient(node):
            reading.flow_nodes.add(alias)
        _note_work(reading, alias, work)
        if alias.all_input_nodes[0] in reading.constants:
            reading.constants.add(alias)

    call = Call(node, reading.unifier, reading.node_dims, reading.differentiable_nodes.__contains__, add_alias)
    try:
        work = rule(call)
    except (KeyError, IndexError) as error:
        raise RuleError(f"its rule does not cover this call ({type(error).__name__}: {error})") from error
    sizes = tuple(tuple(1 if dim is None else dim.size for dim in dims) for dims in work.outputs)
    if sizes != list_shapes(node):
        raise RuleError(f"its rule says shapes {sizes} where torch says {list_shapes(node)}")
    return work


def _replicate(reading: Reading, node: Node) -> Work:
    outputs = tuple(reading.unifier.create_dims(shape) for shape in list_shapes(node))
    output_dims = tuple(dim for dims in outputs for dim in drop_none(dims))
    operands = tuple(node.all_input_nodes)
    return Work(outputs, OperatorKind.ELEMENTWISE, uncut_dims=output_dims, space=output_dims, saves=(*operands, RESULT))


def _note_work(reading: Reading, node: Node, work: Work) -> None:
    reading.node_dims[node] = work.outputs
    reading.works[node] = work
    _note_gradient(reading, node)


def _note_gradient(reading: Reading, node: Node) -> None:
    value = node.meta["val"]
    is_float = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
    reads_gradient = any(operand in reading.differentiable_nodes for operand in node.all_input_nodes)
    if reads_gradient and is_float and node in reading.flow_nodes and not _stops_gradient(node):
        reading.differentiable_nodes.add(node)


def find_module_path(node: Node) -> str:
    """Return the qualified name of the module that a node is part of; the module itself is ``""``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


_LINEAR = frozenset({"add", "sub", "rsub", "neg", "sum", "cat", "stack", "_to_copy", "clone", "select", "slice"})
_PRODUCTS = frozenset({"mul", "mm", "bmm", "matmul", "linear", "addmm"})


def find_mixing_node(program: Program, batch: int, values: Sequence[Mapping[str, Any]]) -> Node | None:
    """Return the first node that is not linear in a sum over samples, or that cannot be cut along the batch.

    Parameters
    ----------
    batch
        Number of samples of the program's inputs.
    values
        Values of the program's nodes by name, for each of several batches. A sum that is the same for all of these
        batches, as a count without padding is, counts as a constant.
    """
    reading = read_program(program, batch)
    sums: set[Node] = set()
    nodes: list[Node] = list(program.module.graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node in reading.constants or _is_number(node, values):
            continue
        sources = [operand for operand in node.all_input_nodes if operand in sums]
        if is_part(node):
            sums.update([node] if sources else [])
            continue
        work = reading.works[node]
        if any(dim.batch for dim in list_leaves(work.uncut_dims)):
            return node
        if sources and (_has_batch(reading, node) or not _is_linear(node, work.kind, sums)):
            return node
        if sources or any(dim.batch for dim in list_leaves(work.reduced_dims)):
            sums.add(node)
    return None


def find_summing_node(program: Program, batch: int) -> Node | None:
    """Return the last node that sums over samples."""
    reading = read_program(program, batch)
    nodes = [node for node in reading.works if any(dim.batch for dim in list_leaves(reading.works[node].reduced_dims))]
    return nodes[-1] if nodes else None


def _has_batch(reading: Reading, node: Node) -> bool:
    return any(dim.batch for dims in reading.node_dims[node] for dim in list_leaves(dims))


def _is_linear(node: Node, kind: OperatorKind | None, sums: set[Node]) -> bool:
    name = get_name(node.target)
    operands = [argument in sums for argument in node.args if isinstance(argument, Node)]
    if name in _PRODUCTS:
        return sum(operands) == 1
    if name == "div":
        return operands == [True] or operands == [True, False]
    return kind is None or kind is OperatorKind.VIEW or name in _LINEAR


def _is_number(node: Node, values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a node has the same value in all batches; False where a value is not known."""
    all_values = [batch_values.get(node.name) for batch_values in values]
    first_value = all_values[0] if all_values else None
    return isinstance(first_value, Tensor) and all(
        isinstance(value, Tensor) and torch.equal(first_value, value) for value in all_values
    )
