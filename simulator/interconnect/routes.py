"""Routes as arrays: the links that each pair of devices sends over, and the share of its bytes on each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class Routes(NamedTuple):
    """Sparse rows: pair ``pair[i]`` puts ``share[i]`` of its bytes over ``link[i]``; sorted by pair."""

    pair: IntArray
    link: IntArray
    share: FloatArray


class RouteTable(NamedTuple):
    """Routes by entry: entry ``e`` has the rows ``start[e]:start[e + 1]``."""

    start: IntArray
    link: IntArray
    share: FloatArray

    def routes(self, entries: IntArray) -> Routes:
        """Return the routes of pairs that each have the rows of one entry."""
        first = self.start[entries]
        pair, step = expanded(self.start[entries + 1] - first)
        row = first[pair] + step
        return Routes(pair, self.link[row], self.share[row])


def expanded(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return for ``counts[i]`` rows of each ``i``: the ``i`` of every row, and its place among them.

    >>> [column.tolist() for column in expanded(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def table_of(rows: Sequence[tuple[Sequence[int], Sequence[float]]]) -> RouteTable:
    """Return the table whose entry ``e`` has the links and shares ``rows[e]``."""
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(links) for links, _ in rows], out=start[1:])
    links = np.array([link for links, _ in rows for link in links], dtype=np.int64)
    return RouteTable(start, links, np.array([share for _, shares in rows for share in shares], dtype=np.float64))


def where(on_the_way: BoolArray, links: IntArray, index: IntArray) -> IntArray:
    """Return ``links[index]`` of the pairs that have such a link on their way, -1 of the others."""
    column = np.full(len(index), -1)
    column[on_the_way] = links[index[on_the_way]]
    return column


def along(*columns: IntArray) -> Routes:
    """Return the routes of pairs whose bytes all cross one link of every column in turn; -1 is no link.

    >>> routes = along(np.array([7, 8]), np.array([-1, 9]))
    >>> routes.pair.tolist(), routes.link.tolist()
    ([0, 1, 1], [7, 8, 9])
    """
    table = np.stack(columns, axis=1)
    used = table >= 0
    link = table[used]
    pair = np.repeat(np.arange(len(table)), np.count_nonzero(used, axis=1))
    return Routes(pair, link, np.ones(len(link)))


def joined(parts: Sequence[Routes]) -> Routes:
    """Return all rows of ``parts``, sorted by pair; rows of one pair keep their order."""
    parts = [part for part in parts if len(part.pair)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Routes(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    pair, link, share = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(pair, kind="stable")
    return Routes(pair[order], link[order], share[order])
