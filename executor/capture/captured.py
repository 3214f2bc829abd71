"""What capture makes of a module: an operator graph, and the program it was read from.

What a forward pass makes of the buffers that it updates: running statistics, and counts of batches.

The program of the loss does not have them. Each is a small program of its own, of the buffer as it was and of one
value of the forward pass, point by point, so that a rank renews the part of a buffer of which it has the value.
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
    """How forward renews a buffer.

    Parameters
    ----------
    buffer
        Its qualified name in the module.
    reads
        The node of the program whose value is read, of the shape of the buffer; empty where none is.
    program
        Takes the buffer, and the value that it reads if any, and returns the new buffer.
    """

    buffer: str
    reads: str
    program: GraphModule


def updates(loss: Node, made: Mapping[str, Node], buffers: Mapping[str, str]) -> tuple[tuple[Update, ...], list[str]]:
    """Return the updates of buffers, and the names of the others.

    Those have no update that are not renewed point by point, from one value that the loss is computed from at most,
    or whose old value the loss reads.

    Parameters
    ----------
    made
        The node that has the new value, by the qualified name of a buffer.
    buffers
        Name of a placeholder -> qualified name of a buffer.
    """
    forward = _behind(loss, set())
    found = {name: _update(name, node, forward, buffers) for name, node in made.items()}
    return tuple(each for each in found.values() if each), [name for name, each in found.items() if each is None]


def _behind(node: Node, stop: set[Node]) -> set[Node]:
    """Return a node and all that it is computed from, up to those of ``stop``."""
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
"""Per torch dim the named dims it is made of, outermost first; a dim of size 1 has none."""


class CaptureError(ValueError):
    """A module or its factory cannot be captured; the message says why in one line, after that of the user's code."""

    def __init__(self, text: str, line: str = "") -> None:
        super().__init__(f"{line}: {text}" if line else text)
        self.line = line


@dataclass(frozen=True)
class Captured:
    """A module as an operator graph, and how the nodes of its program map to operators and tensors.

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
        Name of a placeholder -> its value, which is no part of the module: a tensor that forward writes out.
    inputs
        Names of the placeholders of the module's inputs, in order.
    dims
        Name of a node -> the named dims of each torch dim of its value, as the block of the node calls them.
        A node with several values has none: its ``getitem`` nodes do.
    operators
        Name of a node -> ``block.operator`` as the shardings of a plan name it. Views, constants, parameters
        and inputs are no operators: they are absent and follow their input.
    occurrence
        Name of an operator's node -> which occurrence of its block it is in, from 0.
    tensors
        Name of an operator's node, of a ``getitem`` of one, of an input or of a constant value -> name of its
        value in the blocks that read it.
    parameter_names
        ``(block, occurrence, tensor)`` -> placeholder of that parameter.
    batch
        Samples of the inputs that the module was captured with; the program is for as many.
    updates
        How forward renews buffers, which the program does not.
    left
        Qualified names of the buffers that forward updates in another way, which the program and ``updates`` leave.
    lines
        Qualified name of a buffer that forward updates -> the line that does.
    warnings
        What was not understood, a line each: operators without a rule, which are not cut.
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
