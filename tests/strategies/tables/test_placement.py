"""Placements of tables: the program is brute force on small cases, and never worse than greedy."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.tables.embeddings import TableCut, TablePlacement
from meshwise.strategies.tables.loads import TableSharing
from meshwise.strategies.tables.placement import (
    PlacementProblem,
    Rates,
    place_greedily,
    place_largest_on_hosts,
    place_tables,
)
from meshwise.strategies.tables.table import Table

RATES = Rates(memory=1e-12, host=1e-10, exchange=1e-11, reduction=2e-11, dense=1e-11, dense_bytes=16.0)


@st.composite
def problems(draw: st.DrawFn, most_tables: int = 3, most_ranks: int = 4) -> PlacementProblem:
    ranks = draw(st.integers(1, most_ranks))
    tables = tuple(
        Table(
            f"table_{index}",
            "embedding",
            f"bag_{index}",
            draw(st.integers(1, 10**6)),
            draw(st.sampled_from((4, 12, 64, 192))),
            draw(st.integers(1, 50)),
            1,
            popularity=draw(st.sampled_from((0.0, 0.8, 1.2))),
        )
        for index in range(draw(st.integers(1, most_tables)))
    )
    weight = sum(table.nbytes for table in tables)
    has_nodes = ranks % 2 == 0 and ranks > 2 and draw(st.booleans())
    hosts = tuple(rank * 2 // ranks for rank in range(ranks)) if has_nodes or draw(st.booleans()) else (0,) * ranks
    rates = Rates(*(10.0 ** draw(st.integers(-12, -9)) for _ in range(5)), dense_bytes=16.0, node_reduction=1e-12)
    room = weight * draw(st.sampled_from((0.1, 0.5, 1.5, 20.0))) + 10**6
    host_room = weight * draw(st.sampled_from((0.0, 0.5, 2.0)))
    sharing = TableSharing(64 * ranks, ranks, "rowwise_adagrad", ranks // 2 if has_nodes else 0)
    return PlacementProblem(tables, sharing, hosts, rates, room, host_room)


@settings(deadline=None)
@given(problems())
def test_the_program_finds_what_brute_force_finds(problem: PlacementProblem) -> None:
    choices = product(*(range(len(row)) for row in problem.options))
    least = min((problem.find_slowest(choice) for choice in choices if problem.fits(choice)), default=None)
    placed = place_tables(problem, gap=1e-6)
    if least is None:
        assert placed is None
        return
    assert placed is not None and problem.fits(placed.choice)
    assert placed.seconds == pytest.approx(least, rel=1e-5)
    assert placed.bound <= least * (1 + 1e-9)
    assert placed.gap is not None and placed.gap < 1e-4


@settings(deadline=None, max_examples=20)
@given(problems(most_tables=12, most_ranks=6))
def test_the_program_is_never_worse_than_greedy(problem: PlacementProblem) -> None:
    greedy, placed = place_greedily(problem), place_tables(problem, max_nodes=50)
    if greedy is not None:
        assert problem.fits(greedy.choice)
        assert placed is not None and placed.seconds <= greedy.seconds
        assert placed.bound <= placed.seconds


def test_greedy_can_be_worse() -> None:
    # two tables of 3 and three of 2 on 2 devices: largest first is 3 + 2 + 2 against 3 + 2, best is 3 + 3 against 6
    sizes = (3, 3, 2, 2, 2)
    tables = tuple(Table(f"table_{i}", "embedding", f"bag_{i}", 10**6, 7, size, 1) for i, size in enumerate(sizes))
    dear = RATES._replace(reduction=1.0, dense=1.0)
    problem = PlacementProblem(tables, TableSharing(1000, 2, "sgd"), (0, 0), dear, 1e12, 0.0)
    greedy, placed = place_greedily(problem), place_tables(problem)
    assert greedy is not None and placed is not None
    assert placed.seconds < greedy.seconds
    cuts = {placement.cut for _, placement in problem.build_embeddings(placed.choice).tables}
    assert cuts == {TableCut.TABLE}


def test_hosts_take_what_devices_cannot() -> None:
    table = Table("table_0", "embedding", "bag_0", 10**6, 16, 4, 1, popularity=1.1)
    for room, is_on_host in ((10**9, False), (10**7, True)):
        problem = PlacementProblem((table,), TableSharing(64, 2, "sgd"), (0, 0), RATES, room, 1e12)
        placed = place_tables(problem)
        assert placed is not None
        ((_, placement),) = problem.build_embeddings(placed.choice).tables
        assert (placement.cache is not None) is is_on_host


@settings(max_examples=40, deadline=None)
@given(problems())
def test_as_few_of_the_largest_as_must_be_are_on_hosts(problem: PlacementProblem) -> None:
    placed = place_largest_on_hosts(problem, TableCut.ROWS)
    if placed is None:
        return
    assert problem.fits(placed.choice)
    rows = zip(problem.tables, problem.options, placed.choice, strict=True)
    by_size = sorted(rows, key=lambda row: -row[0].nbytes)
    is_on_host = [options[index].placement.cache is not None for _, options, index in by_size]
    assert is_on_host == sorted(is_on_host, reverse=True)  # the largest ones
    if any(is_on_host):
        last = max(place for place, on_host in enumerate(is_on_host) if on_host)
        name = by_size[last][0].name
        fewer = [
            [option.placement for option in options].index(TablePlacement(TableCut.ROWS))
            if table.name == name
            else index
            for table, options, index in zip(problem.tables, problem.options, placed.choice, strict=True)
        ]
        assert not problem.fits(fewer)
