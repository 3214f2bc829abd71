"""Which transfers others can disturb, and which never meet another on any link."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.network import Bundle
from simulator.program import IntArray, Program, TaskKind, ragged


def shared_flows(program: Program, bundles: Sequence[Bundle], tenants: Sequence[Bundle]) -> NDArray[np.bool_]:
    """Return for every flow of a program whether the engine must know when its bytes move.

    So it is where another flow can be on one of its links at the same time. Tasks that all
    hold one stream follow each other: a link that only they use is theirs alone, unless a
    tenant uses it too. And where computing is slowed while a data communication moves bytes.
    """
    link_start, link_of = ragged([[link for link, _ in shape.shares] for shape in bundles])
    watched = ~_exclusive(program, link_start, link_of)
    for shape in tenants:
        watched[[link for link, _ in shape.shares]] = True
    flow_of_row = np.repeat(np.arange(len(bundles)), np.diff(link_start))
    shared = np.bincount(flow_of_row[watched[link_of]], minlength=len(bundles)) > 0
    if program.slowdown > 1:
        data = np.array([item.kind is TaskKind.DATA_COMMUNICATION for item in program.work], dtype=bool)
        slowing = program.flow_of[(program.flow_of >= 0) & data[program.work_of]]
        shared[slowing] = np.diff(link_start)[slowing] > 0
    return shared


def _exclusive(program: Program, link_start: IntArray, link_of: IntArray) -> NDArray[np.bool_]:
    """Return for every link whether all tasks that use it are seen to hold one common stream.

    Seen are the first and the last stream of a task: those of a send are its two ends.
    """
    users = np.flatnonzero(program.flow_of >= 0)
    flow_of_row = np.repeat(np.arange(len(program.flows)), np.diff(link_start))
    result = np.zeros(len(program.links), dtype=bool)
    for place in (program.stream_start[users], program.stream_start[users + 1] - 1):
        low, high = _extremes(program.stream_of[place], program.flow_of[users], len(program.flows))
        least, _ = _extremes(low[flow_of_row], link_of, len(program.links))
        _, most = _extremes(high[flow_of_row], link_of, len(program.links))
        result |= most <= least
    return result


def _extremes(values: IntArray, index: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the least and the most of the values of every index; where there are none, most is below least."""
    least, most = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(least, index, values)
    np.maximum.at(most, index, values)
    return least, most


def disturbing(bundles: Sequence[Bundle], tenants: Sequence[Bundle], num_links: int) -> list[int]:
    """Return the tenants that share a link with a flow of the step, directly or through other tenants."""
    reached = np.zeros(num_links, dtype=bool)
    for shape in bundles:
        reached[[link for link, _ in shape.shares]] = True
    heard: list[int] = []
    while True:
        more = [
            index
            for index, shape in enumerate(tenants)
            if index not in heard and any(reached[link] for link, _ in shape.shares)
        ]
        if not more:
            return sorted(heard)
        heard += more
        for index in more:
            reached[[link for link, _ in tenants[index].shares]] = True
