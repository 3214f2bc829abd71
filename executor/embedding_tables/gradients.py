"""The norm of gradients of which some are parts of tables, each on another rank, and some are sparse."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.recording.tensors import list_values

CLIP_EPSILON = 1e-6
"""torch's, added to a norm that gradients are divided by."""


def sum_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements of some gradients.

    >>> sparse = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([3.0]), (4,)).coalesce()
    >>> float(sum_squares([sparse, torch.full((2,), 2.0)], torch.device("cpu")))
    17.0
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += list_values(gradient).double().square().sum()
    return total


def clip_parts(gradients: Sequence[Tensor], parts: Sequence[Tensor], max_norm: float, device: torch.device) -> None:
    """Clip the norm of all gradients together; ``parts`` are those of which every rank has others."""
    part_ids = set(map(id, parts))
    total = sum_squares(parts, device)
    dist.all_reduce(total)
    total += sum_squares([gradient for gradient in gradients if id(gradient) not in part_ids], device)
    factor = min(max_norm / (float(total) ** 0.5 + CLIP_EPSILON), 1.0)
    for gradient in gradients:
        gradient.mul_(factor)
