"""What users say of tables: documents and values are two forms of one thing, and wrong words get a message."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.tables.embeddings import (
    NO_EMBEDDINGS,
    REPLICATED_TABLE,
    TABLE_OPTIMIZERS,
    Embeddings,
    EmbeddingsError,
    TableCut,
    TablePlacement,
    parse_embeddings,
)

shared_cuts = st.sampled_from((TableCut.ROWS, TableCut.COLUMNS))
local_cuts = st.sampled_from((TableCut.TABLE, TableCut.NODE_ROWS))
placements = st.one_of(
    st.sampled_from((REPLICATED_TABLE, TablePlacement(TableCut.SPARSE))),
    st.builds(TablePlacement, shared_cuts, cache=st.none() | st.floats(0, 1)),
    st.builds(TablePlacement, local_cuts, st.none() | st.integers(0, 9), st.none() | st.floats(0, 1)),
)
names = st.integers(0, 5).map("table_{}".format)
values = st.builds(
    Embeddings,
    st.dictionaries(names, placements, max_size=4).map(lambda row: tuple(row.items())),
    placements,
    st.sampled_from(list(TABLE_OPTIMIZERS)),
    st.booleans(),
)


@given(values)
def test_documents_say_all_of_what_is_shared(value: Embeddings) -> None:
    assert parse_embeddings(value.document) == (value if value else NO_EMBEDDINGS)


def test_a_word_is_for_all_tables() -> None:
    assert parse_embeddings("columns") == parse_embeddings({"default": "columns"})
    assert parse_embeddings({"default": "host"}).default == TablePlacement(TableCut.ROWS, cache=0.0)
    assert not parse_embeddings("replicated") and not parse_embeddings({})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (7, "is a word or a mapping from tables to placements, met 7"),
        ("row", "is one of .*rows.*, met 'row'; nearest: rows"),
        ({"table_1": 3}, "table_1 is a word or holds cut, device, placement, cache, met 3; nearest: rows"),
        ({"table_1": {"place": "host"}}, "table_1: place is none of cut, device, placement, cache; nearest: placement"),
        ({"table_1": {"placement": "disk"}}, "table_1: placement is device or host, met 'disk'; nearest: device"),
        ({"table_1": {"cache": 0.1}}, "table_1: cache is of a table with placement: host, met 0.1"),
        ({"t": {"placement": "host", "cache": 1.5}}, "t: cache is at least 0 and at most 1, met 1.5; nearest: 1.0"),
        ({"t": {"placement": "host", "cache": True}}, "t: cache is a fraction of the rows, met True"),
        ({"t": {"cut": "rows", "device": 1}}, "t: device is that of cut: table or node_rows, met cut: rows; nearest"),
        ({"t": {"cut": "table", "device": -1}}, "t: device is at least 0, met -1; nearest: 0"),
        ({"t": {"cut": "sparse", "placement": "host"}}, "t: cut of a table on hosts is .*, met sparse; nearest: rows"),
        ({"optimizer": "adamw"}, "optimizer is one of rowwise_adagrad, .*, met adamw; nearest: adam"),
        ({"pipelined": 1}, "pipelined is true or false, met 1; nearest: true"),
    ],
)
def test_wrong_documents_get_one_message(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_embeddings(document)


def test_all_faults_are_told_at_once() -> None:
    document = {
        "table_1": {"cut": "rows", "device": -1, "cache": 2},
        "table_2": {"cut": "sparse", "placement": "host", "cache": 1.5, "place": 1},
        "table_3": "row",
        "optimizer": "adamw",
        "pipelined": 1,
    }
    with pytest.raises(EmbeddingsError) as caught:
        parse_embeddings(document)
    assert [fault.path for fault in caught.value.faults] == [
        ("optimizer",),
        ("pipelined",),
        ("table_1", "cache"),
        ("table_1", "device"),
        ("table_1", "device"),
        ("table_2", "place"),
        ("table_2", "cache"),
        ("table_2", "cut"),
        ("table_3",),
    ]


def test_a_device_of_rows_of_a_node_stands_for_its_node() -> None:
    assert str(TablePlacement(TableCut.NODE_ROWS, device=8)) == "node_rows on the node of device 8"
    assert str(TablePlacement(TableCut.TABLE, device=8)) == "table on device 8"
