"""Which tables of a module are cut, and what parts of them ranks have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.embedding_tables.tables import Table, TableError, list_tables, place_tables
from meshwise.strategies.tables.embeddings import TableCut

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=5)
words = st.sampled_from((TableCut.ROWS, TableCut.TABLE, TableCut.COLUMNS))


@given(sizes=sizes, word=words, num_ranks=st.integers(1, 5))
def test_parts_are_the_whole_table_once(sizes: list[tuple[int, int]], word: TableCut, num_ranks: int) -> None:
    tables = [Table((f"{place}.weight",), nn.Embedding(*size)) for place, size in enumerate(sizes)]
    for (rows, columns), parts in zip(sizes, place_tables(tables, word, num_ranks), strict=True):
        counts = torch.zeros(rows, columns)
        for part in parts:
            part.select(counts, (part.first_row, part.end_row)).add_(1)
        assert bool((counts == 1).all())


@given(sizes=sizes, num_ranks=st.integers(1, 5))
def test_whole_tables_lie_as_evenly_as_the_largest_allows(sizes: list[tuple[int, int]], num_ranks: int) -> None:
    tables = [Table((f"{place}.weight",), nn.Embedding(*size)) for place, size in enumerate(sizes)]
    places = place_tables(tables, TableCut.TABLE, num_ranks)
    loads = [sum(parts[rank].sizes[0] * parts[rank].sizes[1] for parts in places) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(rows * columns for rows, columns in sizes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
        self.head.weight = self.words.weight


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Linear(2, 2), "met none in the module"),
        (nn.ModuleDict({"day": nn.Embedding(7, 8), "hour": nn.Embedding(24, 8)}), "met hour of 192"),
        (Tied(), "met words, whose weight another module has too"),
        (nn.ModuleDict({"words": Scaled(100, 16)}), "met none in the module"),
        (nn.ModuleDict({"a": nn.Embedding(100, 16, max_norm=1.0)}), "met max_norm of a; nearest"),
        (nn.ModuleDict({"a": nn.EmbeddingBag(100, 16, scale_grad_by_freq=True)}), "met scale_grad_by_freq of a"),
    ],
)
def test_modules_without_a_table_that_can_be_cut_are_refused(module: nn.Module, text: str) -> None:
    with pytest.raises(TableError, match=text):
        list_tables(module)


def test_small_tables_with_sparse_gradients_and_those_of_two_names_are_cut() -> None:
    shared = nn.EmbeddingBag(3, 2, sparse=True)
    module = nn.ModuleDict({"first": shared, "second": nn.ModuleDict({"again": shared})})
    (table,) = list_tables(module)
    assert table.names == ("first.weight", "second.again.weight")
