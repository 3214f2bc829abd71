"""Exports the forward and the loss of one microbatch as a flat graph of operators, by ``torch.export``.

The graph has no changes in place: new values of buffers are results beside the loss. A microbatch has one size in a
step, so that sizes in the graph may be numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from meshwise.executor.capture.decompositions import copy
from meshwise.executor.capture.program import DataDetachMode, explain_error, inline_blocks, silence_torch
from meshwise.executor.capture.source_lines import (
    add_nearest,
    find_error_line,
    find_forward_line,
    find_node_line,
    prefix_line,
)
from meshwise.executor.modules.batches import list_tensors, map_tensors
from meshwise.executor.modules.losses import LossFunction, LossKind, compute_loss
from meshwise.executor.recording.private_torch import trust_causal_hints
from meshwise.executor.recording.rank_files import UserError

_MODULE = "module"
"""The attribute of `LossModule` that is the user's module, before the names of its parameters."""


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class ExportError(UserError):
    """A module whose forward is no graph, so that it cannot be cut into stages."""


class LossModule(nn.Module):
    """A module with its loss, as a function of the tensors of a batch.

    Parameters
    ----------
    batch
        A batch whose structure, and values that are no tensors, every call has.
    kind
        How losses of parts make that of the whole: for shares the last tensor is the number of labels of the step.
    """

    def __init__(self, module: nn.Module, loss: LossFunction | None, batch: Any, kind: LossKind) -> None:
        super().__init__()
        self.module = module
        self.loss, self.kind = loss, kind
        self.structure = map_tensors(batch, lambda tensor: tensor.new_empty(0))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the loss; or the sum of a loss, and its weight."""
        remaining = iter(tensors)
        batch = map_tensors(self.structure, lambda _: next(remaining))
        num_items = next(remaining).reshape(()) if self.kind is LossKind.SHARES else None
        loss = compute_loss(self.module, batch, self.loss, self.kind, num_items)
        return (loss.total,) if loss.weight is None else (loss.total, loss.weight)


@dataclass(frozen=True)
class StepGraph:
    """The graph of a microbatch's forward and loss.

    Parameters
    ----------
    graph
        Placeholders, operators and an output; no operator changes its arguments.
    parameters
        Name of a placeholder -> name of the parameter in the user's module; a parameter that is tied has one name.
    buffers
        The same of buffers.
    fixed
        Name of a placeholder -> a tensor that the module makes out of numbers.
    inputs
        Names of the placeholders of the batch's tensors, in their order.
    results
        The loss; or the sum of a loss, and its weight.
    updates
        Name of a buffer -> the node that has its new value.
    trained
        Names of the parameters that are trained.
    """

    graph: Graph
    root: GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    fixed: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    results: tuple[Node, ...]
    updates: Mapping[str, Node]
    trained: frozenset[str]


def list_inputs(batch: Any, num_items: Tensor | None) -> list[Tensor]:
    """Return the tensors that a graph takes, each with a dim that is cut into microbatches."""
    return list_tensors(batch) if num_items is None else [*list_tensors(batch), num_items.reshape(1)]


def export_step(
    module: nn.Module,
    loss: LossFunction | None,
    batch: Any,
    kind: LossKind = LossKind.SAMPLES,
    num_items: Tensor | None = None,
) -> StepGraph:
    """Return the graph of a module and its loss on a microbatch.

    Parameters
    ----------
    num_items
        For `LossKind.SHARES` the labels of the step that count.

    Raises
    ------
    ExportError
        Where torch cannot export the module, with the line of its code: control flow that depends on data, numbers read
        out of tensors.
    """
    wrapper = LossModule(module, loss, batch, kind)
    try:
        with silence_torch(), DataDetachMode(), trust_causal_hints():
            program = torch.export.export(wrapper, tuple(list_inputs(batch, num_items)), strict=False)
            inline_blocks(program.graph_module)
            program = program.run_decompositions({torch.ops.aten.copy.default: copy})  # which has no gradient
    except UserError:
        raise
    except Exception as error:
        place = find_error_line(error) or find_forward_line(module)
        reason = explain_error(error)
        finding = add_nearest(f"torch cannot export the module: {reason}", "pipeline=1")
        raise ExportError(prefix_line(place, finding)) from error
    return _read_program(program, module)


def _read_program(program: Any, module: nn.Module) -> StepGraph:
    signature, root = program.graph_signature, program.graph_module
    graph: Graph = root.graph
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    placeholders: dict[str, str] = {}
    buffers: dict[str, str] = {}
    fixed: dict[str, Tensor] = {}
    inputs: list[str] = []
    for spec in signature.input_specs:
        target = str(spec.target).removeprefix(f"{_MODULE}.")
        if spec.kind is InputKind.PARAMETER:
            placeholders[spec.arg.name] = first_names[id(parameters[target])]
        elif spec.kind is InputKind.BUFFER:
            buffers[spec.arg.name] = target
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
        else:
            fixed[spec.arg.name] = program.constants[spec.target]
    nodes = {node.name: node for node in graph.nodes}
    results, updates = [], {}
    for spec in signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(nodes[spec.arg.name])
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            updates[str(spec.target).removeprefix(f"{_MODULE}.")] = nodes[spec.arg.name]
        else:
            line = find_node_line(nodes[spec.arg.name]) or find_forward_line(module)
            rule = "a forward in stages changes buffers alone"
            raise ExportError(prefix_line(line, f"{rule}, met a change of {spec.target}; nearest: pipeline=1"))
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.users and "_assert" in str(node.target):
            graph.erase_node(node)
        if node.op == "call_function" and node.target in _VIEWS:
            # strides of a kernel's results may be others than those with which the graph was made
            node.target = torch.ops.aten.reshape.default
    graph.eliminate_dead_code()
    _require_sizes(graph)
    trained = frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    return StepGraph(graph, root, placeholders, buffers, fixed, tuple(inputs), tuple(results), updates, trained)


def _require_sizes(graph: Graph) -> None:
    """Raise where a size or a number depends on data."""
    for node in graph.nodes:
        value = node.meta.get("val")
        items = value if isinstance(value, tuple | list) else [value]
        for item in items:
            is_open = isinstance(item, Tensor) and any(not isinstance(size, int) for size in item.shape)
            if is_open or isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
                rule = f"tensors of a module in stages have one size, met {node.name}, whose size depends on data"
                raise ExportError(prefix_line(find_node_line(node), f"{rule}; nearest: pipeline=1"))


def list_paths(node: Node) -> tuple[str, ...]:
    """Return the names of the modules in which a node runs, from the outermost to the innermost, without the user's."""
    stack = node.meta.get("nn_module_stack") or {}
    names = (str(name) for name, _ in stack.values())
    return tuple(
        name.removeprefix(f"{_MODULE}.").removeprefix("L['self'].") for name in names if name not in ("", _MODULE)
    )
