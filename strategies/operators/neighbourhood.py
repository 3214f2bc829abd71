"""Local improvements of choices: mixtures of two choices, and changes of one node at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Improves choices of a cost graph within ``limit`` bytes."""

    graph: CostGraph
    limit: int

    @cached_property
    def around(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node the edges that touch it."""
        result: list[list[Edge]] = [[] for _ in self.graph.times]
        for edge in self.graph.edges:
            result[edge.source].append(edge)
            result[edge.target].append(edge)
        return tuple(tuple(each) for each in result)

    def mixed(self, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
        """Return the fastest mixture that fits: a prefix of the nodes as in one choice, the others as in another.

        Layers are alike, so it matters only how many of them choose as in ``prefix_choice``; and since they follow each
        other, one change between neighbours costs least.
        """
        times, memory = self._mixtures(np.array(first), np.array(second))
        fits = np.flatnonzero(memory <= self.limit)
        if not len(fits):
            return None
        place = int(fits[np.argmin(times[fits])])
        return (*first[:place], *second[place:])

    def _mixtures(self, first: IntArray, second: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ticks and bytes of the mixtures with a prefix of 0, 1, ... and all nodes."""
        changes = np.zeros(len(first) + 2, dtype=np.int64)
        for source, target, times in self.graph.edges:
            neither, both = times[second[source], second[target]], times[first[source], first[target]]
            one = times[first[source], second[target]]
            # for every length of the prefix the time of the edge, as differences that a cumulative sum adds up
            changes[0] += neither
            changes[source + 1] += one - neither
            changes[target + 1] += both - one
        edges = np.cumsum(changes)[: len(first) + 1]
        times = _ahead(self._picked(self.graph.times, first), self._picked(self.graph.times, second))
        kept = _ahead(self._picked(self.graph.kept, first), self._picked(self.graph.kept, second))
        before = np.maximum.accumulate(np.r_[0, self._picked(self.graph.transient, first)])
        after = np.maximum.accumulate(np.r_[0, self._picked(self.graph.transient, second)[::-1]])[::-1]
        return times + edges, kept + np.maximum(before, after)

    def _picked(self, columns: tuple[IntArray, ...], choice: IntArray) -> IntArray:
        return np.array([each[index] for each, index in zip(columns, choice, strict=True)], dtype=np.int64)

    def polished(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return a choice that fits, improved one node at a time until no change is faster within the limit."""
        now = list(choice)
        kept = sum(int(each[index]) for each, index in zip(self.graph.kept, now, strict=True))
        faster = True
        while faster:
            faster = False
            most = max(int(each[index]) for each, index in zip(self.graph.transient, now, strict=True))
            for node, (bytes_kept, transient) in enumerate(zip(self.graph.kept, self.graph.transient, strict=True)):
                rest = kept - int(bytes_kept[now[node]])
                best = self._best(node, now, rest + bytes_kept + np.maximum(most, transient))
                faster = faster or best != now[node]
                now[node], kept, most = best, rest + int(bytes_kept[best]), max(most, int(transient[best]))
        return tuple(now)

    def _best(self, node: int, now: list[int], memory: IntArray) -> int:
        times = self.graph.times[node].copy()
        for source, target, table in self.around[node]:
            times += table[:, now[target]] if source == node else table[now[source]]
        better = np.flatnonzero((memory <= self.limit) & (times < times[now[node]]))
        return int(better[np.argmin(times[better])]) if len(better) else now[node]


def _ahead(first: IntArray, second: IntArray) -> IntArray:
    """Return for every i the sum of the first i values of the prefix and of all but the first i of the suffix."""
    result: IntArray = np.r_[0, np.cumsum(first)] + np.r_[np.cumsum(second[::-1])[::-1], 0]
    return result
