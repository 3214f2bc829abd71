"""How tables lie, in words and figures: every byte is somewhere, and the fullest rank is named."""

from meshwise.strategies.tables.embeddings import parse_embeddings
from meshwise.strategies.tables.loads import count_loads
from meshwise.strategies.tables.report import describe_tables
from meshwise.strategies.tables.table import Table

TABLES = tuple(
    Table(f"table_{i}", "embedding", f"bag_{i}", rows, 16, hots, 1, popularity=1.0)
    for i, (rows, hots) in enumerate(((100, 1), (900, 9), (400, 2)))
)
EMBEDDINGS = parse_embeddings(
    {
        "table_0": {"cut": "table", "device": 3},
        "table_1": "rows",
        "table_2": {"placement": "host", "cut": "table", "device": 1, "cache": 0.5},
    }
)


def test_rows_are_by_size_and_ranks_of_equal_loads_are_one() -> None:
    document = describe_tables(TABLES, EMBEDDINGS, 64, 4, 0)
    assert [(row["name"], row["placement"]) for row in document["tables"]] == [
        ("table_1", "rows"),
        ("table_2", "table on device 1 on hosts, 0.5 cached"),
        ("table_0", "table on device 3"),
    ]
    rates = [row["hit_rate"] for row in document["tables"]]
    assert rates[0] is rates[2] is None and 0.5 < rates[1] < 1
    assert [row["ranks"] for row in document["devices"]] == [[0, 2], [1], [3]]


def test_all_bytes_are_on_some_device_or_host() -> None:
    document = describe_tables(TABLES, EMBEDDINGS, 64, 4, 0)
    kept = sum(row["kept"] * len(row["ranks"]) for row in document["devices"])
    assert kept == (100 + 900 + 200) * (64 + 4)
    assert sum(row["on_host"] * len(row["ranks"]) for row in document["devices"]) == 400 * (64 + 4)


def test_the_fullest_and_the_busiest_rank_are_named() -> None:
    document = describe_tables(TABLES, EMBEDDINGS, 64, 4, 0)
    loads = count_loads(TABLES, EMBEDDINGS, 64, 4)
    kept, read = [x.parameters + x.states for x in loads], [x.forward + x.backward for x in loads]
    assert kept[document["most_memory"]] == max(kept) and document["most_memory"] == 1
    assert read[document["most_work"]] == max(read)
