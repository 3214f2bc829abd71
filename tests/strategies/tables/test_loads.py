"""Bytes of tables by hand: what every cut keeps, reads and exchanges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.tables.embeddings import Embeddings, TableCut, TablePlacement
from meshwise.strategies.tables.loads import (
    NO_LOAD,
    TableLoad,
    TableSharing,
    add_loads,
    count_load,
    count_loads,
    find_bytes,
    find_hit_rate,
    find_work,
)
from meshwise.strategies.tables.popularity import expect_distinct
from meshwise.strategies.tables.table import Table

BAG = Table("bag", "embedding", "look_up", rows=1000, width=16, lookups=5, vectors=1)
"""Rows of 16 fp32, 64 bytes; a sample sums 5 of them."""
SHARING = TableSharing(samples=80, ranks=4, optimizer="rowwise_adagrad")
DISTINCT = expect_distinct(1000, 0.0, 400)
"""Rows that the 80 * 5 = 400 look-ups find: 1000 * (1 - 0.999**400) = 329.8."""


# memory moves sectors of 32 bytes: 64 for a row, 32 for a part of 16 bytes and for the 4 bytes of a state;
# kernels are as slow on rows of 16 elements as if they moved 1.75 times as much


def test_a_whole_table_gets_all_indices_and_sends_all_vectors() -> None:
    assert count_load(BAG, TablePlacement(TableCut.TABLE), SHARING) == TableLoad(
        parameters=1000 * 64,
        states=1000 * 4,
        forward=1.75 * (400 * 64 + 80 * 64),
        backward=pytest.approx(1.75 * (400 * 64 + 2 * DISTINCT * (64 + 32))),
        sent_indices=20 * 5 * 8,
        received_indices=80 * 5 * 8,
        vectors=80 * 64,
    )


def test_rows_are_shared_and_their_vectors_are_partial_sums() -> None:
    assert count_load(BAG, TablePlacement(TableCut.ROWS), SHARING) == TableLoad(
        parameters=250 * 64,
        states=250 * 4,
        forward=1.75 * (100 * 64 + 80 * 64),
        backward=pytest.approx(1.75 * (100 * 64 + 2 * DISTINCT / 4 * (64 + 32))),
        sent_indices=20 * 5 * 8,
        received_indices=20 * 5 * 8,
        partial_sums=80 * 64,
    )


def test_rows_of_a_node_are_summed_there_before_they_are_exchanged() -> None:
    # 2 ranks of a node have halves: 200 look-ups each, sums of 80 vectors, and 40 of them to send
    sharing = SHARING._replace(node_ranks=2)
    assert count_load(BAG, TablePlacement(TableCut.NODE_ROWS, 2), sharing) == TableLoad(
        parameters=500 * 64,
        states=500 * 4,
        forward=1.75 * (200 * 64 + 80 * 64),
        backward=pytest.approx(1.75 * (200 * 64 + 2 * DISTINCT / 2 * (64 + 32))),
        sent_indices=20 * 5 * 8,
        received_indices=40 * 5 * 8,
        vectors=40 * 64,
        node_sums=80 * 64,
    )
    loads = count_loads((BAG,), Embeddings((("bag", TablePlacement(TableCut.NODE_ROWS, 3)),)), 80, 4, 2)
    assert [load.parameters for load in loads] == [0, 0, 500 * 64, 500 * 64]


def test_columns_need_all_indices_everywhere_and_a_state_a_row_each() -> None:
    assert count_load(BAG, TablePlacement(TableCut.COLUMNS), SHARING) == TableLoad(
        parameters=1000 * 16,
        states=1000 * 4,
        forward=1.75 * (400 * 32 + 80 * 16),
        backward=pytest.approx(1.75 * (400 * 16 + 2 * DISTINCT * (32 + 32))),
        sent_indices=20 * 5 * 8 * 4,
        received_indices=80 * 5 * 8,
        vectors=80 * 16,
    )


def test_sparse_gradients_of_a_replica_are_gathered_with_their_indices() -> None:
    assert count_load(BAG, TablePlacement(TableCut.SPARSE), SHARING) == TableLoad(
        parameters=1000 * 64,
        states=1000 * 4,
        forward=1.75 * (100 * 64 + 20 * 64),
        backward=pytest.approx(1.75 * (400 * 64 + 2 * DISTINCT * (64 + 32))),
        gradients=400 * (64 + 8),
    )


def test_wide_rows_are_looked_up_at_full_speed() -> None:
    for width, factor in ((256, 1.0), (128, 1.0), (96, 1.15), (64, 1.15), (60, 1.75)):
        table = Table("bag", "embedding", "look_up", 1000, width, 5, 1)
        load = count_load(table, TablePlacement(TableCut.TABLE), SHARING)
        sectors = -(-width * 4 // 32) * 32
        assert load.forward == pytest.approx(factor * (400 * sectors + 80 * width * 4))


def test_a_replicated_table_is_none_of_these() -> None:
    assert count_load(BAG, TablePlacement(), SHARING) == NO_LOAD


def test_adam_keeps_two_moments_of_every_element() -> None:
    load = count_load(BAG, TablePlacement(TableCut.TABLE), SHARING._replace(optimizer="adam"))
    assert load.states == 1000 * 16 * 8


@given(st.sampled_from((TableCut.TABLE, TableCut.ROWS, TableCut.COLUMNS)), st.floats(0, 1.5), st.floats(0, 1))
def test_a_cache_lies_between_hosts_and_devices(cut: TableCut, popularity: float, cache: float) -> None:
    table = Table("bag", "embedding", "look_up", 1000, 16, 5, 1, popularity=popularity)
    on_device = count_load(table, TablePlacement(cut), SHARING)
    load = count_load(table, TablePlacement(cut, cache=cache), SHARING)
    uncached, whole = (count_load(table, TablePlacement(cut, cache=share), SHARING) for share in (0.0, 1.0))
    # a cache of all rows is the table on the device, with a copy on the host; without one, all rows move
    assert whole._replace(host_parameters=0.0, host_states=0.0) == on_device
    assert uncached.parameters == uncached.states == 0
    assert 0 == whole.host_copies <= load.host_copies <= uncached.host_copies
    assert (load.host_parameters, load.host_states) == (on_device.parameters, on_device.states)
    assert load.forward == on_device.forward and load.backward == on_device.backward


def test_popular_rows_are_found_in_small_caches() -> None:
    table = Table("bag", "embedding", "look_up", 4, 16, 5, 1, popularity=1.0)
    # H(1) / H(4) = 1 / (1 + 1/2 + 1/3 + 1/4) = 12 / 25
    assert find_hit_rate(table, TablePlacement(TableCut.ROWS, cache=0.25)) == pytest.approx(12 / 25)


def test_ranks_have_the_tables_that_they_are_given() -> None:
    other = Table("other", "embedding", "look_up_other", 500, 16, 1, 1)
    value = Embeddings((("bag", TablePlacement(TableCut.TABLE, 2)), ("other", TablePlacement(TableCut.ROWS))))
    loads = count_loads((BAG, other), value, 80, 4)
    assert [load.parameters for load in loads] == [125 * 64, 125 * 64, 125 * 64 + 1000 * 64, 125 * 64]
    # every rank sends 20 * (5 + 1) indices; the owner receives 80 * 5 of the whole table, and 20 of the other
    assert [load.sent_indices for load in loads] == [20 * 6 * 8] * 4
    assert [load.received_indices for load in loads] == [160, 160, 3360, 160]
    work = find_work(loads, 4)
    assert (work.indices, work.vectors, work.partial_sums) == (3360, 80 * 64, 80 * 64)


def test_one_rank_exchanges_nothing_however_its_tables_are_cut() -> None:
    alone = [
        find_work(count_loads((BAG,), Embeddings(default=TablePlacement(cut, device)), 80, 1), 1)
        for cut, device in (
            (TableCut.TABLE, 0),
            (TableCut.ROWS, None),
            (TableCut.COLUMNS, None),
            (TableCut.SPARSE, None),
        )
    ]
    assert alone[0].indices == alone[0].vectors == 0
    assert alone == alone[:1] * 4


def test_the_fullest_device_and_the_fullest_host_count() -> None:
    loads = [TableLoad(parameters=10.0), TableLoad(parameters=30.0, host_states=4.0), TableLoad(host_parameters=6.0)]
    # hosts 0 and 1 have two ranks and one: 4 bytes on two ranks, 6 on one
    assert find_bytes(loads, (0, 0, 1), pipelined=False)[:5] == (30, 0, 0, 6, 0)


def test_the_next_microbatch_is_there_too_where_it_is_pipelined() -> None:
    load = TableLoad(received_indices=3.0, host_copies=5.0, vectors=7.0)
    assert find_bytes([load], (0,), pipelined=True).buffers == 2 * (3 + 5) + 7


def test_loads_add_up() -> None:
    assert add_loads([]) == NO_LOAD
    load = count_load(BAG, TablePlacement(TableCut.ROWS), SHARING)
    assert add_loads([load, load]) == TableLoad(*(2 * field for field in load))
