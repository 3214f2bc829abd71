"""Every table gets a place: defaults are written out, and whole tables balance devices."""

from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.tables.completion import complete_embeddings
from meshwise.strategies.tables.embeddings import Embeddings, TableCut, TablePlacement
from meshwise.strategies.tables.loads import count_loads
from meshwise.strategies.tables.table import Table

WHOLE = Embeddings(default=TablePlacement(TableCut.TABLE))
FIRST = Embeddings(default=TablePlacement(TableCut.TABLE, 0))


def build_tables(sizes: list[int]) -> tuple[Table, ...]:
    return tuple(Table(f"table_{i}", "embedding", f"bag_{i}", rows, 4, 1, 1) for i, rows in enumerate(sizes))


def test_the_largest_table_goes_first_where_the_least_is() -> None:
    value = complete_embeddings(build_tables([300, 900, 500, 400]), WHOLE, samples=2, ranks=2)
    # 900 on device 0; 500 and then 400 on device 1, which has 900 then; 300 on either, device 0 by its number
    assert [placement.device for _, placement in value.tables] == [0, 0, 1, 1]


def test_stated_devices_count_and_replicated_tables_are_left_out() -> None:
    stated = Embeddings((("table_0", TablePlacement(TableCut.TABLE, 0)), ("table_1", TablePlacement())), WHOLE.default)
    value = complete_embeddings(build_tables([900, 300, 500]), stated, samples=2, ranks=2)
    assert [(name, placement.device) for name, placement in value.tables] == [("table_0", 0), ("table_2", 1)]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 5))
def test_complete_placements_stay_and_no_device_has_a_table_too_many(sizes: list[int], ranks: int) -> None:
    tables = build_tables(sizes)
    value = complete_embeddings(tables, WHOLE, samples=ranks, ranks=ranks)
    assert complete_embeddings(tables, value, samples=ranks, ranks=ranks) == value
    loads = [load.device_bytes for load in count_loads(tables, value, ranks, ranks)]
    sizes_on_device = [count_loads((table,), FIRST, ranks, ranks)[0].device_bytes for table in tables]
    # longest first: no device has more than the mean and one table
    assert max(loads) <= sum(loads) / ranks + max(sizes_on_device) + 1e-6
