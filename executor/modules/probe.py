"""What a module runs for single samples, from which is seen what depends on data.

Ranks gather the shards of a block together, so a block that only some samples run cannot be a unit of its own, and
`DistributedDataParallel` must look for parameters that a backward leaves without gradients. Both are tried with single
samples of every rank; a module may still do otherwise with others.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.executor.modules.batches import count_samples, select_samples
from meshwise.executor.modules.calls import count_labels
from meshwise.executor.modules.losses import LossFunction, LossKind, compute_loss
from meshwise.executor.modules.quiet import keep_quiet
from meshwise.executor.starting.fakes import FakeMode, copy_without_values, make_fake_mode

MOST_SAMPLES = 8
"""Samples of a rank that are tried, each alone."""


class Findings(NamedTuple):
    """What single samples have shown.

    Parameters
    ----------
    steady_blocks
        The blocks that every sample runs, equally often and once or more.
    has_unused
        Whether some sample leaves a parameter without a gradient.
    idle_names
        Names of the parameters that all samples leave without one.
    """

    steady_blocks: tuple[nn.Module, ...]
    has_unused: bool
    idle_names: frozenset[str]


def probe(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Any,
    loss: LossFunction | None,
    device: torch.device,
    kind: LossKind = LossKind.SAMPLES,
) -> Findings:
    """Return what the first samples of a batch show on all ranks; the module is left as it was."""
    return _reduce(module, blocks, _try_samples(module, blocks, batch, loss, kind), device)


def probe_fakes(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Any,
    loss: LossFunction | None,
    device: torch.device,
    kind: LossKind = LossKind.SAMPLES,
) -> Findings | None:
    """Return what `probe` does, of a module whose parameters have no values; ``None`` where some rank needs them."""
    rows: list[Tensor] | None = None
    with suppress(Exception):  # an error of the program itself comes again when it runs with values
        mode = make_fake_mode()
        copy = copy_without_values(module, mode, device)
        names = {id(part): name for name, part in module.named_modules()}
        copied_blocks = [copy.get_submodule(names[id(block)]) for block in blocks]
        rows = _try_samples(copy, copied_blocks, batch, loss, kind, mode)
    has_failed = torch.tensor(float(rows is None), device=device)
    if dist.is_initialized():
        dist.all_reduce(has_failed)
    return None if has_failed or rows is None else _reduce(module, blocks, rows, device)


def _try_samples(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Any,
    loss: LossFunction | None,
    kind: LossKind,
    mode: FakeMode | None = None,
) -> list[Tensor]:
    """Return the row of `_try_sample` of each sample."""
    with keep_quiet(module):
        return [
            _try_sample(module, blocks, select_samples(batch, sample, sample + 1), loss, kind, mode)
            for sample in range(min(count_samples(batch), MOST_SAMPLES))
        ]


def _reduce(module: nn.Module, blocks: Sequence[nn.Module], rows: Sequence[Tensor], device: torch.device) -> Findings:
    """Return what the rows of the samples of all ranks show."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    least, most = (values.to(device) for values in (torch.stack([*rows]).amin(0), torch.stack([*rows]).amax(0)))
    if dist.is_initialized():
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    is_steady = ((least == most) & (least > 0)).tolist()
    steady_blocks = tuple(block for block, steady in zip(blocks, is_steady, strict=False) if steady)
    least_uses, most_uses = least[len(blocks) :].tolist(), most[len(blocks) :].tolist()
    idle_names = frozenset(name for name, uses in zip(names, most_uses, strict=True) if not uses)
    return Findings(steady_blocks, not all(least_uses), idle_names)


def _try_sample(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    sample: Any,
    loss: LossFunction | None,
    kind: LossKind,
    mode: FakeMode | None,
) -> Tensor:
    """Return how often a sample runs every block, and for every parameter whether it has a gradient."""
    counts: Counter[int] = Counter()
    handles = [
        block.register_forward_pre_hook(lambda *_, place=place: counts.update((place,)))
        for place, block in enumerate(blocks)
    ]
    try:
        with mode or nullcontext():
            num_items = count_labels(module, sample) if kind is LossKind.SHARES else None
            compute_loss(module, sample, loss, kind, num_items).total.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    uses = [parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad]
    module.zero_grad(set_to_none=True)
    return torch.tensor([*(counts[place] for place in range(len(blocks))), *map(float, uses)])
