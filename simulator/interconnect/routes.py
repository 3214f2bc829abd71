"""Routes as arrays: the links over which each pair of devices sends, and the share of its bytes on each.

`ShortestPaths` finds the routes of fewest hops over any small graph, split evenly at every vertex. Along an `Axis` of a
ring or a torus bytes go in the shorter direction; at equal distance half goes in each. All-to-all wiring has a link for
each ordered pair of different parts; `ordered_pairs` numbers these pairs without gaps.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import expand_rows, ragged

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


def expand_counts(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return for ``counts[i]`` rows of each ``i``: the ``i`` of every row, and its position among the rows of ``i``.

    >>> [column.tolist() for column in expand_counts(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def expand_routes(rows: Sequence[tuple[Sequence[int], Sequence[float]]], entries: IntArray) -> Routes:
    """Return the routes of pairs, of which pair ``i`` has the links and shares ``rows[entries[i]]``."""
    start, links = ragged([links for links, _ in rows])
    shares = np.array([share for _, shares in rows for share in shares], dtype=np.float64)
    pair, row = expand_rows(start, entries)
    return Routes(pair, links[row], shares[row])


def pick_links(is_crossed: BoolArray, links: IntArray, index: IntArray) -> IntArray:
    """Return a column of routes: ``links[index]`` for pairs whose route crosses such a link, -1 for the others."""
    column = np.full(len(index), -1)
    column[is_crossed] = links[index[is_crossed]]
    return column


def chain_links(*columns: IntArray) -> Routes:
    """Return routes along which all bytes of a pair cross its link in every column, in order; -1 is no link.

    >>> routes = chain_links(np.array([7, 8]), np.array([-1, 9]))
    >>> routes.pair.tolist(), routes.link.tolist()
    ([0, 1, 1], [7, 8, 9])
    """
    table = np.stack(columns, axis=1)
    is_used = table >= 0
    link = table[is_used]
    pair = np.repeat(np.arange(len(table)), np.count_nonzero(is_used, axis=1))
    return Routes(pair, link, np.ones(len(link)))


def join_routes(parts: Sequence[Routes]) -> Routes:
    """Return all rows of ``parts``, sorted by pair; rows of one pair keep their order."""
    parts = [part for part in parts if len(part.pair)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Routes(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    pair, link, share = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(pair, kind="stable")
    return Routes(pair[order], link[order], share[order])


Paths = tuple[tuple[int, ...], tuple[float, ...]]


class ShortestPaths:
    """Routes of fewest hops over directed edges (from, to) between vertices below ``size``.

    A vertex sends equal parts over all of its edges that lead closer to the target, however many routes follow each:
    the average of equal-cost multipath hashing.
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        self._edges = tuple(edges)
        self._out_edges: list[list[int]] = [[] for _ in range(size)]
        self._in_edges: list[list[int]] = [[] for _ in range(size)]
        for edge, (tail, head) in enumerate(self._edges):
            self._out_edges[tail].append(edge)
            self._in_edges[head].append(edge)
        # Breadth-first searches that stopped at their source, and go on from there for one further away.
        self._searches: dict[int, tuple[dict[int, int], list[int]]] = {}
        self.find_paths = cache(self._find_paths)

    def distances(self, target: int, source: int | None = None) -> dict[int, int]:
        """Return the hops to ``target`` of all vertices that reach it; with ``source``, at least of those as close."""
        distance, frontier = self._searches.setdefault(target, ({target: 0}, [target]))
        while frontier and source not in distance:
            neighbours = [self._edges[edge][0] for vertex in frontier for edge in self._in_edges[vertex]]
            hops = distance[frontier[0]] + 1
            # In place: the table of searches keeps this list.
            frontier[:] = [vertex for vertex in dict.fromkeys(neighbours) if vertex not in distance]
            distance.update(dict.fromkeys(frontier, hops))
        return distance

    def _find_paths(self, source: int, target: int) -> Paths | None:
        """Return the edges of all shortest paths and the share of the bytes on each; ``None`` if there is no path."""
        distance = self.distances(target, source)
        if source not in distance:
            return None
        edges: list[int] = []
        shares: list[float] = []
        amounts = {source: 1.0}
        for hops in range(distance[source] - 1, -1, -1):
            next_amounts: dict[int, float] = {}
            for vertex, amount in amounts.items():
                next_edges = [edge for edge in self._out_edges[vertex] if distance.get(self._edges[edge][1]) == hops]
                for edge in next_edges:
                    head = self._edges[edge][1]
                    next_amounts[head] = next_amounts.get(head, 0.0) + amount / len(next_edges)
                edges += next_edges
                shares += [amount / len(next_edges)] * len(next_edges)
            amounts = next_amounts
        return tuple(edges), tuple(shares)


class Walks(NamedTuple):
    """Steps along an axis, sorted by pair: a ``share`` of the pair's bytes leaves ``position``.

    ``direction`` is 0 for a step to the next higher position, 1 for one to the next lower.
    """

    pair: IntArray
    position: IntArray
    direction: IntArray
    share: FloatArray


class Axis(NamedTuple):
    """An axis of ``size`` positions, ``closed`` to a ring or not."""

    size: int
    closed: bool

    def exits(self, direction: int) -> IntArray:
        """Return the positions from which a link leads up the axis or, if ``direction`` is 1, down."""
        return np.arange(self.size) if self.closed else np.arange(direction, self.size - 1 + direction)

    def walks(self, source: IntArray, target: IntArray) -> Walks:
        """Return the steps from every source position to its target, in the shorter direction.

        >>> there = build_axis(4).walks(np.array([3, 0]), np.array([0, 2]))
        >>> there.position.tolist(), there.direction.tolist(), there.share.tolist()
        ([3, 0, 1, 0, 3], [0, 0, 0, 1, 1], [1.0, 0.5, 0.5, 0.5, 0.5])
        """
        hops = np.stack([target - source, source - target], axis=1)
        if self.closed:
            hops %= self.size
            # The longer direction is dropped; at equal distance both stay and share the bytes.
            hops[hops > hops[:, ::-1]] = 0
        hops = np.maximum(hops, 0)
        share = 1.0 / np.maximum(np.count_nonzero(hops, axis=1), 1)
        entry, step = expand_counts(hops.ravel())
        pair, direction = np.divmod(entry, 2)
        return Walks(pair, (source[pair] + np.where(direction, -step, step)) % self.size, direction, share[pair])


def build_axis(size: int, wraparound: bool = True) -> Axis:
    """Return an axis of ``size`` positions; two positions have a single wire and are not a ring."""
    return Axis(size, wraparound and size > 2)


def ordered_pairs(size: int) -> tuple[IntArray, IntArray]:
    """Return tails and heads of all ordered pairs of different numbers below ``size``.

    >>> [column.tolist() for column in ordered_pairs(3)]
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    tail = np.repeat(np.arange(size), max(size - 1, 0))
    head = np.tile(np.arange(max(size - 1, 0)), size)
    return tail, head + (head >= tail)


def pair_index(tail: IntArray, head: IntArray, size: int) -> IntArray:
    """Return the positions of pairs in `ordered_pairs`; meaningless for pairs of equal numbers."""
    return tail * (size - 1) + head - (head > tail)
