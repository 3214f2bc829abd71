"""Compares a captured program with the user's module in one process on the whole batch, before ranks start.

The module, as its user wrote it, runs in fp64 on all samples at once; the captured program runs on one microbatch after
the other. Loss, gradients and buffers of both must be equal, for the given inputs and parameters and for changed ones:
with a layer that is zero at the first step, an error may not show.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.captured import CaptureError
from meshwise.executor.capture.program import Program
from meshwise.executor.capture.reading import mixing_node, summing_node
from meshwise.executor.capture.source_lines import (
    line_of_assignment,
    line_of_caller,
    line_of_error,
    line_of_forward,
    line_of_node,
)
from meshwise.executor.check.verification import SINGLE, TOLERANCE, gradient_scale

Inputs = tuple[Tensor, ...]
_WRITTEN = "the same written with torch's own operators, as x + (y - x).detach()"
HALF = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class Step(NamedTuple):
    """The results of one forward and backward pass: the loss, and gradients and renewed buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the loss, the gradients and the buffers with their names in messages."""
        yield "loss", self.loss
        yield from ((f"gradient of {name}", each) for name, each in self.gradients.items())
        yield from ((f"buffer {name}", each) for name, each in self.buffers.items())


def step(module: nn.Module, batches: Sequence[Inputs]) -> Step:
    """Return the results of a module for batches of equal weight, one after the other; its state is restored."""
    before = {name: each.clone() for name, each in module.named_buffers()}
    total = torch.zeros((), dtype=torch.float64)
    try:
        module.zero_grad(set_to_none=True)
        for inputs in batches:
            loss = module(*(each.clone() for each in inputs)) / len(batches)
            loss.reshape(()).backward()
            total += loss.detach().reshape(())
        gradients = {
            name: torch.zeros_like(each) if each.grad is None else each.grad.detach().clone()
            for name, each in module.named_parameters()
            if each.requires_grad
        }
        return Step(total, gradients, {name: each.detach().clone() for name, each in module.named_buffers()})
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, each in module.named_buffers():
                each.copy_(before[name])


def program_step(
    program: Program, module: nn.Module, batches: Sequence[Inputs], seen: list[dict[str, Any]] | None = None
) -> Step:
    """Return the results of a program for batches, with the parameters and buffers of its module.

    For each batch the values of all nodes, by name, are appended to ``node_values``.
    """
    kept = set() if seen is None else {node.name for node in program.module.graph.nodes}
    # copies, not the parameters: their hooks would run here, but do not on ranks
    own = {name: each.detach().clone() for name, each in module.named_parameters()}
    leaves = {name: own[name].requires_grad_(each.requires_grad) for name, each in module.named_parameters()}
    first = {id(each): name for name, each in module.named_parameters()}
    shared = {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    buffers = {name: each.detach().clone() for name, each in module.named_buffers(remove_duplicate=False)}
    given: dict[str, Tensor] = {name: leaves[shared[target]] for name, target in program.parameters.items()}
    given |= program.constants
    total = torch.zeros((), dtype=torch.float64)
    for inputs in batches:
        known = given | {name: buffers[target] for name, target in program.buffers.items()}
        known |= dict(zip(program.inputs, inputs, strict=True))
        values = _Values(program.module, {update.reads for update in program.updates} | kept)
        (loss,) = values.run(*(known[node.name] for node in program.module.graph.find_nodes(op="placeholder")))
        if seen is not None:
            seen.append(values.kept)
        loss = loss / len(batches)
        if loss.requires_grad:
            loss.reshape(()).backward()
        total += loss.detach().reshape(())
        for update in program.updates:
            read = [values.kept[update.reads].detach()] if update.reads else []
            buffers[update.buffer] = update.program(buffers[update.buffer], *read)
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in leaves.items()
        if each.requires_grad
    }
    return Step(total, gradients, {name: buffers[name] for name, _ in module.named_buffers()})


class _Values(torch.fx.Interpreter):
    """Runs a program and stores the values of some nodes, by name."""

    def __init__(self, module: torch.fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.kept: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Return the value of a node."""
        value = super().run_node(n)
        if n.name in self.names:
            self.kept[n.name] = value
        return value


def difference(one: Step, other: Step, *, buffers: bool = True) -> tuple[float, str]:
    """Return the largest relative difference of two results, and the name of the tensor that has it.

    Differences of gradients are over their `gradient_scale`, those of loss and buffers over their largest finite
    element, or 1.
    """
    largest = max((_largest(gradient) for gradient in one.gradients.values()), default=0.0)
    others, differences = dict(other.tensors()), [(0.0, "")]
    for name, values in one.tensors():
        if values.numel() and (buffers or not name.startswith("buffer")):
            is_gradient = name.startswith("gradient")
            scale = gradient_scale(_largest(values), largest) if is_gradient else max(1.0, _largest(values))
            differences.append((_distance(values, others[name]) / scale, name))
    return max(differences)


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors: 0 where both are infinite, infinite where one is not a number."""
    apart = (one.double() - other.double()).abs()
    apart = torch.where(apart.isnan(), torch.inf, apart)
    return float(torch.where(one == other, 0.0, apart).max())


def _largest(values: Tensor) -> float:
    """Return the largest finite absolute element of a tensor; 0 where it has none."""
    finite = values.detach().double()[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def tolerance_of(program: Program) -> float:
    """Return how far from one process a program in fp64 may be: more where it casts to fp32 by itself, and rounds."""
    values = (node.meta.get("val") for node in program.module.graph.nodes)
    every = [each for value in values for each in (value if isinstance(value, tuple | list) else (value,))]
    single = any(isinstance(each, Tensor) and each.dtype in (torch.float32, torch.complex64) for each in every)
    return SINGLE if single else TOLERANCE


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
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    casts: list[str] = []
    try:
        with _noted_autocast(casts):
            expected = step(module, [whole])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        met = f"met {type(error).__name__}: {' '.join(str(error).split())[:300]}; nearest: a module that trains in fp64"
        line = line_of_error(error) or line_of_forward(module)
        raise CaptureError(f"a module runs forward and backward in one process, {met}", line) from error
    if casts:  # autocast does nothing in fp64, so no comparison would show it
        met = "met torch.autocast; nearest: none"
        raise CaptureError(f"a captured module computes in its own precision, {met}", casts[0])
    _check_repeats(program, module, whole, expected)
    if not _is_finite(expected):
        met = f"met a loss of {expected.loss:.4g} and gradients that are no numbers; nearest: other inputs"
        raise CaptureError(f"loss and gradients of the first step are finite, {met}", line_of_forward(module))
    _compare(program, module, expected, batches, microbatch)
    with _perturbed(module):
        other = _shuffled(whole)
        try:
            expected = step(module, [other])
        except (RuntimeError, ValueError, IndexError):  # the module does not take shuffled inputs
            other = whole
            expected = step(module, [other])
        if _is_finite(expected):
            parts = list(zip(*(values.chunk(len(batches)) for values in other), strict=True))
            _compare(program, module, expected, parts, microbatch)


def _is_finite(made: Step) -> bool:
    """Return whether loss and gradients are finite; a buffer may be infinite, as a mask of attention is."""
    return all(bool(values.isfinite().all()) for name, values in made.tensors() if not name.startswith("buffer"))


def _compare(program: Program, module: nn.Module, expected: Step, batches: Sequence[Inputs], microbatch: int) -> None:
    tolerance = tolerance_of(program)
    met, where = difference(expected, program_step(program, module, batches))
    if met <= tolerance:
        return
    parts = step(module, batches)
    apart, what = difference(expected, parts, buffers=False)
    if apart <= tolerance:
        apart, what = difference(expected, parts)
    if len(batches) > 1 and apart > tolerance:
        line, found = _interaction(program, module, expected, parts, what, batches)
        held = f"the loss of a batch is the mean of those of its {len(batches)} microbatches"
        nearest = f"nearest: 1 microbatch (plan: microbatch: {microbatch * len(batches)})"
        raise CaptureError(f"{held}, met {found}; {nearest}", line or line_of_forward(module))
    hidden = _hidden(module, batches[0])
    unknown = line_of_forward(module), "something that torch does not export", _WRITTEN
    line, reason, nearest = hidden[0] if hidden else unknown
    raise CaptureError(
        f"a captured module has the gradients of its operators, met {reason}: {where} is {met:.1e} off, of 1; "
        f"nearest: {nearest}",
        line,
    )


def _interaction(
    program: Program, module: nn.Module, whole: Step, parts: Step, what: str, batches: Sequence[Inputs]
) -> tuple[str, str]:
    """Return the line on which samples depend on each other, where it is known, and how they do."""
    count, batch = len(batches), len(batches[0][0])
    if what.startswith("buffer"):
        line = program.renewal_lines.get(what.removeprefix("buffer "), "")
        return line, f"{what}, which each of {count} microbatches renews"
    if abs(float(whole.loss - count * parts.loss)) <= TOLERANCE * max(1.0, abs(float(whole.loss))):
        node = summing_node(program, batch)
        return line_of_node(node) if node else "", f"a sum over samples, which is {count} times that mean"
    seen: list[dict[str, Any]] = []
    program_step(program, module, batches, seen)
    node = mixing_node(program, batch, seen)
    losses = f"{float(whole.loss):.6g} of the batch and {float(parts.loss):.6g} of microbatches"
    return line_of_node(node) if node else "", f"samples that depend on each other: {what} differs, loss is {losses}"


def _check_precision(program: Program) -> None:
    for node in program.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype in HALF:
            met = f"met {str(value.dtype).removeprefix('torch.')}; nearest: float32"
            raise CaptureError(f"a captured module computes in fp32, {met}", line_of_node(node))


def _check_repeats(program: Program, module: nn.Module, whole: Inputs, expected: Step) -> None:
    """Raise where the module computes something else from the same inputs the second time."""
    before = _plain_attributes(module)
    met, what = difference(expected, step(module, [whole]))
    changed = [
        (owner, name)
        for (owner, name), value in _plain_attributes(module).items()
        if before.get((owner, name)) != value
    ]
    random = [
        node
        for node in program.module.graph.nodes
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    if changed:
        owner, name = changed[0]
        of = module.get_submodule(owner)
        line = line_of_assignment(of, name)
        met_there = (
            f"met {type(of).__name__}.{name}, which forward changes; nearest: a buffer that the loss does not read"
        )
        raise CaptureError(f"a captured module computes the same at every step, {met_there}", line)
    if met > 0:
        line = (line_of_node(random[0]) if random else "") or line_of_forward(module)
        of_what = random[0].name if random else f"another {what} the second time"
        held = (
            "a captured module computes the same of the same inputs, or ranks would draw other numbers than one process"
        )
        raise CaptureError(f"{held}; met {of_what}; nearest: no dropout, and noise as an input", line)


def _plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (owner, name): value
        for owner, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, int | float | str | bool) and value == value  # without NaN, which never equals itself
    }


@contextmanager
def _perturbed(module: nn.Module) -> Iterator[None]:
    """Change a module's parameters inside the body: parameters of zeros would hide errors behind them."""
    generator = torch.Generator().manual_seed(1)
    floats = [each for each in module.parameters() if each.is_floating_point()]
    before = [each.detach().clone() for each in floats]
    with torch.no_grad():
        for each in floats:
            size = 0.1 * float(each.abs().mean()) + 0.01
            each.add_(size * torch.randn(each.shape, generator=generator, dtype=each.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for each, old in zip(floats, before, strict=True):
                each.copy_(old)


def _shuffled(inputs: Inputs) -> Inputs:
    """Return inputs with their elements shuffled: indices stay valid, and as much is padding as before."""
    generator = torch.Generator().manual_seed(2)
    return tuple(each.flatten()[torch.randperm(each.numel(), generator=generator)].view(each.shape) for each in inputs)


def _check_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            met = f"met a hook of {name}; nearest: none, and its factor in forward"
            raise CaptureError(f"gradients of a captured module are those of its loss, {met}", line_of_forward(module))


def _hidden(module: nn.Module, inputs: Inputs) -> list[tuple[str, str, str]]:
    """Return the calls of a module that its program lacks: for each its line, what it is, and what to use instead."""
    seen: list[tuple[str, str, str]] = []
    with _watched(seen), torch.enable_grad():
        module(*(each.clone() for each in inputs))
    return seen


@contextmanager
def _noted_autocast(lines: list[str]) -> Iterator[None]:
    """Append the line of every `torch.autocast` that the body turns on to ``lines``."""
    enter: Any = torch.autocast.__enter__

    def noted(context: Any) -> Any:
        if context._enabled:
            lines.append(line_of_caller())
        return enter(context)

    torch.autocast.__enter__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class _Hooks(TorchFunctionMode):
    def __init__(self, seen: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            self.seen.append((line_of_caller(), "a hook of a gradient", "its factor in forward"))
        return function(*arguments, **(options or {}))


@contextmanager
def _watched(seen: list[tuple[str, str, str]]) -> Iterator[None]:
    """Append functions with gradients of their own, and hooks, that the body calls to ``calls``."""
    kind: Any = torch.autograd.Function
    apply = kind.__dict__["apply"]

    def noted(cls: Any, *arguments: Any, **options: Any) -> Any:
        nearest = "use_reentrant=False" if cls.__name__ == "CheckpointFunction" else _WRITTEN
        seen.append((line_of_caller(), f"the gradient of {cls.__name__}", nearest))
        return apply.__get__(None, cls)(*arguments, **options)

    kind.apply = classmethod(noted)
    try:
        with _Hooks(seen):
            yield
    finally:
        kind.apply = apply
