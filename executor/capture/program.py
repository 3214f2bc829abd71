"""Exports a module's forward pass in training mode as one flat graph of ATen operators, by ``torch.export``.

Blocks that run without gradients are inlined, and their results are detached.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.captured import CaptureError, Update, updates
from meshwise.executor.capture.decompositions import DECOMPOSITIONS
from meshwise.executor.capture.rules.table import rule_of
from meshwise.executor.capture.source_lines import line_of_error, line_of_forward, line_of_node

_GRADIENTS_ARE_SET = torch.ops.higher_order.wrap_with_set_grad_enabled
_DATA: Any = vars(torch._C.TensorBase)["data"]
_DETACH = torch.ops.aten.detach.default


class DataIsDetached(TorchFunctionMode):
    """Reads ``x.data`` as ``x.detach()``: torch's export records no operator for ``x.data``."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or ``detach`` where the function reads ``data``."""
        if function == _DATA.__get__:
            return arguments[0].detach()
        return function(*arguments, **(options or {}))


def inline(module: GraphModule) -> None:
    """Inline every block without gradients into the graph around it, and detach the results of the block.

    torch's own decomposition inlines the operators without the detach, so that their results would have a gradient.
    """
    for node in list(module.graph.find_nodes(op="call_function", target=_GRADIENTS_ARE_SET)):
        enabled, body, *arguments = node.args
        block = getattr(module, str(body.target))
        inline(block)
        known = dict(zip(block.graph.find_nodes(op="placeholder"), arguments, strict=True))
        with module.graph.inserting_before(node):
            for each in block.graph.nodes:
                if each.op == "get_attr":
                    name = f"{body.target}_{each.target}"
                    setattr(module, name, getattr(block, each.target))
                    known[each] = module.graph.get_attr(name)
                elif each.op == "call_function":
                    known[each] = module.graph.node_copy(each, known.__getitem__)
            results = [_left(module, known, each, detached=not enabled) for each in block.graph.output_node().args[0]]
        for user in list(node.users):
            user.replace_all_uses_with(results[int(str(user.args[1]))])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _left(module: GraphModule, known: Mapping[Node, Any], result: Any, *, detached: bool) -> Any:
    """Return the node of the outer graph that has a result of an inlined block."""
    if not isinstance(result, Node):
        return result
    node = known[result]
    value = result.meta.get("val")
    has_gradient = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if not (detached and has_gradient):
        return node
    left = module.graph.call_function(_DETACH, (node,))
    left.meta = dict(result.meta)
    return left


@dataclass(frozen=True)
class Program:
    """An exported forward pass: its graph, and what its placeholders are.

    Parameters
    ----------
    trained
        Names of the placeholders of the parameters that have gradients.
    updates
        How forward updates buffers; the program itself does not update them.
    left
        Qualified names of the buffers whose update is not in ``updates``.
    renewal_lines
        Qualified name of a buffer -> the line of code that updates it.
    """

    module: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    trained: frozenset[str]
    updates: tuple[Update, ...]
    left: tuple[str, ...]
    renewal_lines: dict[str, str]


def export(module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Return the program of ``module(*inputs)``.

    Raises
    ------
    CaptureError
        Where torch cannot export the module, or the module changes inputs or parameters, or reads numbers or sizes
        out of data. The message is one line and begins with the line of the module's code.
    """
    module.train()  # dropout and batch norm are captured as they train
    try:
        with _quiet():
            with DataIsDetached():
                exported = torch.export.export(module, inputs, strict=False)
            inline(exported.graph_module)
            exported = exported.run_decompositions(_table())
    except Exception as error:
        line = line_of_error(error) or line_of_forward(module)
        raise CaptureError(f"torch cannot export the module: {_reason(error)}", line) from error
    signature, graph = exported.graph_signature, exported.graph_module.graph
    named: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for each in signature.input_specs:
        named[each.kind][each.arg.name] = each.target or each.arg.name
    losses = [each.arg.name for each in signature.output_specs if each.kind is OutputKind.USER_OUTPUT]
    output = graph.output_node()
    results = [node for node in output.all_input_nodes if node.name in losses]
    _check_loss(results, line_of_forward(module))
    _check_changes(signature.output_specs, {node.name: node for node in output.all_input_nodes})
    _check_numbers(graph)
    mutated = {e.arg.name: str(e.target) for e in signature.output_specs if e.kind is OutputKind.BUFFER_MUTATION}
    made = {mutated[node.name]: node for node in output.all_input_nodes if node.name in mutated}
    renewed, left = updates(results[0], made, named[InputKind.BUFFER])
    output.args = (tuple(results),)
    for node in list(graph.nodes):
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and not _gets(node):
            reason = f"torch cannot export the module: it has the operator {node.target}, which is not ATen"
            raise CaptureError(reason, line_of_node(node))
        # checks that torch inserts, which compute nothing
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    mine = named[InputKind.PARAMETER]
    return Program(
        GraphModule(exported.graph_module, graph),
        mine,
        named[InputKind.BUFFER],
        {name: exported.constants[target] for name, target in named[InputKind.CONSTANT_TENSOR].items()},
        tuple(named[InputKind.USER_INPUT]),
        frozenset(name for name, target in mine.items() if parameters[target].requires_grad),
        renewed,
        tuple(left),
        {name: line_of_node(node) for name, node in made.items()},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings and graphs that torch prints while it exports."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Return all decompositions: ours, and torch's own for every operator without a rule."""
    default: Any = torch.export.default_decompositions()
    without = {target: written for target, written in default.items() if rule_of(target) is None}
    return {**without, **DECOMPOSITIONS}


def _gets(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _check_loss(results: list[Node], line: str) -> None:
    values = [node.meta["val"] for node in results]
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].numel() != 1:
        met = ", ".join(f"a tensor of shape {tuple(value.shape)}" for value in values) or "no tensor"
        raise CaptureError(f"forward(*inputs) returns a scalar loss, met {met}; nearest: the loss alone", line)


_CHANGES = {
    OutputKind.USER_INPUT_MUTATION: ("its input", "a copy, as x = x * 2"),
    OutputKind.PARAMETER_MUTATION: ("its parameter", "the change outside of forward, or a buffer"),
}


def _check_changes(outputs: list[OutputSpec], nodes: dict[str, Node]) -> None:
    """Raise where forward changes an input or a parameter in place."""
    for each in outputs:
        if each.kind in _CHANGES:
            what, nearest = _CHANGES[each.kind]
            met = f"forward changes buffers alone, met a change in place of {what} {each.target}; nearest: {nearest}"
            raise CaptureError(met, line_of_node(nodes[each.arg.name]))


def _check_numbers(graph: Graph) -> None:
    """Raise where a number or a size is read out of data: the program would then depend on the data."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Tensor) and any(not isinstance(size, int) for size in each.shape):
                met = f"met {node.name}, whose size depends on data; nearest: all samples, weighted with 0 or 1"
                raise CaptureError(f"tensors of a captured module have one size, {met}", line_of_node(node))
            if isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool):
                met = "met a number that is read out of a tensor; nearest: the tensor itself, without item()"
                raise CaptureError(f"a captured module computes with tensors, {met}", line_of_node(node))


def _reason(error: Exception) -> str:
    """Return the first line of torch's message that is not empty, or what the error means."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return "control flow does not depend on data, met a branch or a size that does; nearest: torch.where"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
