"""Fastest choice within a budget, node by node over the frontier, with a list of partial choices for each state.

The frontier are the nodes behind which some consumer is still ahead. Partial choices that agree
on it differ only in time and memory: those that another beats in both are dropped (Nemhauser
and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969).
A price of memory bounds what the rest takes: partial choices that cannot become faster than what is
known are dropped too.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from strategies.operators.cost_graph import CostGraph, Edge, IntArray
from strategies.operators.pareto import undominated

MOST_ENTRIES = 2**22


class Price(NamedTuple):
    """``ticks`` / ``of`` is the price of a byte in ticks, in whole numbers so that bounds are exact."""

    ticks: int
    of: int

    def bound(self, least: int, budget: int) -> int:
        """Return the ticks that a choice within ``budget`` takes at least, if of * ticks + price * bytes >= least."""
        return -((self.ticks * budget - least) // self.of)


class Swept(NamedTuple):
    """The fastest choice found, None if none is fast enough; no choice takes fewer ticks than ``bound``."""

    choice: tuple[int, ...] | None
    bound: int


class Labels(NamedTuple):
    """Partial choices: number of the frontier's choices, ticks and bytes so far; all of shape (labels,)."""

    state: IntArray
    times: IntArray
    kept: IntArray


@dataclass(frozen=True, eq=False)
class Sweep:
    """The order of a graph, and the least that each state of the frontier has ahead at a price."""

    graph: CostGraph
    budget: int
    price: Price

    @cached_property
    def into(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node its edges from nodes before it."""
        result: list[list[Edge]] = [[] for _ in self.graph.times]
        for edge in self.graph.edges:
            result[edge.target].append(edge)
        return tuple(tuple(each) for each in result)

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """Per place the nodes before it that have an edge to a node at or after it."""
        last = list(range(len(self.graph.times)))
        for source, target, _ in self.graph.edges:
            last[source] = max(last[source], target)
        result: list[tuple[int, ...]] = [()]
        for node in range(len(last)):
            result.append(tuple(each for each in (*result[-1], node) if last[each] > node))
        return tuple(result)

    @property
    def entries(self) -> int:
        """Size of the largest table that a sweep needs."""
        return max(self._shape((*ahead, node)) for node, ahead in enumerate(self.frontiers[:-1]))

    def _shape(self, nodes: tuple[int, ...]) -> int:
        return prod(self.graph.sizes[node] for node in nodes)

    @cached_property
    def ahead(self) -> tuple[IntArray, ...]:
        """Per place, over the choices of its frontier, the least priced time of all nodes at or after it."""
        result = [np.zeros((), dtype=np.int64)]
        for node in range(len(self.graph.times) - 1, -1, -1):
            joined = (*self.frontiers[node], node)
            total = _spread(result[-1], self.frontiers[node + 1], joined) + self._priced(node)
            for edge in self.into[node]:
                total = total + self.price.of * _spread(edge.times, (edge.source, node), joined)
            result.append(total.min(axis=-1))
        return tuple(reversed(result))

    def _priced(self, node: int) -> IntArray:
        return self.price.of * self.graph.times[node] + self.price.ticks * self.graph.kept[node]

    @cached_property
    def least(self) -> IntArray:
        """Per place the fewest bytes that all nodes at or after it keep."""
        fewest = np.array([int(each.min()) for each in self.graph.kept], dtype=np.int64)
        result: IntArray = np.r_[np.cumsum(fewest[::-1])[::-1], 0]
        return result

    def below(self, ticks: int, labels: int) -> Swept:
        """Return the fastest choice that takes fewer than ``ticks``, with at most ``labels`` partial choices a node."""
        now = Labels(*(np.zeros(1, dtype=np.int64) for _ in range(3)))
        history: list[tuple[IntArray, IntArray]] = []
        bound = ticks
        for node in range(len(self.graph.times)):
            ahead, least = self._extended(node, now)
            fits = np.flatnonzero((least <= self._worth(bound)) & (ahead.kept + self.least[node + 1] <= self.budget))
            best = undominated(ahead.state[fits], ahead.times[fits], ahead.kept[fits])
            rows = fits[best]
            if len(rows) > labels:
                order = np.argpartition(least[rows], labels)
                bound = min(bound, self.price.bound(int(least[rows[order[labels]]]), self.budget))
                rows = rows[np.sort(order[:labels])]
            history.append((rows // self.graph.sizes[node], rows % self.graph.sizes[node]))
            now = Labels(*(each[rows] for each in ahead))
        row = int(np.argmin(now.times)) if len(now.times) else None
        if row is None or now.times[row] >= ticks:
            return Swept(None, bound)
        return Swept(_traced(history, row), min(bound, int(now.times[row])))

    def _worth(self, ticks: int) -> int:
        """Return the most priced time at which a choice within the budget may take fewer than ``ticks``."""
        return self.price.of * (ticks - 1) + self.price.ticks * self.budget

    def _extended(self, node: int, now: Labels) -> tuple[Labels, IntArray]:
        """Return every label with every choice of a node, and the least priced time with what is ahead."""
        frontier, following = self.frontiers[node], self.frontiers[node + 1]
        shape = tuple(self.graph.sizes[each] for each in frontier)
        met = dict(zip(frontier, np.unravel_index(now.state, shape), strict=True)) if frontier else {}
        times = now.times[:, None] + self.graph.times[node]
        for edge in self.into[node]:
            times = times + edge.times[met[edge.source]]
        kept = now.kept[:, None] + self.graph.kept[node]
        state = np.zeros_like(times)
        for each in following:
            own = np.arange(self.graph.sizes[node]) if each == node else met[each][:, None]
            state = state * self.graph.sizes[each] + own
        extended = Labels(state.ravel(), times.ravel(), kept.ravel())
        priced = self.price.of * extended.times + self.price.ticks * extended.kept
        return extended, priced + self.ahead[node + 1].ravel()[extended.state]


def _spread(table: IntArray, scope: tuple[int, ...], joined: tuple[int, ...]) -> IntArray:
    result: IntArray = table[tuple(slice(None) if node in scope else None for node in joined)]
    return result


def _traced(history: list[tuple[IntArray, IntArray]], row: int) -> tuple[int, ...]:
    choice: list[int] = []
    for parents, choices in reversed(history):
        choice.append(int(choices[row]))
        row = int(parents[row])
    return tuple(reversed(choice))
