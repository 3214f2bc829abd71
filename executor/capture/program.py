"""A module's forward pass in training mode as one flat graph of ATen operators, by ``torch.export``."""

import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from executor.capture.captured import CaptureError
from executor.capture.decompositions import DECOMPOSITIONS
from executor.capture.rules.table import rule_of
from executor.capture.updates import Update, updates


@dataclass(frozen=True)
class Program:
    """The graph, what its placeholders are, and their values for the example.

    Parameters
    ----------
    trained
        Placeholders of the parameters that have gradients.
    updates
        How forward renews buffers; the program does not.
    left
        Qualified names of buffers that it renews in another way.
    """

    module: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    trained: frozenset[str]
    updates: tuple[Update, ...]
    left: tuple[str, ...]


def export(module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Return the program of ``module(*inputs)``.

    Raises
    ------
    CaptureError
        Where torch cannot export the module; the message is torch's reason in one line.
    """
    module.train()
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr), redirect_stderr(StringIO()):  # torch prints graphs
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, inputs, strict=False)
            exported = exported.run_decompositions(_table())
    except Exception as error:
        raise CaptureError(f"torch cannot export the module: {_reason(error)}") from error
    signature, graph = exported.graph_signature, exported.graph_module.graph
    named: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for each in signature.input_specs:
        named[each.kind][each.arg.name] = each.target or each.arg.name
    losses = [each.arg.name for each in signature.output_specs if each.kind is OutputKind.USER_OUTPUT]
    output = graph.output_node()
    results = [node for node in output.all_input_nodes if node.name in losses]
    _check_loss(results)
    mutated = {e.arg.name: str(e.target) for e in signature.output_specs if e.kind is OutputKind.BUFFER_MUTATION}
    made = {mutated[node.name]: node for node in output.all_input_nodes if node.name in mutated}
    renewed, left = updates(results[0], made, named[InputKind.BUFFER])
    output.args = (tuple(results),)
    for node in list(graph.nodes):
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and not _gets(node):
            raise CaptureError(f"torch cannot export the module: it has the operator {node.target}, which is not ATen")
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
    )


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Return what is written out: what must be, and by torch's own definitions what has no rule."""
    default: Any = torch.export.default_decompositions()
    without = {target: written for target, written in default.items() if rule_of(target) is None}
    return {**without, **DECOMPOSITIONS}


def _gets(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _check_loss(results: list[Node]) -> None:
    values = [node.meta["val"] for node in results]
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].numel() != 1:
        met = ", ".join(f"a tensor of shape {tuple(value.shape)}" for value in values) or "no tensor"
        raise CaptureError(f"forward(*inputs) returns a scalar loss, met {met}")


def _reason(error: Exception) -> str:
    """Return the first line of torch's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
