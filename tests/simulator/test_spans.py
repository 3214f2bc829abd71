"""Spans as columns: the same spans, what a window shows of them, and how long ranks are busy with some."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Occupancy, Span, cut_columns, to_columns


def span(rank_class: int, start: int, end: int, kind: TaskKind = TaskKind.FORWARD) -> Span:
    return Span(rank_class, StreamKind.COMPUTE, kind, 0, 1, f"{kind.value} operator", start, end, 8.0)


TIMES = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)
SPANS = st.lists(st.builds(lambda c, t: span(c, *t), st.integers(0, 2), TIMES), min_size=1, max_size=8)


@given(SPANS)
def test_columns_are_the_spans(spans: list[Span]) -> None:
    assert to_columns(spans).to_spans() == tuple(spans)
    columns = to_columns(spans)
    assert [columns.select(np.array([row])).to_spans()[0] for row in range(len(spans))] == spans


def test_a_window_begins_at_nothing_and_cuts_what_crosses_its_ends() -> None:
    spans = [span(0, 0, 4), span(0, 4, 10), span(0, 2, 20), span(0, 10, 12)]
    shown = cut_columns(to_columns(spans), 3, 10).to_spans()
    assert [(each.start, each.end) for each in shown] == [(0, 1), (1, 7), (0, 7)]


@given(SPANS)
def test_a_rank_is_busy_in_every_unit_of_time_in_which_something_runs(spans: list[Span]) -> None:
    expected = [len({t for s in spans if s.rank_class == c for t in range(int(s.start), int(s.end))}) for c in range(3)]
    busy = Occupancy(to_columns(spans), 3).seconds(np.ones(len(spans), bool))
    assert busy.tolist() == expected


def test_what_is_not_chosen_does_not_count() -> None:
    spans = [span(0, 0, 4), span(0, 2, 9, TaskKind.BACKWARD), span(1, 1, 2)]
    columns = to_columns(spans)
    assert Occupancy(columns, 2).seconds(np.array([True, False, True])).tolist() == [4, 1]
