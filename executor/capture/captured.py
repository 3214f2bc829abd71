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

from meshwise.simulator.brief import brief
from meshwise.simulator.operator_graph import OperatorGraph


@dataclass(frozen=True)
class Update:
    """How the forward pass updates a buffer.

    Parameters
    ----------
    buffer
        Qualified name of the buffer in the module.
    reads
        Name of the program's node whose value the update reads, of the buffer's shape; empty where it reads none.
    program
        Maps the old buffer, and that value if there is one, to the new buffer.
    """

    buffer: str
    reads: str
    program: GraphModule


def updates(loss: Node, made: Mapping[str, Node], buffers: Mapping[str, str]) -> tuple[tuple[Update, ...], list[str]]:
    """Return the updates of buffers, and the names of the buffers whose update cannot be expressed.

    An update can be expressed where it is pointwise, reads at most one value that the loss is computed from, and the
    loss does not read the old value of the buffer.

    Parameters
    ----------
    made
        Qualified name of a buffer -> the node that has its new value.
    buffers
        Name of a placeholder -> qualified name of a buffer.
    """
    # what the loss already computes is read from the forward pass, not computed again by an update
    forward = _behind(loss, set())
    found = {name: _update(name, node, forward, buffers) for name, node in made.items()}
    return tuple(each for each in found.values() if each), [name for name, each in found.items() if each is None]


def _behind(node: Node, stop: set[Node]) -> set[Node]:
    """Return a node and all nodes that it is computed from, without the nodes of ``stop`` and what is behind them."""
    found, left = set[Node](), [node]
    while left:
        each = left.pop()
        if each not in found and each not in stop:
            found.add(each)
            left += each.all_input_nodes
    return found


def _update(name: str, made: Node, forward: set[Node], buffers: Mapping[str, str]) -> Update | None:
    own = _behind(made, forward)
    inputs = [node for node in own if node.op == "placeholder"]
    steps = [node for node in made.graph.nodes if node in own and node.op == "call_function"]
    read = list(dict.fromkeys(node for step in steps for node in step.all_input_nodes if node not in own))
    if [buffers.get(node.name) for node in inputs] != [name] or len(read) > 1 or not all(map(_by_points, steps)):
        return None
    if any(node.op != "call_function" or node.meta["val"].shape != inputs[0].meta["val"].shape for node in read):
        return None
    graph = Graph()
    copied = {node: graph.placeholder(node.name) for node in (*inputs, *read)}
    for step in steps:
        copied[step] = graph.node_copy(step, copied.__getitem__)
    graph.output(copied[made])
    return Update(name, read[0].name if read else "", GraphModule(torch.nn.Module(), graph))


def _by_points(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _SAME)


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


NamedDims = tuple[tuple[str, ...], ...]
"""For each torch dim the names of the dims that it consists of, outermost first; a dim of size 1 has no name."""


class CaptureError(ValueError):
    """A module or its factory cannot be captured; the message has the line of the user's code and the reason."""

    def __init__(self, text: str, line: str = "") -> None:
        super().__init__(f"{line}: {text}" if line else text)
        self.line = line


@dataclass(frozen=True)
class Captured:
    """A captured module: its operator graph, and how the nodes of its program map to operators and tensors.

    Parameters
    ----------
    graph
        The operators of one sample.
    program
        The forward pass in training mode as flat ATen operators on plain tensors. Its placeholders are
        parameters, buffers and constants, then the inputs; its output is a tuple of the loss alone.
        An ``aten.alias`` in it marks where a tensor is read under other named dims.
    parameters, buffers
        Name of a placeholder -> qualified name in the module.
    constants
        Name of a placeholder -> the value of a tensor that forward creates itself, and that is no part of the module.
    inputs
        Names of the placeholders of the module's inputs, in order.
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
    batch
        Number of samples of the inputs that the module was captured with; the program is for that batch size.
    updates
        How forward updates buffers; the program itself does not update them.
    left
        Qualified names of the buffers that forward updates in a way that neither the program nor ``updates`` does.
    lines
        Qualified name of a buffer that forward updates -> the line of code of that update.
    warnings
        One line for everything that was not understood, as an operator without a rule, which is replicated.
    """

    graph: OperatorGraph
    program: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    dims: dict[str, NamedDims]
    operators: dict[str, str]
    occurrence: dict[str, int]
    tensors: dict[str, str]
    parameter_names: dict[tuple[str, int, str], str]
    batch: int
    updates: tuple[Update, ...] = ()
    left: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    __repr__ = brief()
