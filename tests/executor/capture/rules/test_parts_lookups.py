"""Rows of tables: a sum over rows, so that a table may be cut along them, and places that are picked, which may not."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402


def test_a_table_is_summed_over_its_rows_and_keeps_the_numbers_alone() -> None:
    numbers = torch.randint(0, 10, (4, 6))
    found = operators_of(lambda x, w: functional.embedding(x, w), numbers, (10, 8))["embedding"]
    assert found.kind is OperatorKind.EMBEDDING
    assert found.reduced == ("vocab",) and found.uncut == () and found.saved == ("x",)
    assert dict(found.dims)["vocab"] == 10 and dict(found.dims)["hidden"] == 8


def test_places_that_a_list_names_are_a_dim_of_their_own() -> None:
    places = torch.tensor([2, 0, 1])
    found = operators_of(lambda x, w: (x * w).index_select(1, places), random(4, 6, 8), (8,))["index_select"]
    assert [size for dim, size in found.dims if dim not in ("batch", "features")] == [3]
    assert "sequence" not in dict(found.dims)  # all of it is read: no axis that cuts it is one of this operator
