"""Exports a module's forward pass in training mode as one flat graph of ATen operators, by ``torch.export``.

Blocks that run without gradients are inlined, and their results are detached.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.captured import CaptureError, Program, find_updates, is_part
from meshwise.executor.capture.decompositions import DECOMPOSITIONS
from meshwise.executor.capture.grouped_products import GroupedProducts
from meshwise.executor.capture.rules.table import find_rule
from meshwise.executor.capture.rules.work import list_values
from meshwise.executor.capture.source_lines import find_error_line, find_forward_line, find_node_line
from meshwise.executor.recording.private_torch import trust_causal_hints

_SET_GRAD_ENABLED = torch.ops.higher_order.wrap_with_set_grad_enabled
_DATA: Any = vars(torch._C.TensorBase)["data"]
_DETACH = torch.ops.aten.detach.default


class DataDetachMode(TorchFunctionMode):
    """Reads ``x.data`` as ``x.detach()``: torch's export records no operator for ``x.data``."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or ``detach`` where the function reads ``data``."""
        if function == _DATA.__get__:
            return arguments[0].detach()
        return function(*arguments, **(options or {}))


def inline_blocks(module: GraphModule) -> None:
    """Inline every block without gradients into the graph around it, and detach the results of the block.

    torch's own decomposition inlines the operators without the detach, so that their results would have a gradient.
    """
    for node in list(module.graph.find_nodes(op="call_function", target=_SET_GRAD_ENABLED)):
        is_enabled, body, *arguments = node.args
        block = getattr(module, str(body.target))
        inline_blocks(block)
        copies = dict(zip(block.graph.find_nodes(op="placeholder"), arguments, strict=True))
        with module.graph.inserting_before(node):
            for inner_node in block.graph.nodes:
                if inner_node.op == "get_attr":
                    name = f"{body.target}_{inner_node.target}"
                    setattr(module, name, getattr(block, inner_node.target))
                    copies[inner_node] = module.graph.get_attr(name)
                elif inner_node.op == "call_function":
                    copies[inner_node] = module.graph.node_copy(inner_node, copies.__getitem__)
            results = [
                _copy_result(module, copies, inner_node, is_detached=not is_enabled)
                for inner_node in block.graph.output_node().args[0]
            ]
        for user in list(node.users):
            user.replace_all_uses_with(results[int(str(user.args[1]))])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _copy_result(module: GraphModule, copies: Mapping[Node, Any], result: Any, *, is_detached: bool) -> Any:
    """Return the node of the outer graph that has a result of an inlined block."""
    if not isinstance(result, Node):
        return result
    node = copies[result]
    value = result.meta.get("val")
    has_gradient = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if not (is_detached and has_gradient):
        return node
    detached_node = module.graph.call_function(_DETACH, (node,))
    detached_node.meta = dict(result.meta)
    return detached_node


def export_program(module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Return the program of ``module(*inputs)``.

    Raises
    ------
    CaptureError
        Where torch cannot export the module, or the module changes inputs or parameters, or reads numbers or sizes
        out of data. The message is one line and begins with the line of the module's code.
    """
    module.train()  # dropout and batch norm are captured as they train
    try:
        with silence_torch():
            with DataDetachMode(), GroupedProducts(), trust_causal_hints():
                exported_program = torch.export.export(module, inputs, strict=False)
            inline_blocks(exported_program.graph_module)
            exported_program = exported_program.run_decompositions(_list_decompositions())
    except Exception as error:
        line = find_error_line(error) or find_forward_line(module)
        raise CaptureError(f"torch cannot export the module: {explain_error(error)}", line) from error
    signature, graph = exported_program.graph_signature, exported_program.graph_module.graph
    names: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for spec in signature.input_specs:
        names[spec.kind][spec.arg.name] = spec.target or spec.arg.name
    losses = [spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    output = graph.output_node()
    results = [node for node in output.all_input_nodes if node.name in losses]
    _check_loss(results, find_forward_line(module))
    _check_changes(signature.output_specs, {node.name: node for node in output.all_input_nodes})
    _check_numbers(graph)
    mutated_buffers = {
        mutation.arg.name: str(mutation.target)
        for mutation in signature.output_specs
        if mutation.kind is OutputKind.BUFFER_MUTATION
    }
    new_values = {mutated_buffers[node.name]: node for node in output.all_input_nodes if node.name in mutated_buffers}
    buffer_updates, skipped_buffers = find_updates(results[0], new_values, names[InputKind.BUFFER])
    output.args = (tuple(results),)
    for node in list(graph.nodes):
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and not is_part(node):
            reason = f"torch cannot export the module: it has the operator {node.target}, which is not ATen"
            raise CaptureError(reason, find_node_line(node))
        # checks that torch inserts, which compute nothing
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parameter_targets = names[InputKind.PARAMETER]
    return Program(
        GraphModule(exported_program.graph_module, graph),
        parameter_targets,
        names[InputKind.BUFFER],
        {name: exported_program.constants[target] for name, target in names[InputKind.CONSTANT_TENSOR].items()},
        tuple(names[InputKind.USER_INPUT]),
        frozenset(name for name, target in parameter_targets.items() if parameters[target].requires_grad),
        buffer_updates,
        tuple(skipped_buffers),
        {name: find_node_line(node) for name, node in new_values.items()},
    )


@contextmanager
def silence_torch() -> Iterator[None]:
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
def _list_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return all decompositions: ours, and torch's own for every operator without a rule."""
    decompositions: Any = torch.export.default_decompositions()
    unruled = {target: decomposition for target, decomposition in decompositions.items() if find_rule(target) is None}
    return {**unruled, **DECOMPOSITIONS}


def _check_loss(results: list[Node], line: str) -> None:
    values = [node.meta["val"] for node in results]
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].numel() != 1:
        description = ", ".join(f"a tensor of shape {tuple(value.shape)}" for value in values) or "no tensor"
        raise CaptureError(f"forward(*inputs) returns a scalar loss, met {description}; nearest: the loss alone", line)


_CHANGES = {
    OutputKind.USER_INPUT_MUTATION: ("its input", "a copy, as x = x * 2"),
    OutputKind.PARAMETER_MUTATION: ("its parameter", "the change outside of forward, or a buffer"),
}


def _check_changes(outputs: list[OutputSpec], nodes: dict[str, Node]) -> None:
    """Raise where forward changes an input or a parameter in place."""
    for spec in outputs:
        if spec.kind in _CHANGES:
            subject, nearest = _CHANGES[spec.kind]
            message = (
                f"forward changes buffers alone, met a change in place of {subject} {spec.target}; nearest: {nearest}"
            )
            raise CaptureError(message, find_node_line(nodes[spec.arg.name]))


def _check_numbers(graph: Graph) -> None:
    """Raise where a number or a size is read out of data: the program would then depend on the data."""
    for node in graph.nodes:
        for item in list_values(node):
            if isinstance(item, Tensor) and any(not isinstance(size, int) for size in item.shape):
                message = f"met {node.name}, whose size depends on data; nearest: all samples, weighted with 0 or 1"
                raise CaptureError(f"tensors of a captured module have one size, {message}", find_node_line(node))
            if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
                message = "met a number that is read out of a tensor; nearest: the tensor itself, without item()"
                raise CaptureError(f"a captured module computes with tensors, {message}", find_node_line(node))


def explain_error(error: Exception) -> str:
    """Return the first line of torch's message that is not empty, or what the error means."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return "control flow does not depend on data, met a branch or a size that does; nearest: torch.where"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
