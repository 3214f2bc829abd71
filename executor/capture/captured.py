"""What capture makes of a module: an operator graph, and the program it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule

from executor.capture.updates import Update
from simulator.brief import brief
from simulator.operator_graph import OperatorGraph

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
