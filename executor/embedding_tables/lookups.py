"""Look-ups of a module in tables of which every rank has a part.

A rank asks each row that its samples need of the ranks that have it, once, however often they need it, and makes a
small table of what comes back. In that it looks up and pools as torch does in the whole one, so that bags of any
length, weights, modes and padding are what they are without a cut. Backward leaves a gradient of the small table, which
goes back the way of its rows after the last backward of a step: a rank's rows then have gradients of the samples of all
ranks. So a backward has no messages of look-ups, and ranks may use what they looked up or not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.executor.embedding_tables.cut_table import CutTable, Lookup
from meshwise.executor.embedding_tables.exchange import END, Exchange, meet
from meshwise.executor.embedding_tables.tables import WEIGHT, TableError


class WholeTableError(RuntimeError):
    """A line of the user's that reads a whole table, of which a rank has a part."""


class SmallTable(NamedTuple):
    """Rows that a rank has looked up, in the order of their numbers.

    Parameters
    ----------
    values
        The rows.
    places
        Which of them each index is.
    padding
        Which of them has no gradient; ``None`` where there is none such.
    """

    values: Tensor
    places: Tensor
    padding: int | None


class TableLookups:
    """All look-ups in the cut tables of a module, whose gradients are sent once a step."""

    def __init__(self, tables: Sequence[CutTable], exchange: Exchange, device: torch.device) -> None:
        self.tables, self.exchange, self.device = tuple(tables), exchange, device
        self.is_guarded = False
        self._names = [table.name for table in tables]
        self._pending: list[tuple[int, Lookup]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages, whose sizes depend on data
    def look_up(self, place: int, indices: Tensor) -> SmallTable:
        """Return the rows of some indices of a table, which all ranks look up together, each its own ones.

        Raises
        ------
        IndexError
            Where an index is none of the table.
        LossError
            Where other ranks are elsewhere.
        """
        table = self.tables[place]
        numbers, places = torch.unique(indices.detach().long(), return_inverse=True)
        table.require_rows(numbers)
        spans = table.find_spans(numbers)
        asked = meet(self.exchange, place, [end - first for first, end in spans], self._names, self.device)
        lookup = table.fetch(self.exchange, numbers, spans, asked)
        if table.needs_gradient and torch.is_grad_enabled():
            lookup.values.requires_grad_()
            self._pending.append((place, lookup))
        return SmallTable(lookup.values, places.view(indices.shape), _find_padding(numbers, table.padding))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_forward(self, *_: Any) -> None:
        """Have all ranks meet at the end of a forward; `LossError` where another one still looks up."""
        meet(self.exchange, END, [0] * self.exchange.num_ranks, self._names, self.device)

    def forget(self) -> None:
        """Forget look-ups that are of no step."""
        self._pending.clear()

    def send_gradients(self) -> None:
        """Give the parts of this rank the gradients of a step, means over ranks; it is a collective.

        Tables whose rows no rank has used have none.

        Raises
        ------
        TableError
            Where the module has used a part otherwise than by a look-up.
        """
        for table in self.tables:
            if table.parameter.grad is not None:
                raise TableError(_tell_direct(table.name))
        pending, self._pending = self._pending, []
        if not pending:
            return
        are_used = self.exchange.find_any([lookup.values.grad is not None for _, lookup in pending])
        for place, table in enumerate(self.tables):
            used = [
                item for (other, item), is_used in zip(pending, are_used, strict=True) if is_used and other == place
            ]
            if used:
                table.send_gradients(self.exchange, used)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Refuse reading a table otherwise than by a look-up in the body."""
        former, self.is_guarded = self.is_guarded, True
        try:
            yield
        finally:
            self.is_guarded = former

    def read_weight(self, place: int) -> nn.Parameter:
        """Return this rank's part of a table, for optimizers; `WholeTableError` where a module reads it."""
        if self.is_guarded:
            raise WholeTableError(_tell_direct(self.tables[place].name))
        return self.tables[place].parameter


def _find_padding(numbers: Tensor, padding: int | None) -> int | None:
    """Return the place of a row among some rows, by their numbers in order; ``None`` where it is not there."""
    if padding is None:
        return None
    place = int(torch.searchsorted(numbers, padding))
    return place if place < len(numbers) and int(numbers[place]) == padding else None


def _tell_direct(name: str) -> str:
    rule = "a table of which ranks have parts is read by its indices alone"
    return (
        f"tables: {rule}, met its whole weight in use, {name}.{WEIGHT}; nearest: tables=replicated, or {name}(indices)"
    )


class CutEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose rows are looked up on the ranks that have them."""

    lookups: TableLookups
    place: int

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """This rank's part."""
        return self.lookups.read_weight(self.place)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of some indices."""
        values, places, padding = self.lookups.look_up(self.place, input)
        return F.embedding(places, values, padding)


class CutEmbeddingBag(nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` whose rows are looked up on the ranks that have them."""

    lookups: TableLookups
    place: int

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """This rank's part."""
        return self.lookups.read_weight(self.place)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the pooled rows of every bag."""
        values, places, padding = self.lookups.look_up(self.place, input)
        return F.embedding_bag(
            places,
            values,
            offsets if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


CLASSES = {nn.Embedding: CutEmbedding, nn.EmbeddingBag: CutEmbeddingBag}


def connect(module: nn.Module, lookups: TableLookups, place: int) -> None:
    """Have a table of a module be one that is looked up on all ranks."""
    own_class: Any = CLASSES[type(module)]
    module.__class__ = own_class
    vars(module).update(lookups=lookups, place=place)
