"""Which tables of a user's module are cut over ranks, and which part of each a rank has.

A table is an ``nn.Embedding`` or ``nn.EmbeddingBag`` whose weight belongs to no other module. Small ones stay whole:
their gradients cost less to sum than their rows to look up on other ranks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshwise.executor.recording.rank_files import UserError
from meshwise.strategies.tables.embeddings import TableCut

FEWEST_ELEMENTS = 1024
"""Elements of a table that is cut, at least, unless its gradients are sparse."""
WEIGHT = "weight"


class TableError(UserError):
    """A module whose tables cannot be cut as a plan says."""


class Part(NamedTuple):
    """The rows and columns of a table that a rank has, from ``first`` on and without those from ``end`` on."""

    first_row: int
    end_row: int
    first_column: int
    end_column: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.end_column - self.first_column

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.end_row - self.first_row, self.width

    @property
    def offsets(self) -> tuple[int, int]:
        """The first row and the first column."""
        return self.first_row, self.first_column

    def select(self, rows: Tensor, span: tuple[int, int]) -> Tensor:
        """Return the columns that the rank has of some rows in a table of whole ones."""
        return rows[slice(*span), self.first_column : self.end_column]


class Table(NamedTuple):
    """A table of a module: the names of its weight, of which a module that is registered twice has two."""

    names: tuple[str, ...]
    module: nn.Embedding | nn.EmbeddingBag

    @property
    def num_elements(self) -> int:
        """Elements of the whole weight."""
        return self.module.num_embeddings * self.module.embedding_dim


def list_tables(module: nn.Module) -> list[Table]:
    """Return the tables of a module that are cut.

    Raises
    ------
    TableError
        Where there are none, or one has an option that a rank with a part of it cannot follow.

    >>> module = nn.ModuleDict({"users": nn.Embedding(100, 32), "days": nn.Embedding(7, 32)})
    >>> [table.names for table in list_tables(module)]
    [('users.weight',)]
    """
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(f"{name}.{WEIGHT}".lstrip("."))
    owners = Counter(id(parameter) for part in names for parameter in part.parameters(recurse=False))
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [Table(tuple(own), part) for part, own in names.items() if isinstance(part, kinds) and type(part) in kinds]
    large = [table for table in found if table.module.sparse or table.num_elements >= FEWEST_ELEMENTS]
    tables = [table for table in large if owners[id(table.module.weight)] == 1]
    if not tables:
        raise TableError(_tell_none(found, large))
    for table in tables:
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(table.module, option):
                rule = "tables: a look-up changes no rows, and gradients of a row are a sum"
                raise TableError(f"{rule}, met {option} of {_tell(table)}; nearest: tables=replicated")
    return tables


def _tell_none(found: Sequence[Table], large: Sequence[Table]) -> str:
    """Return why no table of a module is cut, in words."""
    rule = f"tables: an nn.Embedding or nn.EmbeddingBag has sparse gradients or {FEWEST_ELEMENTS:,} elements"
    if large:
        met = f"{_tell(large[0])}, whose weight another module has too"
    elif found:
        largest = max(found, key=lambda table: table.num_elements)
        met = f"{_tell(largest)} of {largest.num_elements:,}"
    else:
        met = "none in the module"
    return f"{rule}, and a weight of its own, met {met}; nearest: tables=replicated"


def _tell(table: Table) -> str:
    return table.names[0].removesuffix(f".{WEIGHT}")


def place_tables(tables: Sequence[Table], word: TableCut, num_ranks: int) -> list[tuple[Part, ...]]:
    """Return for every table the parts of all ranks.

    A table that is one rank's goes to the rank that has least of the larger tables.

    >>> module = nn.ModuleList([nn.Embedding(5, 400), nn.Embedding(9, 400), nn.Embedding(6, 400)])
    >>> [[part.sizes[0] for part in parts] for parts in place_tables(list_tables(module), TableCut.ROWS, 2)]
    [[2, 3], [4, 5], [3, 3]]
    >>> [[part.sizes[0] for part in parts] for parts in place_tables(list_tables(module), TableCut.TABLE, 2)]
    [[0, 5], [9, 0], [0, 6]]
    """
    if word is TableCut.TABLE:
        return _place_whole(tables, num_ranks)
    ranks = range(num_ranks)
    return [
        tuple(_cut_evenly(table.module, rank, num_ranks, is_by_rows=word is TableCut.ROWS) for rank in ranks)
        for table in tables
    ]


def _cut_evenly(module: Any, rank: int, num_ranks: int, *, is_by_rows: bool) -> Part:
    rows, columns = module.num_embeddings, module.embedding_dim
    if is_by_rows:
        return Part(rows * rank // num_ranks, rows * (rank + 1) // num_ranks, 0, columns)
    return Part(0, rows, columns * rank // num_ranks, columns * (rank + 1) // num_ranks)


def _place_whole(tables: Sequence[Table], num_ranks: int) -> list[tuple[Part, ...]]:
    loads = [0] * num_ranks
    owners = [0] * len(tables)
    for place in sorted(range(len(tables)), key=lambda place: -tables[place].num_elements):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += tables[place].num_elements
    return [
        tuple(
            Part(0, table.module.num_embeddings * (rank == owner), 0, table.module.embedding_dim)
            for rank in range(num_ranks)
        )
        for table, owner in zip(tables, owners, strict=True)
    ]


def describe_tables(tables: Sequence[Table], module: nn.Module, word: TableCut) -> str:
    """Return which tables are cut and how, in words.

    >>> module = nn.ModuleDict({"users": nn.Embedding(100, 32), "days": nn.Embedding(7, 32)})
    >>> describe_tables(list_tables(module), module, TableCut.ROWS)
    '1 table cut by rows (3,200 elements); 1 small or shared table whole on every rank'
    """
    elements = sum(table.num_elements for table in tables)
    how = "each on one rank" if word is TableCut.TABLE else f"cut by {word}"
    text = f"{len(tables)} table{'s' * (len(tables) > 1)} {how} ({elements:,} elements)"
    others = sum(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules()) - len(tables)
    whole = f"{others} small or shared table{'s' * (others > 1)} whole on every rank"
    return f"{text}; {whole}" if others else text
