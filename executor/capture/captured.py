"""The result of a capture: an operator graph, the program that it was read from, and the updates of buffers.

A forward pass updates buffers such as running statistics and counts of batches. The program of the loss does not
contain these updates. Each one is a small pointwise program of the old buffer and of one value of the forward pass, so
that a rank can update its part of a buffer from its part of that value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.operator_graph import OperatorGraph


@dataclass(frozen=True)
class BufferUpdate:
    """How the forward pass updates a buffer.

    Parameters
    ----------
    buffer
        Qualified name of the buffer in the module.
    source
        Name of the program's node whose value the update reads, of the buffer's shape; empty where it reads none.
    program
        Maps the old buffer, and that value if there is one, to the new buffer.
    """

    buffer: str
    source: str
    program: GraphModule


def find_updates(
    loss: Node, new_values: Mapping[str, Node], buffers: Mapping[str, str]
) -> tuple[tuple[BufferUpdate, ...], list[str]]:
    """Return the updates of buffers, and the names of the buffers whose update cannot be expressed.

    An update can be expressed where it is pointwise, reads at most one value that the loss is computed from, and the
    loss does not read the old value of the buffer.

    Parameters
    ----------
    new_values
        Qualified name of a buffer -> the node that has its new value.
    buffers
        Name of a placeholder -> qualified name of a buffer.
    """
    # what the loss already computes is read from the forward pass, not computed again by an update
    loss_nodes = _collect_ancestors(loss, set())
    candidates = {name: _build_update(name, node, loss_nodes, buffers) for name, node in new_values.items()}
    return tuple(update for update in candidates.values() if update), [
        name for name, update in candidates.items() if update is None
    ]


def _collect_ancestors(node: Node, stop_nodes: set[Node]) -> set[Node]:
    """Return a node and all nodes that it is computed from, without ``stop_nodes`` and what is behind them."""
    ancestors, pending = set[Node](), [node]
    while pending:
        current_node = pending.pop()
        if current_node not in ancestors and current_node not in stop_nodes:
            ancestors.add(current_node)
            pending += current_node.all_input_nodes
    return ancestors


def _build_update(name: str, new_value: Node, loss_nodes: set[Node], buffers: Mapping[str, str]) -> BufferUpdate | None:
    own_nodes = _collect_ancestors(new_value, loss_nodes)
    inputs = [node for node in own_nodes if node.op == "placeholder"]
    operators = [node for node in new_value.graph.nodes if node in own_nodes and node.op == "call_function"]
    sources = list(
        dict.fromkeys(node for operator in operators for node in operator.all_input_nodes if node not in own_nodes)
    )
    if (
        [buffers.get(node.name) for node in inputs] != [name]
        or len(sources) > 1
        or not all(map(_is_pointwise, operators))
    ):
        return None
    if any(node.op != "call_function" or node.meta["val"].shape != inputs[0].meta["val"].shape for node in sources):
        return None
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in (*inputs, *sources)}
    for operator in operators:
        copies[operator] = graph.node_copy(operator, copies.__getitem__)
    graph.output(copies[new_value])
    return BufferUpdate(name, sources[0].name if sources else "", GraphModule(torch.nn.Module(), graph))


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _IDENTITIES)


_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


def is_part(node: Node) -> bool:
    """Return whether a node only selects one of the values of another node."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


NamedDims = tuple[tuple[str, ...], ...]
"""For each torch dim the names of the dims that it consists of, outermost first; a dim of size 1 has no name."""


class CaptureError(ValueError):
    """A module or its factory cannot be captured; the message has the line of the user's code and the reason."""

    def __init__(self, text: str, line: str = "") -> None:
        super().__init__(f"{line}: {text}" if line else text)
        self.line = line


@dataclass(frozen=True)
class Program:
    """An exported forward pass: its graph, and what its placeholders are.

    Parameters
    ----------
    module
        The forward pass in training mode as flat ATen operators on plain tensors. Its placeholders are
        parameters, buffers and constants, then the inputs; its output is a tuple of the loss alone.
        An ``aten.alias`` in it marks where a tensor is read under other named dims.
    parameters, buffers
        Name of a placeholder -> qualified name in the module.
    constants
        Name of a placeholder -> the value of a tensor that forward creates itself, and that is no part of the module.
    inputs
        Names of the placeholders of the module's inputs, in order.
    trained_parameters
        Names of the placeholders of the parameters that have gradients.
    updates
        How forward updates buffers; the program itself does not update them.
    skipped_buffers
        Qualified names of the buffers that forward updates in a way that neither the program nor ``updates`` does.
    update_lines
        Qualified name of a buffer that forward updates -> the line of code of that update.
    """

    module: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    trained_parameters: frozenset[str]
    updates: tuple[BufferUpdate, ...]
    skipped_buffers: tuple[str, ...]
    update_lines: dict[str, str]


@dataclass(frozen=True)
class Maps:
    """How nodes of a program map to operators and tensors of its graph.

    Parameters
    ----------
    dims
        Name of a node -> the named dims of each torch dim of its value, in the names of the node's block.
        A node with several values has no entry; its ``getitem`` nodes have one each.
    operators
        Name of a node -> ``block.operator``, as the shardings of a plan name it. Views, constants, parameters
        and inputs are not operators and have no entry: they are sharded as their input is.
    occurrence
        Name of an operator's node -> the number of the block's occurrence that it is in, from 0.
    tensors
        Name of an operator's node, of a ``getitem`` of one, of an input or of a constant -> name of its value in the
        blocks that read it.
    parameter_names
        ``(block, occurrence, tensor)`` -> name of the placeholder of that parameter.
    """

    dims: dict[str, NamedDims] = field(default_factory=dict)
    operators: dict[str, str] = field(default_factory=dict)
    occurrence: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    parameter_names: dict[tuple[str, int, str], str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CapturedModule(Maps, Program):
    """A captured module: its program, its operator graph, and how the nodes of the one map to the other.

    Parameters
    ----------
    graph
        The operators of one sample.
    batch
        Number of samples of the inputs that the module was captured with; the program is for that batch size.
    warnings
        One line for everything that was not understood, as an operator without a rule, which is replicated.
    """

    graph: OperatorGraph
    batch: int
    warnings: tuple[str, ...]

    __repr__ = brief_repr()
