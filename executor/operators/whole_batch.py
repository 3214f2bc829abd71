"""Whether a user's module is that of a graph and can be run piece by piece, which is tried before ranks start.

It is captured, and the captured program compared with the module in one process on the whole batch. The module, as its
user wrote it, runs in fp64 on all samples at once; the captured program runs on one microbatch after
the other. Loss, gradients and buffers of both must be equal, for the given inputs and parameters and for changed ones:
with a layer that is zero at the first step, an error may not show.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.capture import capture, name_factory
from meshwise.executor.capture.captured import CaptureError, Program
from meshwise.executor.capture.program import export_program
from meshwise.executor.capture.reading import find_mixing_node, find_summing_node
from meshwise.executor.capture.rules.work import list_values
from meshwise.executor.capture.source_lines import (
    find_assignment_line,
    find_caller_line,
    find_error_line,
    find_forward_line,
    find_node_line,
)
from meshwise.executor.check.verification import SINGLE_TOLERANCE, TOLERANCE, gradient_scale
from meshwise.executor.operators.job import OperatorJob
from meshwise.executor.operators.layouts import Layouts
from meshwise.executor.operators.trainer import build_module
from meshwise.simulator.operator_graph import OperatorGraph

Inputs = tuple[Tensor, ...]
_WRITTEN = "the same written with torch's own operators, as x + (y - x).detach()"
_RESHAPE = torch.ops.aten.reshape.default
HALF = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class StepResult(NamedTuple):
    """The results of one forward and backward pass: the loss, and gradients and renewed buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the loss, the gradients and the buffers with their names in messages."""
        yield "loss", self.loss
        yield from ((f"gradient of {name}", tensor) for name, tensor in self.gradients.items())
        yield from ((f"buffer {name}", tensor) for name, tensor in self.buffers.items())


def run_step(module: nn.Module, batches: Sequence[Inputs]) -> StepResult:
    """Return the results of a module for batches of equal weight, one after the other; its state is restored."""
    initial_buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    total = torch.zeros((), dtype=torch.float64)
    try:
        module.zero_grad(set_to_none=True)
        for inputs in batches:
            loss = module(*(tensor.clone() for tensor in inputs)) / len(batches)
            loss.reshape(()).backward()
            total += loss.detach().reshape(())
        gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.detach().clone()
            for name, tensor in module.named_parameters()
            if tensor.requires_grad
        }
        return StepResult(total, gradients, {name: tensor.detach().clone() for name, tensor in module.named_buffers()})
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, tensor in module.named_buffers():
                tensor.copy_(initial_buffers[name])


def run_program(
    program: Program, module: nn.Module, batches: Sequence[Inputs], node_values: list[dict[str, Any]] | None = None
) -> StepResult:
    """Return the results of a program for batches, with the parameters and buffers of its module.

    For each batch the values of all nodes, by name, are appended to ``node_values``.
    """
    node_names = set() if node_values is None else {node.name for node in program.module.graph.nodes}
    # copies, not the parameters: their hooks would run here, but do not on ranks
    copies = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    leaves = {name: copies[name].requires_grad_(tensor.requires_grad) for name, tensor in module.named_parameters()}
    first_names = {id(tensor): name for name, tensor in module.named_parameters()}
    parameter_names = {
        name: first_names[id(tensor)] for name, tensor in module.named_parameters(remove_duplicate=False)
    }
    buffers = {name: tensor.detach().clone() for name, tensor in module.named_buffers(remove_duplicate=False)}
    constants: dict[str, Tensor] = {
        name: leaves[parameter_names[target]] for name, target in program.parameters.items()
    }
    constants |= program.constants
    total = torch.zeros((), dtype=torch.float64)
    for inputs in batches:
        placeholders = constants | {name: buffers[target] for name, target in program.buffers.items()}
        placeholders |= dict(zip(program.inputs, inputs, strict=True))
        values = _Values(program.module, {update.source for update in program.updates} | node_names)
        (loss,) = values.run(*(placeholders[node.name] for node in program.module.graph.find_nodes(op="placeholder")))
        if node_values is not None:
            node_values.append(values.node_values)
        loss = loss / len(batches)
        if loss.requires_grad:
            loss.reshape(()).backward()
        total += loss.detach().reshape(())
        for update in program.updates:
            values_read = [values.node_values[update.source].detach()] if update.source else []
            buffers[update.buffer] = update.program(buffers[update.buffer], *values_read)
    gradients = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in leaves.items()
        if tensor.requires_grad
    }
    return StepResult(total, gradients, {name: buffers[name] for name, _ in module.named_buffers()})


class _Values(torch.fx.Interpreter):
    """Runs a program and stores the values of some nodes, by name."""

    def __init__(self, module: torch.fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.node_values: dict[str, Any] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator; a view copies where strides of real tensors are not those of the export."""
        return super().call_function(_RESHAPE if target is torch.ops.aten.view.default else target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        """Return the value of a node."""
        value = super().run_node(n)
        if n.name in self.names:
            self.node_values[n.name] = value
        return value


def measure_difference(expected: StepResult, actual: StepResult, *, buffers: bool = True) -> tuple[float, str]:
    """Return the largest relative difference of two results, and the name of the tensor that has it.

    Differences of gradients are over their `gradient_scale`, those of loss and buffers over their largest finite
    element, or 1.
    """
    largest = max((_largest_element(gradient) for gradient in expected.gradients.values()), default=0.0)
    actual_tensors, differences = dict(actual.list_tensors()), [(0.0, "")]
    for name, values in expected.list_tensors():
        if values.numel() and (buffers or not name.startswith("buffer")):
            is_gradient = name.startswith("gradient")
            scale = (
                gradient_scale(_largest_element(values), largest) if is_gradient else max(1.0, _largest_element(values))
            )
            differences.append((_largest_difference(values, actual_tensors[name]) / scale, name))
    return max(differences)


def _largest_difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of two tensors: 0 where both are infinite, infinite where one is not a number."""
    gap = (expected.double() - actual.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    return float(torch.where(expected == actual, 0.0, gap).max())


def _largest_element(values: Tensor) -> float:
    """Return the largest finite absolute element of a tensor; 0 where it has none."""
    finite = values.detach().double()[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def find_tolerance(program: Program) -> float:
    """Return how far from one process a program in fp64 may be: more where it casts to fp32 by itself, and rounds."""
    values = (value for node in program.module.graph.nodes for value in list_values(node))
    is_single = any(isinstance(value, Tensor) and value.dtype in (torch.float32, torch.complex64) for value in values)
    return SINGLE_TOLERANCE if is_single else TOLERANCE


def check(program: Program, module: nn.Module, batches: Sequence[Inputs], microbatch: int) -> None:
    """Raise unless a program, microbatch by microbatch, computes what its module computes on the whole batch.

    Parameters
    ----------
    program
        The program of ``module``, which is in fp64.
    batches
        The inputs of the microbatches.
    microbatch
        Sequences of a microbatch on a data rank; the message names a plan that would be equal.

    Raises
    ------
    CaptureError
        Where they differ: the message begins with the line of the module that is the reason, where it is known.
    """
    _check_precision(program)
    _check_hooks(module)
    batch = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    casts: list[str] = []
    try:
        with _note_autocast(casts):
            expected = run_step(module, [batch])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        finding = (
            f"met {type(error).__name__}: {' '.join(str(error).split())[:300]}; nearest: a module that trains in fp64"
        )
        line = find_error_line(error) or find_forward_line(module)
        raise CaptureError(f"a module runs forward and backward in one process, {finding}", line) from error
    if casts:  # autocast does nothing in fp64, so no comparison would show it
        finding = "met torch.autocast; nearest: none"
        raise CaptureError(f"a captured module computes in its own precision, {finding}", casts[0])
    _check_repeats(program, module, batch, expected)
    if not _is_finite(expected):
        finding = f"met a loss of {expected.loss:.4g} and gradients that are no numbers; nearest: other inputs"
        raise CaptureError(f"loss and gradients of the first step are finite, {finding}", find_forward_line(module))
    _compare(program, module, expected, batches, microbatch)
    with _perturb(module):
        second_inputs = _shuffle(batch)
        try:
            expected = run_step(module, [second_inputs])
        except (RuntimeError, ValueError, IndexError):  # the module does not take shuffled inputs
            second_inputs = batch
            expected = run_step(module, [second_inputs])
        if _is_finite(expected):
            parts = list(zip(*(values.chunk(len(batches)) for values in second_inputs), strict=True))
            _compare(program, module, expected, parts, microbatch)


def _is_finite(result: StepResult) -> bool:
    """Return whether loss and gradients are finite; a buffer may be infinite, as a mask of attention is."""
    return all(bool(values.isfinite().all()) for name, values in result.list_tensors() if not name.startswith("buffer"))


def _compare(
    program: Program, module: nn.Module, expected: StepResult, batches: Sequence[Inputs], microbatch: int
) -> None:
    tolerance = find_tolerance(program)
    error, name = measure_difference(expected, run_program(program, module, batches))
    if error <= tolerance:
        return
    parts = run_step(module, batches)
    part_error, part_name = measure_difference(expected, parts, buffers=False)
    if part_error <= tolerance:
        part_error, part_name = measure_difference(expected, parts)
    if len(batches) > 1 and part_error > tolerance:
        line, finding = _find_interaction(program, module, expected, parts, part_name, batches)
        rule = f"the loss of a batch is the mean of those of its {len(batches)} microbatches"
        nearest = f"nearest: 1 microbatch (plan: microbatch: {microbatch * len(batches)})"
        raise CaptureError(f"{rule}, met {finding}; {nearest}", line or find_forward_line(module))
    hidden_calls = _list_hidden(module, batches[0])
    fallback = find_forward_line(module), "something that torch does not export", _WRITTEN
    line, reason, nearest = hidden_calls[0] if hidden_calls else fallback
    raise CaptureError(
        f"a captured module has the gradients of its operators, met {reason}: {name} is {error:.1e} off, of 1; "
        f"nearest: {nearest}",
        line,
    )


def _find_interaction(
    program: Program,
    module: nn.Module,
    batch_result: StepResult,
    parts_result: StepResult,
    name: str,
    batches: Sequence[Inputs],
) -> tuple[str, str]:
    """Return the line on which samples depend on each other, where it is known, and how they do."""
    count, batch = len(batches), len(batches[0][0])
    if name.startswith("buffer"):
        line = program.update_lines.get(name.removeprefix("buffer "), "")
        return line, f"{name}, which each of {count} microbatches renews"
    if abs(float(batch_result.loss - count * parts_result.loss)) <= TOLERANCE * max(1.0, abs(float(batch_result.loss))):
        node = find_summing_node(program, batch)
        return find_node_line(node) if node else "", f"a sum over samples, which is {count} times that mean"
    node_values: list[dict[str, Any]] = []
    run_program(program, module, batches, node_values)
    node = find_mixing_node(program, batch, node_values)
    losses = f"{float(batch_result.loss):.6g} of the batch and {float(parts_result.loss):.6g} of microbatches"
    return find_node_line(node) if node else "", f"samples that depend on each other: {name} differs, loss is {losses}"


def _check_precision(program: Program) -> None:
    for node in program.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype in HALF:
            finding = f"met {str(value.dtype).removeprefix('torch.')}; nearest: float32"
            raise CaptureError(f"a captured module computes in fp32, {finding}", find_node_line(node))


def _check_repeats(program: Program, module: nn.Module, batch: Inputs, expected: StepResult) -> None:
    """Raise where the module computes something else from the same inputs the second time."""
    attributes_before = _list_plain_attributes(module)
    error, tensor_name = measure_difference(expected, run_step(module, [batch]))
    changed_attributes = [
        (owner, name)
        for (owner, name), value in _list_plain_attributes(module).items()
        if attributes_before.get((owner, name)) != value
    ]
    random_nodes = [
        node
        for node in program.module.graph.nodes
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    if changed_attributes:
        owner, name = changed_attributes[0]
        submodule = module.get_submodule(owner)
        line = find_assignment_line(submodule, name)
        finding = f"met {type(submodule).__name__}.{name}, which forward changes"
        nearest = "a buffer that the loss does not read"
        raise CaptureError(f"a captured module computes the same at every step, {finding}; nearest: {nearest}", line)
    if error > 0:
        line = (find_node_line(random_nodes[0]) if random_nodes else "") or find_forward_line(module)
        cause = random_nodes[0].name if random_nodes else f"another {tensor_name} the second time"
        rule = (
            "a captured module computes the same of the same inputs, or ranks would draw other numbers than one process"
        )
        raise CaptureError(f"{rule}; met {cause}; nearest: no dropout, and noise as an input", line)


def _list_plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (owner, name): value
        for owner, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if isinstance(value, int | float | str | bool) and value == value  # without NaN, which never equals itself
    }


@contextmanager
def _perturb(module: nn.Module) -> Iterator[None]:
    """Change a module's parameters inside the body: parameters of zeros would hide errors behind them."""
    generator = torch.Generator().manual_seed(1)
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    originals = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            size = 0.1 * float(parameter.abs().mean()) + 0.01
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_(original)


def _shuffle(inputs: Inputs) -> Inputs:
    """Return inputs with their elements shuffled: indices stay valid, and as much is padding as before."""
    generator = torch.Generator().manual_seed(2)
    return tuple(
        tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape) for tensor in inputs
    )


def _check_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            finding = f"met a hook of {name}; nearest: none, and its factor in forward"
            raise CaptureError(
                f"gradients of a captured module are those of its loss, {finding}", find_forward_line(module)
            )


def _list_hidden(module: nn.Module, inputs: Inputs) -> list[tuple[str, str, str]]:
    """Return the calls of a module that its program lacks: for each its line, what it is, and what to use instead."""
    calls: list[tuple[str, str, str]] = []
    with _watch_calls(calls), torch.enable_grad():
        module(*(tensor.clone() for tensor in inputs))
    return calls


@contextmanager
def _note_autocast(lines: list[str]) -> Iterator[None]:
    """Append the line of every `torch.autocast` that the body turns on to ``lines``."""
    enter: Any = torch.autocast.__enter__

    def note_enter(context: Any) -> Any:
        if context._enabled:
            lines.append(find_caller_line())
        return enter(context)

    with patch.object(torch.autocast, "__enter__", note_enter):
        yield


class _Hooks(TorchFunctionMode):
    def __init__(self, calls: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            self.calls.append((find_caller_line(), "a hook of a gradient", "its factor in forward"))
        return function(*arguments, **(options or {}))


@contextmanager
def _watch_calls(calls: list[tuple[str, str, str]]) -> Iterator[None]:
    """Append functions with gradients of their own, and hooks, that the body calls to ``calls``."""
    kind: Any = torch.autograd.Function
    apply = kind.__dict__["apply"]

    def note_apply(cls: Any, *arguments: Any, **options: Any) -> Any:
        nearest = "use_reentrant=False" if cls.__name__ == "CheckpointFunction" else _WRITTEN
        calls.append((find_caller_line(), f"the gradient of {cls.__name__}", nearest))
        return apply.__get__(None, cls)(*arguments, **options)

    with patch.object(kind, "apply", classmethod(note_apply)), _Hooks(calls):
        yield


def check_module(job: OperatorJob, graph: OperatorGraph) -> float:
    """Return how far from one process in fp64 the ranks of a job may be.

    Raises
    ------
    CaptureError
        Where the module is not the one of ``graph``, or does what the back end does not.
    """
    built_module = build_module(job)
    with name_factory(job.module), redirect_stdout(sys.stderr):  # forward may print
        captured = capture(built_module.module, built_module.microbatches[0])
        if captured.skipped_buffers:
            rule = (
                "the executor renews buffers point by point, each from one value of the loss, which does not read them"
            )
            finding = f"met {', '.join(captured.skipped_buffers)}; nearest: the update outside of forward"
            raise CaptureError(f"{rule}; {finding}", captured.update_lines[captured.skipped_buffers[0]])
        for name, parameter in built_module.module.named_parameters():
            if parameter.dtype not in (torch.float32, torch.float64):
                finding = f"met {name} of {str(parameter.dtype).removeprefix('torch.')}; nearest: the module's .float()"
                raise CaptureError(f"parameters of a captured module are of fp32, {finding}")
        double_module = build_module(replace(job, double=True))
        program = export_program(double_module.module, double_module.microbatches[0])
        check(program, double_module.module, double_module.microbatches, job.plan.sequences)
        if mismatch := _find_difference(graph, captured.graph):
            name, finding = mismatch
            nodes = (node for node in captured.module.graph.nodes if captured.operators.get(node.name) == name)
            line = next((find_node_line(node) for node in nodes), "") or find_forward_line(built_module.module)
            raise CaptureError(f"the module is the one that the scenario's graph was captured from; {finding}", line)
        Layouts(captured, {sharding.operator: sharding for sharding in job.plan.shardings})
        return find_tolerance(program)


def _find_difference(graph: OperatorGraph, captured_graph: OperatorGraph) -> tuple[str, str] | None:
    """Return the operator in which two graphs first differ, and how; None where they do not."""
    graph_operators, module_operators = (
        {
            f"{block.name}.{operator.name}": (block.repeat, operator.dims)
            for block in compared_graph.blocks
            for operator in block.operators
        }
        for compared_graph in (graph, captured_graph)
    )
    nearest = "a graph that is captured anew, with as many samples as a microbatch has"
    names = (*graph_operators, *module_operators)
    if unmatched := [name for name in names if (name in graph_operators) != (name in module_operators)]:
        source = "graph" if unmatched[0] in graph_operators else "module"
        return unmatched[0], f"met {unmatched[0]} only in the {source}; nearest: {nearest}"
    for name, (repeat, dims) in graph_operators.items():
        if (repeat, dims) != module_operators[name]:
            descriptions = [
                ", ".join(f"{dim}({size})" for dim, size in dims) + f" x {times}"
                for times, dims in (graph_operators[name], module_operators[name])
            ]
            return name, f"{name} is {descriptions[0]} in the graph, met {descriptions[1]}; nearest: {nearest}"
    return None
