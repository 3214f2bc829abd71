"""Captures a user's module as it is called in training: with a batch of any form, and with a loss of its own.

A capture is of one shape: batches of another shape are captured anew. The program is that of a microbatch of all data
ranks together, of which each has its own samples.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.executor.capture.capture import capture
from meshwise.executor.capture.captured import CapturedModule, CaptureError
from meshwise.executor.capture.grouped_products import GroupedProducts
from meshwise.executor.capture.program import export_program
from meshwise.executor.capture.source_lines import add_nearest, find_forward_line, find_node_line
from meshwise.executor.modules.batches import list_tensors, map_tensors, select_samples, to_double
from meshwise.executor.modules.losses import LossFunction, compute_own_loss
from meshwise.executor.modules.quiet import (
    drop_nothing,
    keep_experts,
    keep_quiet,
    list_dropouts,
    run_without_gradients,
    turn_to_double,
)
from meshwise.executor.modules.sharding import find_rank
from meshwise.executor.operators.whole_batch import check
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.stages.supported_modules import CHECKED_SAMPLES
from meshwise.executor.starting.construction import fill_parameters
from meshwise.executor.starting.fakes import copy_without_values, make_fake_mode
from meshwise.executor.starting.first_values import FirstValues
from meshwise.strategies.operators.choices import find_cut_violation
from meshwise.strategies.plan.plan import Plan


class CutError(UserError):
    """A module whose operators cannot be cut, or a plan that does not cut it."""


def find_signature(batch: Any) -> str:
    """Return what a capture depends on of a batch: its form, shapes and dtypes, and all that is no tensor."""
    return repr(map_tensors(batch, lambda tensor: (tuple(tensor.shape), tensor.dtype)))  # type: ignore[arg-type,return-value]


def make_example(batch: Any, num_ranks: int) -> Any:
    """Return a batch on the CPU with so many times the samples; a capture reads shapes alone."""
    return map_tensors(batch, lambda tensor: torch.cat([tensor.detach().cpu()] * num_ranks))


def capture_batch(module: nn.Module, batch: Any, loss: LossFunction | None, *, nearest: str) -> CapturedModule:
    """Return the captured module whose inputs are the tensors of a batch in order, and whose result is the loss.

    Of a loss (sum, weight) the result is their quotient.

    Parameters
    ----------
    nearest
        The plan that an error names.

    Raises
    ------
    CutError
        With the line of the user's file, where the module cannot be captured or computes what no program says.
    """
    try:
        with take_tensors(module, batch, loss), keep_experts(module):
            captured = capture(module, list_tensors(batch))
    except CaptureError as error:
        if isinstance(error.__cause__, UserError):  # of the loss, not of the capture
            raise error.__cause__ from error
        raise CutError(add_nearest(str(error), f"{nearest}, which captures nothing")) from error
    if captured.skipped_buffers:
        name = captured.skipped_buffers[0]
        rule = "ranks renew buffers point by point, each from one value of the loss, which does not read them"
        raise CutError(f"{captured.update_lines[name]}: {rule}; met {name}; nearest: {nearest}")
    for node in captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        if len(node.args) > 4 and node.args[4]:
            rule = "gradients of a cut module are dense, met an embedding with sparse=True"
            raise CutError(f"{find_node_line(node)}: {rule}; nearest: sparse=False")
    return captured


def require_samples(num_samples: int, place: str) -> None:
    """Raise `CutError` where a microbatch has so few samples that a capture does not know their dim.

    Parameters
    ----------
    place
        The ranks that have them together, in words.
    """
    if num_samples < CHECKED_SAMPLES:
        rule = f"a microbatch of a cut module has at least {CHECKED_SAMPLES} samples on {place}"
        raise CutError(f"{rule}, met {num_samples}; nearest: {CHECKED_SAMPLES}")


def check_program(module: nn.Module, batch: Any, loss: LossFunction | None, *, nearest: str) -> None:
    """Raise `CutError` unless a module and its program have the same loss, gradients and buffers, in fp64.

    The module is in fp64 and without dropout afterwards.
    """
    turn_to_double(module)
    drop_nothing(module)
    samples = to_double(select_samples(batch, 0, CHECKED_SAMPLES))
    with take_tensors(module, samples, loss):
        inputs = tuple(list_tensors(samples))
        try:
            with keep_experts(module):
                program = export_program(module, inputs)
            with GroupedProducts():
                check(program, module, [inputs], CHECKED_SAMPLES)
        except CaptureError as error:
            raise CutError(add_nearest(str(error), f"{nearest}, which captures nothing")) from error


CHECKED_BYTES = 2**28
"""Bytes of parameters up to which a module that is built without them has them for a comparison with its program."""


def check_start(
    module: nn.Module, values: FirstValues | None, batch: Any, loss: LossFunction | None, *, nearest: str
) -> None:
    """Do what `check_program` does with a copy of a module.

    A module that has no values yet gets them where it is small. Of a larger one the comparison would need several times
    its memory; a line says that it is not made.

    Parameters
    ----------
    values
        Its first values, where it has none yet.
    """
    if values is None:
        check_program(deepcopy(module).cpu(), batch, loss, nearest=nearest)
        return
    size = sum(parameter.nbytes for parameter in module.parameters())
    if size > CHECKED_BYTES:
        if find_rank() == 0:
            rule = f"a module with at most {CHECKED_BYTES / 1e9:.2g} GB of parameters is compared with its program"
            print(f"the program is not checked: {rule}, met {size / 1e9:.2g} GB", file=sys.stderr, flush=True)
        return
    copy = deepcopy(module)
    fill_parameters(copy, values)
    check_program(copy.cpu(), batch, loss, nearest=nearest)


def find_weight(module: nn.Module, batch: Any, loss: LossFunction | None) -> bool:
    """Return whether the loss of a module has a weight, without values where its forward needs none."""

    def find(own_module: nn.Module) -> bool:
        value = run_without_gradients(lambda: compute_own_loss(own_module, batch, loss))
        return value.weight is not None

    with suppress(Exception):  # an error of the program itself comes again when it runs with values
        mode = make_fake_mode()
        copy = copy_without_values(module, mode, list_tensors(batch)[0].device)
        with keep_quiet(copy), mode:
            return find(copy)
    with keep_quiet(module):
        return find(module)


@contextmanager
def take_tensors(module: nn.Module, batch: Any, loss: LossFunction | None) -> Iterator[None]:
    """Have a module's forward take the tensors of a batch, one after the other, and return the loss."""
    own_forward = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if own_forward is not None:
            module.forward = own_forward

    def compute_mean(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        same_batch = map_tensors(batch, lambda _: next(remaining))
        restore()
        try:
            return compute_own_loss(module, same_batch, loss).mean
        finally:
            module.forward = compute_mean

    module.forward = compute_mean
    try:
        yield
    finally:
        restore()


def copy_structure(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU whose parameters have no values, to capture it later in other shapes.

    Memory that is never written takes no room there.
    """
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    try:
        copy = deepcopy(module, dict(empty))
    except Exception as error:
        rule = f"a cut module can be copied by copy.deepcopy, met {type(error).__name__}: {error}"
        raise CutError(f"{find_forward_line(module)}: {rule}"[:500]) from error
    for part in copy.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.cpu()
    return copy


def require_same_module(plan: Plan, captured: CapturedModule, module: nn.Module) -> None:
    """Raise `CutError` where a plan's stages or shardings are of another module, or do not divide it and its batch.

    With dropout that drops nothing, as in a comparison, torch computes by other operators: some may be missing then.
    """
    blocks = [name for name, _ in captured.graph.occurrences]
    plan_blocks = [name for stage in plan.stages for name in stage.blocks]
    if blocks != plan_blocks:
        other = next((name for name in plan_blocks if name not in blocks), plan_blocks[-1] if plan_blocks else "none")
        found = ", ".join(blocks[:6]) + (", ..." if len(blocks) > 6 else "")
        raise CutError(f"plan: its blocks are those of the module ({found}), met {other}; nearest: tensor=N")
    operators = {
        f"{name}.{operator.name}": (block, operator)
        for occurrence, block in captured.graph.occurrences
        for name in (block.name, occurrence)
        for operator in block.operators
    }
    drops_nothing = any(getattr(part, name) == 0 for part, name in list_dropouts(module))
    degrees = {axis.name: axis.size for axis in plan.mesh.axes}
    for sharding in plan.shardings:
        if sharding.operator not in operators:
            if drops_nothing:
                continue
            raise CutError(
                f"plan: shardings are of operators of the module, met {sharding.operator}; nearest: tensor=N"
            )
        block, operator = operators[sharding.operator]
        for dim, axes in sharding.cuts:
            if dim in dict(operator.dims):
                samples = captured.batch // plan.data
                if violation := find_cut_violation(block, operator, dim, axes, degrees, samples):
                    raise CutError(f"plan: {sharding.operator}: {violation}")
        for tensor, cuts in sharding.kept:
            sizes = dict(zip(block.tensor[tensor].dims, block.tensor[tensor].shape, strict=True))
            for dim, axes in cuts:
                parts = prod(degrees[axis] for axis in axes)
                if sizes[dim] % parts:
                    rule = f"{', '.join(axes)} divide {dim}({sizes[dim]})"
                    raise CutError(f"plan: {tensor} of {sharding.operator}: {rule}, met {parts}")
