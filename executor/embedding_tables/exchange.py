"""Messages of look-ups between the data ranks: all-to-alls in a process group of their own.

In it they are in one order on all ranks, whatever else these sum beneath a backward pass.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.modules.losses import LossError


class Exchange(Protocol):
    """How ranks send each other parts of vectors."""

    rank: int
    num_ranks: int

    def swap(self, vector: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what this rank gets, by rank; all ranks send each other so many elements of vectors."""

    def find_any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of some flags are set on any rank."""


class RankExchange:
    """An `Exchange` of the ranks of torch's process groups. All ranks make it together."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.num_ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        self._group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")

    def swap(self, vector: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what all ranks send this one."""
        result = vector.new_empty(sum(received))
        dist.all_to_all_single(result, vector.contiguous(), list(received), list(sent), group=self._group)
        return result

    def find_any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of some flags are set on any rank."""
        numbers = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return [bool(number) for number in numbers.tolist()]


END = -1
"""What ranks meet for at the end of a forward, by the side of the numbers of tables."""


def meet(
    exchange: Exchange, place: int, counts: Sequence[int], names: Sequence[str], device: torch.device
) -> list[int]:
    """Return how many rows each rank asks this one for, which asks for ``counts``.

    Parameters
    ----------
    place
        The table that is looked up, or `END`.
    names
        Those of all tables.

    Raises
    ------
    LossError
        Where another rank is at another table.
    """
    num_ranks = exchange.num_ranks
    own_rows = torch.tensor([[count, place] for count in counts], dtype=torch.int64, device=device)
    pairs = exchange.swap(own_rows.flatten(), [2] * num_ranks, [2] * num_ranks).view(num_ranks, 2).tolist()
    for rank, (_, other) in enumerate(pairs):
        if other != place:
            own_words, met = (_tell(number, names) for number in (place, other))
            rule = f"all ranks look up the same tables in the same order, this one {own_words}"
            raise LossError(f"{rule}, met rank {rank} {met}; nearest: tables=replicated")
    return [count for count, _ in pairs]


def _tell(place: int, names: Sequence[str]) -> str:
    return "at the end of forward" if place == END else f"in {names[place]}"
