"""The blocks of a module: the parts that are gathered, freed and computed again one at a time.

A block is a member of a list of equal modules, as a transformer keeps its layers in a ``ModuleList`` or ``Sequential``,
and lies in no other block. Parameters outside blocks belong to the module itself.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwise.executor.modules.quiet import KeepDouble
from meshwise.executor.parallel.mixed_products import TurnToNarrow, find_narrow_dtype
from meshwise.executor.recording.rank_files import UserError
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, StageRecompute

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

KEPT_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_grouped_mm", "linear", "convolution", "_convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    )
)  # fmt: skip
"""Products, convolutions and attention, whose results selective recomputation keeps."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class RecomputeError(UserError):
    """A plan computes more again than a module has blocks."""


def list_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a module in order; none where no list of it has two modules of one class.

    >>> layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
    >>> len(list_blocks(nn.Sequential(nn.Embedding(4, 2), *layers)))
    3
    """
    return list(_list_blocks(module))


def _list_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    counts = Counter(type(child) for child in children if has_parameters(child))
    is_list = isinstance(module, LISTS)
    for child in children:
        # a list of lists is walked through: its members are stages of layers, as in many convolutional networks
        is_block = is_list and counts[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_block and has_parameters(child) and not _is_small(child, module) and not _has_blocks(child):
            yield child
        else:
            yield from _list_blocks(child)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own or in its parts."""
    return next(module.parameters(), None) is not None


def _is_small(module: nn.Module, parent: nn.Module) -> bool:
    """Return whether a module is a single operator of a chain, as the two products of a feed-forward network are."""
    return isinstance(parent, nn.Sequential) and next(module.children(), None) is None


def _has_blocks(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and any(_list_blocks(module))


def make_recompute_contexts(choice: LayerRecompute) -> Contexts:
    """Return the contexts of a forward, and of the same forward in backward, that compute again what a choice says."""
    if choice is not Recompute.SELECTIVE:
        return nullcontext(), nullcontext()
    first, again = create_selective_checkpoint_contexts(_choose_policy)  # type: ignore[no-untyped-call]
    return first, _refuse_changes(again)


@contextmanager
def _refuse_changes(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Run a forward again; `RecomputeError` where what the first one kept was changed in place."""
    try:
        with context:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        rule = "recompute: of products and attention that selective recompute keeps nothing is changed in place"
        raise RecomputeError(f"{rule}, met one that is; nearest: {Recompute.FULL}") from error


def _choose_policy(context: Any, operator: Any, *arguments: Any, **named_arguments: Any) -> CheckpointPolicy:
    is_kept = operator.name().partition(".")[0] in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _make_contexts(block: nn.Module, choice: LayerRecompute) -> Contexts:
    first, again = make_recompute_contexts(choice)
    renewed: list[tuple[nn.Module, str]] = []
    return _note_renewed(block, first, renewed), _compute_again(block, again, renewed, find_narrow_dtype())


@contextmanager
def _note_renewed(
    block: nn.Module, context: AbstractContextManager[Any], renewed: list[tuple[nn.Module, str]]
) -> Iterator[None]:
    """Run a forward, and note the buffers that it changes; torch does not tell changes of batch statistics."""
    buffers = [
        (part, name, x, x._version) for part in block.modules() for name, x in part._buffers.items() if x is not None
    ]
    with context:
        yield
    for part, name, buffer, version in buffers:
        if part._buffers[name] is not buffer or buffer._version != version or isinstance(part, _BatchNorm):
            renewed.append((part, name))


@contextmanager
def _compute_again(
    block: nn.Module,
    context: AbstractContextManager[Any],
    renewed: Sequence[tuple[nn.Module, str]],
    narrow: torch.dtype | None,
) -> Iterator[None]:
    """Run a forward again as the first one was: backward has left the context of its precision.

    Buffers that the first one has changed are changed in copies.
    """
    precision: AbstractContextManager[Any] = nullcontext() if narrow is None else TurnToNarrow(narrow)
    if next(block.parameters()).dtype is torch.float64:
        precision = KeepDouble()
    buffers = {(part, name): part._buffers[name] for part, name in renewed}
    for (part, name), buffer in buffers.items():
        part._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with precision, context:
            yield
    finally:
        for (part, name), buffer in buffers.items():
            part._buffers[name] = buffer


def _run_again(block: nn.Module, choice: LayerRecompute, forward: Any, *arguments: Any, **named_arguments: Any) -> Any:
    """Run a forward that backward runs again; a compiler has the contexts of the first run in what it compiles."""
    if torch.compiler.is_compiling() and choice is not Recompute.SELECTIVE:
        return checkpoint(forward, *arguments, use_reentrant=False, **named_arguments)
    contexts: Any = partial(_make_contexts, block, choice)
    if torch.compiler.is_compiling():
        contexts = partial(create_selective_checkpoint_contexts, _choose_policy)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named_arguments)


def count_recomputed(num_blocks: int, choice: StageRecompute) -> int:
    """Return how many of the blocks of a stage, from the first on, backward computes again."""
    if choice is Recompute.NONE:
        return 0
    return num_blocks if choice.layers is None else min(choice.layers, num_blocks)


def require_blocks(num_blocks: int, choice: StageRecompute) -> None:
    """Raise `RecomputeError` where the largest of the stages of a choice has fewer blocks than are computed again."""
    if choice is Recompute.NONE:
        return
    if not num_blocks:
        raise RecomputeError("recompute: blocks are equal modules in a list, met none of them; nearest: none")
    if choice.layers is not None and choice.layers > num_blocks:
        rule = f"recompute: a stage of the module has at most {num_blocks} blocks"
        raise RecomputeError(f"{rule}, met {choice.layers}; nearest: {num_blocks}")


def list_offloaded(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that keep on the host what they save; `RecomputeError` where there are none."""
    blocks = list_blocks(module)
    if not blocks:
        raise RecomputeError("offload: activations are those of equal modules in a list, met none; nearest: none")
    return blocks


def recompute_blocks(module: nn.Module, choice: StageRecompute) -> int:
    """Have backward compute blocks again instead of keeping what forward makes; return their number.

    The names of parameters and submodules stay as they are.
    """
    blocks = list_blocks(module)
    require_blocks(len(blocks), choice)
    count = count_recomputed(len(blocks), choice)
    for block in blocks[:count]:
        plain: Any = block
        plain.forward = partial(_run_again, block, choice.layer, plain.forward)
    return count
