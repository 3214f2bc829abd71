"""Links on which flows never meet, or which never hold them up, can be left out without changing an end."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.flows import build_bundle_table, find_narrow_rows
from meshwise.simulator.engine.step_graph import compile_program

from ..programs import LINKS as PROGRAM_LINKS
from ..programs import Task, TaskKind, program
from .fluid import LINKS, TICKS, Transfer, capacities, ends_of, transfers


@settings(max_examples=1000, deadline=None)
@given(transfers, capacities, st.permutations(range(LINKS)))
def test_links_beside_narrower_ones_of_the_same_flows_change_no_end(
    moved: list[Transfer], capacity: list[int], twins: list[int]
) -> None:
    # every link twice, the second as wide as any other
    usages = [tuple((way + LINKS * copy, size) for way, size in flow.usage for copy in (0, 1)) for flow in moved]
    widths = [*capacity, *(capacity[twin] for twin in twins)]
    columns = build_bundle_table(usages, [0.0] * len(usages), widths, TICKS)
    rows = find_narrow_rows(columns, np.full(2 * LINKS, True), widths)
    assert rows.sum() <= len(rows) / 2
    starts = [flow.start for flow in moved]
    whole, narrow = columns.to_bundles(np.full(len(rows), True)), columns.to_bundles(rows)
    assert ends_of(widths, list(zip(starts, narrow, strict=True))) == ends_of(
        widths, list(zip(starts, whole, strict=True))
    )


def test_a_graph_has_only_the_links_where_flows_can_meet() -> None:
    # link 0 is used by both streams; links 1 and 2 by one each
    usages = [((0, 1.0), (1, 1.0)), ((0, 1.0), (2, 1.0))]
    tasks = [Task(TaskKind.FORWARD, (stream,), 5, (), usage) for stream, usage in enumerate(usages)]
    graph = compile_program(program(tasks, 2))
    assert len(PROGRAM_LINKS) == 3
    assert [shape.shares for shape in graph.bundles] == [((0, 1.0),), ((0, 1.0),)]
