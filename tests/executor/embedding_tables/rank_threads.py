"""Ranks that are threads of one process, which exchange parts of vectors by memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwise.executor.embedding_tables.cutting import cut_tables
from meshwise.executor.embedding_tables.lookups import TableLookups
from meshwise.executor.embedding_tables.tables import Table, place_tables
from meshwise.strategies.tables.embeddings import TableCut

Result = TypeVar("Result")


class Shared:
    """What all threads of a run see, and what they have sent."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.slots = Barrier(num_ranks, timeout=20.0), [None] * num_ranks
        self.messages: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]


class ThreadExchange:
    """An exchange of one rank; ``messages`` are the dtype and the bytes of what it sends to others."""

    def __init__(self, rank: int, num_ranks: int, shared: Shared) -> None:
        self.rank, self.num_ranks, self.shared = rank, num_ranks, shared

    def _put(self, value: Any) -> list[Any]:
        self.shared.slots[self.rank] = value
        self.shared.barrier.wait()
        values = list(self.shared.slots)
        self.shared.barrier.wait()
        return values

    def swap(self, vector: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        parts = vector.split(list(sent))
        assert len(vector) == sum(sent)
        result = [row[self.rank] for row in self._put(parts)]
        assert [len(part) for part in result] == list(received)
        others = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self.shared.messages[self.rank].append((str(vector.dtype).removeprefix("torch."), others))
        return torch.cat(result)

    def find_any(self, flags: Sequence[bool]) -> list[bool]:
        return [any(column) for column in zip(*self._put(list(flags)), strict=True)]


def run_threads(num_ranks: int, run: Callable[[int, ThreadExchange], Result]) -> tuple[list[Result], Shared]:
    """Return what a function of rank and exchange returns on every rank, and what they have sent."""
    shared = Shared(num_ranks)

    def run_rank(rank: int) -> Result:
        try:
            return run(rank, ThreadExchange(rank, num_ranks, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(num_ranks)]
        return [future.result() for future in futures], shared


def cut_copy(module: Any, word: TableCut, exchange: ThreadExchange) -> tuple[Any, TableLookups]:
    """Return a copy of a table, of which a rank has its part, and what looks rows up in it."""
    copy = type(module).from_pretrained(
        module.weight.detach().clone(),
        freeze=False,
        padding_idx=module.padding_idx,
        sparse=module.sparse,
        **({"mode": module.mode} if isinstance(module, nn.EmbeddingBag) else {}),
    )
    tables = [Table(("table.weight",), copy)]
    places = place_tables(tables, word, exchange.num_ranks)
    return copy, cut_tables(tables, places, exchange, torch.device("cpu"))
