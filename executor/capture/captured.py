"""What capture makes of a module: an operator graph, and the program it was read from."""

from dataclasses import dataclass

from torch.fx import GraphModule

from simulator.operator_graph import OperatorGraph

NamedDims = tuple[tuple[str, ...], ...]
"""Per torch dim the named dims it is made of, outermost first; a dim of size 1 may have none."""


@dataclass(frozen=True)
class Captured:
    """A module as an operator graph, and how the nodes of its program map to operators and tensors.

    Parameters
    ----------
    graph
        The operators of one sample.
    program
        The forward pass in training mode as flat ATen operators on plain tensors. Its placeholders are
        parameters, then buffers, then constants, then the inputs; its output is a tuple: the loss first, then the
        new values of ``mutated`` buffers.
    parameters, buffers, constants
        Name of a placeholder -> qualified name in the module (of a constant: in the exported program).
    inputs
        Names of the placeholders of the module's inputs, in order.
    mutated
        Qualified names of the buffers whose new values the program returns after the loss, in order.
    dims
        Name of a node -> the named dims of each torch dim of its value; those of a node with several values, one
        after the other as ``name.0``, ``name.1``, ...
    operators
        Name of a node -> ``block.operator`` as the shardings of a plan name it. Views and constants are no
        operators: they are absent and follow their input.
    occurrence
        Name of a node -> which occurrence of its block it is in, from 0. Every node that has a place has one.
    tensors
        Name of a node -> name of its value in its block; of several values as in ``dims``.
    sizes
        Size of each named dim for the inputs that the module was captured with; ``batch`` is that of the inputs.
    warnings
        What could not be told apart, a line each: operators without a rule, which are not cut.
    """

    graph: OperatorGraph
    program: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, str]
    inputs: tuple[str, ...]
    mutated: tuple[str, ...]
    dims: dict[str, NamedDims]
    operators: dict[str, str]
    occurrence: dict[str, int]
    tensors: dict[str, str]
    sizes: dict[str, int]
    warnings: tuple[str, ...] = ()
