"""Which transfers others can disturb, and which never meet another on any link."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.bundle import Shapes
from simulator.program import IntArray, Program, TaskKind


def watched_links(program: Program, moved: Shapes, heard: Sequence[int]) -> NDArray[np.bool_]:
    """Return for every link whether two flows can be on it at the same time.

    Tasks that all hold one stream follow each other: a link that only they use is theirs
    alone, unless a tenant that is ``heard`` uses it too.
    """
    watched = ~_exclusive(program, moved)
    for tenant in heard:
        watched[_links(moved, len(program.flows) + tenant)] = True
    return watched


def shared_flows(program: Program, moved: Shapes, watched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for every flow whether the engine must know when its bytes move.

    So it is on ``watched`` links, and where computing is slowed while a data communication moves bytes.
    """
    shared = np.bincount(moved.of_row[watched[moved.link]], minlength=len(moved.solo_rate)) > 0
    if program.slowdown > 1:
        data = np.array([item.kind is TaskKind.DATA_COMMUNICATION for item in program.work], dtype=bool)
        slowing = program.flow_of[(program.flow_of >= 0) & data[program.work_of]]
        shared[slowing] = np.diff(moved.start)[slowing] > 0
    return shared


def narrow_rows(moved: Shapes, watched: NDArray[np.bool_], capacity: Sequence[float]) -> NDArray[np.bool_]:
    """Return the rows of flows on those ``watched`` links that can hold them up.

    Of links that the same flows use with the same shares, only the narrowest can.

    >>> from simulator.bundle import shapes
    >>> moved = shapes([((0, 8.0), (1, 8.0), (2, 8.0)), ((0, 4.0), (1, 4.0))], [0.0] * 2, [4.0, 3.0, 8.0], 1)
    >>> narrow_rows(moved, np.array([True] * 3), [4.0, 3.0, 8.0]).tolist()
    [False, True, True, False, True]
    """
    order = np.argsort(moved.link, kind="stable")
    order = order[watched[moved.link[order]]]
    link = moved.link[order]
    users = np.stack([moved.of_row[order], moved.share[order]], axis=1).tobytes()
    size = len(users) // max(len(order), 1)
    first, last = np.flatnonzero(np.diff(link, prepend=-1)), np.flatnonzero(np.diff(link, append=-1)) + 1
    narrowest: dict[bytes, int] = {}
    for index, begin, end in zip(link[first].tolist(), (size * first).tolist(), (size * last).tolist(), strict=True):
        other = narrowest.setdefault(users[begin:end], index)
        if capacity[index] < capacity[other]:
            narrowest[users[begin:end]] = index
    kept = np.zeros(len(watched), dtype=bool)
    kept[list(narrowest.values())] = True
    return kept[moved.link]


def disturbing(program: Program, moved: Shapes) -> list[int]:
    """Return the tenants that share a link with a flow of the step, directly or through other tenants."""
    count = len(program.flows)
    reached = np.zeros(len(program.links), dtype=bool)
    reached[moved.link[: moved.start[count]]] = True
    left = list(range(len(program.background)))
    while True:
        more = [tenant for tenant in left if reached[_links(moved, count + tenant)].any()]
        if not more:
            return [tenant for tenant in range(len(program.background)) if tenant not in left]
        left = [tenant for tenant in left if tenant not in more]
        for tenant in more:
            reached[_links(moved, count + tenant)] = True


def _links(moved: Shapes, flow: int) -> IntArray:
    return moved.link[moved.start[flow] : moved.start[flow + 1]]


def _exclusive(program: Program, moved: Shapes) -> NDArray[np.bool_]:
    """Return for every link whether all tasks that use it are seen to hold one common stream.

    Seen are the first and the last stream of a task: those of a send are its two ends.
    """
    users = np.flatnonzero(program.flow_of >= 0)
    rows = moved.start[len(program.flows)]
    flow_of_row, link_of = moved.of_row[:rows], moved.link[:rows]
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
