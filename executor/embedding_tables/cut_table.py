"""One table of which every rank has a part: its rows are asked for, and their gradients sent back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwise.executor.embedding_tables.exchange import Exchange
from meshwise.executor.embedding_tables.tables import Part

Span = tuple[int, int]
"""The place of the first of some rows, and the one behind the last."""


class Lookup(NamedTuple):
    """Rows that this rank got of all ranks, whose gradients are still to be sent.

    Parameters
    ----------
    values
        The rows that this rank got; backward leaves their gradient.
    spans
        Which of them each rank has sent.
    rows, asked
        The rows of this rank's part that others got, rank by rank, and how many each of them did.
    """

    values: Tensor
    spans: tuple[Span, ...]
    rows: Tensor
    asked: tuple[int, ...]


class CutTable:
    """A table of which every rank has a part.

    Parameters
    ----------
    name
        The name of its module.
    parameter
        This rank's part.
    parts
        Those of all ranks.
    rank
        This rank.
    module
        The table when it was whole.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        parts: Sequence[Part],
        rank: int,
        module: nn.Embedding | nn.EmbeddingBag,
    ) -> None:
        self.name, self.parameter, self.parts, self.part = name, parameter, tuple(parts), parts[rank]
        self.num_rows, self.width = module.num_embeddings, module.embedding_dim
        self.padding, self.has_sparse_gradient = module.padding_idx, bool(module.sparse)
        self.needs_gradient = parameter.requires_grad
        self._index_dtype = torch.int32 if self.num_rows < 2**31 else torch.int64

    def require_rows(self, numbers: Tensor) -> None:
        """Raise ``IndexError`` where rows, by their numbers in order, are not in the table."""
        if len(numbers):
            least, most = int(numbers[0]), int(numbers[-1])
            if least < 0 or most >= self.num_rows:
                met = least if least < 0 else most
                raise IndexError(f"indices of {self.name} are 0 to {self.num_rows - 1}, met {met}")

    def find_spans(self, numbers: Tensor) -> tuple[Span, ...]:
        """Return which of some rows, by their numbers in order, each rank has."""
        edges = [edge for part in self.parts for edge in (part.first_row, part.end_row)]
        places = torch.searchsorted(numbers, numbers.new_tensor(edges)).tolist()
        return tuple(
            (first, end if part.width else first)
            for part, first, end in zip(self.parts, places[::2], places[1::2], strict=True)
        )

    def fetch(self, exchange: Exchange, numbers: Tensor, spans: tuple[Span, ...], asked: Sequence[int]) -> Lookup:
        """Return rows by their numbers in order, of which ranks have spans, while others ask for some of this rank."""
        wanted = [numbers[first:end] - part.first_row for part, (first, end) in zip(self.parts, spans, strict=True)]
        counts = [len(piece) for piece in wanted]
        rows = exchange.swap(torch.cat(wanted).to(self._index_dtype), counts, asked).long()
        own_rows = self.parameter.detach().index_select(0, rows)
        sizes = [count * part.width for part, count in zip(self.parts, counts, strict=True)]
        received = exchange.swap(own_rows.flatten(), [count * self.part.width for count in asked], sizes)
        values = own_rows.new_empty((len(numbers), self.width))
        for part, span, piece in zip(self.parts, spans, torch.split(received, sizes), strict=True):
            part.select(values, span).copy_(piece.view(-1, part.width) if part.width else piece[:, None])
        return Lookup(values, spans, rows, tuple(asked))

    def send_gradients(self, exchange: Exchange, lookups: Sequence[Lookup]) -> None:
        """Give this rank's part the mean over ranks of the gradients of some look-ups."""
        pieces = [
            torch.cat([part.select(_find_gradient(lookup), lookup.spans[rank]).flatten() for lookup in lookups])
            for rank, part in enumerate(self.parts)
        ]
        ranks = range(exchange.num_ranks)
        counts = [sum(lookup.asked[rank] for lookup in lookups) * self.part.width for rank in ranks]
        received = exchange.swap(torch.cat(pieces), [len(piece) for piece in pieces], counts)
        by_rank = [torch.split(lookup.rows, list(lookup.asked)) for lookup in lookups]
        rows = torch.cat([of_lookup[rank] for rank in ranks for of_lookup in by_rank])
        self._give_gradient(rows, received.view(len(rows), self.part.width) / exchange.num_ranks)

    def _give_gradient(self, rows: Tensor, gradients: Tensor) -> None:
        """Give this rank's part the gradients of rows, which may repeat, in the form that the optimizer gets."""
        if self.padding is not None:
            is_counted = rows != self.padding - self.part.first_row
            rows, gradients = rows[is_counted], gradients[is_counted]
        parameter = self.parameter
        if self.has_sparse_gradient:
            sparse = torch.sparse_coo_tensor(rows[None], gradients, parameter.shape, check_invariants=False)
            parameter.grad = sparse.coalesce()
        else:
            parameter.grad = torch.zeros_like(parameter).index_add_(0, rows, gradients)


def _find_gradient(lookup: Lookup) -> Tensor:
    """Return the gradient of what a rank looked up: zeros where it did not use it."""
    gradient = lookup.values.grad
    return torch.zeros_like(lookup.values) if gradient is None else gradient
