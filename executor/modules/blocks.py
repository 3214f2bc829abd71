"""The blocks of a module: the parts that are gathered, freed and computed again one at a time.

A block is a member of a list of equal modules, as a transformer keeps its layers in a ``ModuleList`` or ``Sequential``,
and lies in no other block. Parameters outside blocks belong to the module itself.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from meshwise.executor.modules.quiet import KeepDouble

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


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


def _make_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _compute_again(block)


@contextmanager
def _compute_again(block: nn.Module) -> Iterator[None]:
    """Run a forward again as the first one was: backward has left the context of fp64."""
    is_double = next(block.parameters()).dtype is torch.float64
    with _without_statistics(block), KeepDouble() if is_double else nullcontext():
        yield


@contextmanager
def _without_statistics(block: nn.Module) -> Iterator[None]:
    """Run a forward again with copies of running statistics, to which it adds a second time."""
    norms = [part for part in block.modules() if isinstance(part, _BatchNorm)]
    buffers = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in buffers:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in buffers:
            setattr(norm, name, buffer)


def _run_again(block: nn.Module, forward: Any, *arguments: Any, **named_arguments: Any) -> Any:
    """Run a forward that backward runs again; a compiler takes no contexts, and has those of the first run in it."""
    if torch.compiler.is_compiling():
        return checkpoint(forward, *arguments, use_reentrant=False, **named_arguments)
    contexts = partial(_make_contexts, block)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named_arguments)


def recompute_blocks(module: nn.Module) -> int:
    """Have backward compute every block again instead of keeping what forward makes; return their number.

    The names of parameters and submodules stay as they are.
    """
    blocks = list_blocks(module)
    for block in blocks:
        plain: Any = block
        plain.forward = partial(_run_again, block, plain.forward)
    return len(blocks)
