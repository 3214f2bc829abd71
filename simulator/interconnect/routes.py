"""Routes as arrays: the links over which each pair of devices sends, and the share of its bytes on each.

`ShortestPaths` finds the routes of fewest hops over any small graph, split evenly at every vertex. All-to-all wiring
has a link for each ordered pair of different parts; `ordered_pairs` numbers these pairs without gaps.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class Routes(NamedTuple):
    """Routes of many pairs as sparse rows: pair ``pair[i]`` sends ``share[i]`` of its bytes over ``link[i]``.

    Rows are sorted by pair.
    """

    pair: IntArray
    link: IntArray
    share: FloatArray


class RouteTable(NamedTuple):
    """Table of routes: entry ``e`` has the rows ``start[e]:start[e + 1]``."""

    start: IntArray
    link: IntArray
    share: FloatArray

    def routes(self, entries: IntArray) -> Routes:
        """Return the routes of pairs, of which pair ``i`` has the rows of ``entries[i]``."""
        first = self.start[entries]
        pair, step = expanded(self.start[entries + 1] - first)
        row = first[pair] + step
        return Routes(pair, self.link[row], self.share[row])


def expanded(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return for ``counts[i]`` rows of each ``i``: the ``i`` of every row, and its position among the rows of ``i``.

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
    """Return a column of routes: ``links[index]`` for pairs whose route crosses such a link, -1 for the others."""
    column = np.full(len(index), -1)
    column[on_the_way] = links[index[on_the_way]]
    return column


def along(*columns: IntArray) -> Routes:
    """Return routes along which all bytes of a pair cross its link in every column, in order; -1 is no link.

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


Ways = tuple[tuple[int, ...], tuple[float, ...]]


class Shortest:
    """Routes of fewest hops over directed edges (from, to) between vertices below ``size``.

    A vertex sends equal parts over all of its edges that lead closer to the target, however many routes follow each:
    the average of equal-cost multipath hashing.
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        self._edges = tuple(edges)
        self._leaving: list[list[int]] = [[] for _ in range(size)]
        self._entering: list[list[int]] = [[] for _ in range(size)]
        for edge, (tail, head) in enumerate(self._edges):
            self._leaving[tail].append(edge)
            self._entering[head].append(edge)
        # Breadth-first searches that stopped at their source, and go on from there for one further away.
        self._searched: dict[int, tuple[dict[int, int], list[int]]] = {}
        self.ways = cache(self._ways)

    def distances(self, target: int, source: int | None = None) -> dict[int, int]:
        """Return the hops to ``target`` of all vertices that reach it; with ``source``, at least of those as close."""
        distance, frontier = self._searched.setdefault(target, ({target: 0}, [target]))
        while frontier and source not in distance:
            near = [self._edges[edge][0] for vertex in frontier for edge in self._entering[vertex]]
            hops = distance[frontier[0]] + 1
            # In place: the table of searches keeps this list.
            frontier[:] = [vertex for vertex in dict.fromkeys(near) if vertex not in distance]
            distance.update(dict.fromkeys(frontier, hops))
        return distance

    def _ways(self, source: int, target: int) -> Ways | None:
        """Return the edges of all shortest paths and the share of the bytes on each; ``None`` if there is no path."""
        distance = self.distances(target, source)
        if source not in distance:
            return None
        edges: list[int] = []
        shares: list[float] = []
        here = {source: 1.0}
        for hops in range(distance[source] - 1, -1, -1):
            there: dict[int, float] = {}
            for vertex, amount in here.items():
                nearer = [edge for edge in self._leaving[vertex] if distance.get(self._edges[edge][1]) == hops]
                for edge in nearer:
                    head = self._edges[edge][1]
                    there[head] = there.get(head, 0.0) + amount / len(nearer)
                edges += nearer
                shares += [amount / len(nearer)] * len(nearer)
            here = there
        return tuple(edges), tuple(shares)


def ordered_pairs(size: int) -> tuple[IntArray, IntArray]:
    """Return tails and heads of all ordered pairs of different numbers below ``size``.

    >>> [column.tolist() for column in ordered_pairs(3)]
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    first = np.repeat(np.arange(size), max(size - 1, 0))
    second = np.tile(np.arange(max(size - 1, 0)), size)
    return first, second + (second >= first)


def pair_index(first: IntArray, second: IntArray, size: int) -> IntArray:
    """Return the positions of pairs in `ordered_pairs`; meaningless for pairs of equal numbers."""
    return first * (size - 1) + second - (second > first)
