"""Abstract tasks as they are collected: equal slots are one, and edges come in the order of who waits."""

import numpy as np

from meshwise.simulator.program import StreamKind
from meshwise.strategies.lowering.tasks.skeleton import RANK, Site, TaskList

COMPUTE = ((0, StreamKind.COMPUTE),)


def test_microbatches_of_one_slot_share_it() -> None:
    tasks = TaskList()
    first = tasks.add_task(Site(RANK, 0), "pass", (0,), COMPUTE, 0, [])
    second = tasks.add_task(Site(RANK, 0), "pass", (0,), COMPUTE, 1, [(first, 0), (None, 0)])
    third = tasks.add_task(Site(RANK, 1), "pass", (0,), COMPUTE, 1, [(second, 0)])
    found = tasks.build_skeleton()
    assert (first, second, third) == (0, 1, 2)
    assert found.template_of.tolist() == [0, 0, 1] and len(found.templates) == 2
    assert found.microbatch_of.tolist() == [0, 1, 1]
    assert list(zip(found.edge_sources, found.edge_targets, found.edge_positions, strict=True)) == [
        (0, 1, 0),
        (1, 2, 0),
    ]


def test_edges_of_passes_alike_are_those_of_each_pass() -> None:
    one, many = TaskList(), TaskList()
    slot = one.number_template(Site(RANK, 0), "pass", (0,), COMPUTE)
    assert slot == many.number_template(Site(RANK, 0), "pass", (0,), COMPUTE) == 0
    for start in (0, 3):
        for offset in range(3):
            one.append_task(slot, start, [(start + offset - 1, 7)] if offset else [])
        many.append_tasks([slot] * 3, start)
    many.repeated_edges.append((np.array([(0, 1, 7), (1, 2, 7)]), [0, 3]))
    left, right = one.build_skeleton(), many.build_skeleton()
    for name in ("template_of", "microbatch_of", "edge_sources", "edge_targets", "edge_positions"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
