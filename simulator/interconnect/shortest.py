"""Routes of fewest hops over any small graph, split evenly at every vertex."""

from collections.abc import Sequence
from functools import cache

Ways = tuple[tuple[int, ...], tuple[float, ...]]


class Shortest:
    """Fewest-hop routes over directed edges (from, to) between vertices below ``size``.

    A vertex sends equal parts over all its edges that lead nearer to the target, however
    many ways there are further on: what equal-cost multipath hashing does on average.
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        self._edges = tuple(edges)
        self._leaving: list[list[int]] = [[] for _ in range(size)]
        self._entering: list[list[int]] = [[] for _ in range(size)]
        for edge, (tail, head) in enumerate(self._edges):
            self._leaving[tail].append(edge)
            self._entering[head].append(edge)
        self._searched: dict[int, tuple[dict[int, int], list[int]]] = {}
        self.ways = cache(self._ways)

    def distances(self, target: int, source: int | None = None) -> dict[int, int]:
        """Return the hops to ``target`` of every vertex that reaches it; with ``source`` of those as near at least."""
        distance, frontier = self._searched.setdefault(target, ({target: 0}, [target]))
        while frontier and source not in distance:
            near = [self._edges[edge][0] for vertex in frontier for edge in self._entering[vertex]]
            hops = distance[frontier[0]] + 1
            frontier[:] = [vertex for vertex in dict.fromkeys(near) if vertex not in distance]
            distance.update(dict.fromkeys(frontier, hops))
        return distance

    def _ways(self, source: int, target: int) -> Ways | None:
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
