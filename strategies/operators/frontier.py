"""The exact solver of a cost graph: bucket elimination, a price of memory, and a proof of the gap.

Without a limit bucket elimination alone is exact. With a limit, memory is the sum of the kept bytes and the largest
transient bytes. A range of levels of transient bytes gives a relaxation: all choices up to its highest level, with the
budget of kept bytes that its lowest level leaves. A price on kept bytes bounds every range from below (Lagrangian
relaxation; Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 1980). Ranges are
halved, the one with the least bound first; a single level is solved by an exact sweep.
"""

import heapq
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.operators.bucket_elimination import MOST_SWEEP_ENTRIES, Buckets, Price, Sweep, buckets
from meshwise.strategies.operators.cost_graph import (
    MOST,
    CostGraph,
    IntArray,
    Shortfall,
    Solution,
    least_memory,
    restrict,
    shortfall,
)
from meshwise.strategies.operators.neighbourhood import Neighbourhood

ROUNDS = 40
"""Prices tried for one range, at most; each one about halves what lies between two choices, so more never help."""


def frontier(
    graph: CostGraph, limit: int | None = None, *, gap: float = 0.0, labels: int = 10_000
) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes, or the proof that none fits.

    Parameters
    ----------
    graph
        Costs of every choice.
    limit
        Bytes of memory; None for no limit.
    gap
        Stop when the time is proven within this fraction of the least; 0 proves the least.
    max_labels
        Partial choices kept at a node of an exact sweep, at most. Where more are needed the bound remains valid, but
        stays below the time.

    Raises
    ------
    ValueError
        If the graph is too entangled: a table would need more than 2**25 entries.
    """
    missing = shortfall(graph, limit)
    if missing is not None:
        return missing
    relaxation = Relaxation(graph, buckets(graph))
    free = relaxation.within(relaxation.levels[-1]).least(Price(0, 1))[1]
    time, memory = graph.time(free), graph.memory(free)
    if limit is None or memory <= limit:
        return Solution(free, time, memory, time, price=0.0)
    return _Search(relaxation, limit, gap, labels).run(time)


STEP = 100
"""The price of memory is measured over one part of this many of the limit.

The very next byte may save far more than those after it, where it lets another choice fit.
"""

FEW = 500
"""Partial choices of a first, quick sweep, which often finds a better choice to prune the full sweep with."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The graph without choices above some level of transient bytes.

    Parameters
    ----------
    allowed_choices
        Per class of nodes the choices that remain.
    times, kept_bytes
        Per distinct node table the costs of those choices.
    edges
        Per distinct edge table the ticks of those choices.
    """

    graph: CostGraph
    eliminations: Buckets
    allowed: dict[int, IntArray]
    times: tuple[IntArray, ...]
    kept: tuple[IntArray, ...]
    edges: tuple[IntArray, ...]

    def least(self, price: Price) -> tuple[int, tuple[int, ...]]:
        """Return the least of ``price.num_bytes`` * ticks + ``price.ticks`` * kept bytes, and the choice with it."""
        costs = [price.of * times + price.ticks * kept for times, kept in zip(self.times, self.kept, strict=True)]
        value, choice = self.eliminations.minimum(costs, [price.of * each for each in self.edges])
        return value, self._named(choice)

    def leanest(self) -> tuple[int, ...]:
        """Return the choice that keeps fewest bytes; of equal choices of a node the fastest."""
        order = [int(np.lexsort((times, kept))[0]) for times, kept in zip(self.times, self.kept, strict=True)]
        of_class = {number: index for (_, number), index in zip(self.eliminations.nodes, order, strict=True)}
        return self._named(tuple(of_class[number] for number in self.eliminations.classes))

    def _named(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """Return the choice with the indices of the whole graph."""
        lists = {number: each.tolist() for number, each in self.allowed.items()}
        return tuple(lists[number][index] for number, index in zip(self.eliminations.classes, choice, strict=True))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A graph with its eliminations, limited to any level of transient bytes; the limited graphs are cached."""

    graph: CostGraph
    eliminations: Buckets
    _cuts: dict[int, Cut] = field(default_factory=dict)

    @cached_property
    def levels(self) -> IntArray:
        """The values that the largest transient bytes of a choice can take, ascending."""
        distinct = [self.graph.transient[node] for node, _ in self.eliminations.nodes]
        levels = np.unique(np.concatenate(distinct))
        result: IntArray = levels[levels >= max(int(each.min()) for each in distinct)]
        return result

    @cached_property
    def kept(self) -> tuple[list[int], ...]:
        """Per node the bytes that each choice keeps; nodes of one class share the list."""
        lists = {number: self.graph.kept[node].tolist() for node, number in self.eliminations.nodes}
        return tuple(lists[number] for number in self.eliminations.classes)

    @cached_property
    def most(self) -> tuple[int, int]:
        """Upper bounds of any choice: ticks, and kept bytes."""
        ticks = sum(int(each.max()) for each in self.graph.times)
        edges = sum(int(edge.times.max()) for edge in self.graph.edges)
        return ticks + edges, sum(int(each.max()) for each in self.graph.kept)

    def price(self, ticks: int, of: int) -> Price:
        """Return a price of about ``ticks`` for ``num_bytes`` bytes, such that no priced sum leaves 64 bits."""
        most_ticks, most_bytes = (max(1, each) for each in self.most)
        # the larger the scale the finer the price, which is rounded to a whole number of ticks
        highest = MOST // most_bytes
        scale = 1
        while scale < 2**40 and 2 * scale * most_ticks < MOST and 2 * scale * ticks < highest * of:
            scale *= 2
        return Price(min(highest, scale * ticks // of), scale)

    def within(self, level: int) -> Cut:
        """Return the graph without choices above ``level`` transient bytes."""
        if level not in self._cuts:
            self._cuts[level] = self._cut(level)
        return self._cuts[level]

    def _cut(self, level: int) -> Cut:
        graph, nodes = self.graph, self.eliminations.nodes
        allowed = {number: np.flatnonzero(graph.transient[node] <= level) for node, number in nodes}
        edges = [graph.edges[index] for index, _ in self.eliminations.edges]
        classes = self.eliminations.classes
        return Cut(
            graph,
            self.eliminations,
            allowed,
            tuple(graph.times[node][allowed[number]] for node, number in nodes),
            tuple(graph.kept[node][allowed[number]] for node, number in nodes),
            tuple(each.times[np.ix_(allowed[classes[each.source]], allowed[classes[each.target]])] for each in edges),
        )


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    """A range of levels of transient bytes, by index; no choice within it takes fewer ticks than ``bound``."""

    bound: int
    low: int
    high: int
    price: Price


class _Search:
    """Best-first search over ranges of levels of transient bytes."""

    def __init__(self, relaxation: Relaxation, limit: int, gap: float, labels: int) -> None:
        self.relaxation, self.graph = relaxation, relaxation.graph
        self.limit, self.gap, self.labels = limit, gap, labels
        self.near = Neighbourhood(self.graph, limit)
        self.best = self.near.polished(least_memory(self.graph))
        self.time = self.graph.time(self.best)
        self.ranges: list[_Range] = []

    def run(self, bound: int) -> Solution:
        """Return the best choice; ``bound`` is the least time without a limit."""
        whole = _Range(bound, 0, len(self.relaxation.levels) - 1, Price(0, 1))
        relaxed = self._push(whole)
        closed = self.time
        while self.ranges and min(closed, self.ranges[0].bound) * (1 + self.gap) < self.time:
            check_deadline()
            least = heapq.heappop(self.ranges)
            if least.low == least.high:
                closed = min(closed, self._swept(least))
                continue
            middle = (least.low + least.high) // 2
            self._push(_Range(least.bound, least.low, middle, least.price))
            self._push(_Range(least.bound, middle + 1, least.high, least.price))
        proven = min([self.time, closed, *(each.bound for each in self.ranges)])
        step = max(1, self.limit // STEP)
        saved = max(relaxed - self._raised(whole, step).bound, 0)
        return Solution(self.best, self.time, self.graph.memory(self.best), proven, saved / step)

    def _offer(self, choice: tuple[int, ...]) -> None:
        if self.graph.memory(choice) <= self.limit and self.graph.time(choice) < self.time:
            self.best, self.time = choice, self.graph.time(choice)

    def _push(self, given: _Range) -> int:
        """Raise the bound of a range, queue the range if it may hold a faster choice, and return the bound."""
        raised = self._raised(given)
        if raised.bound < self.time:
            heapq.heappush(self.ranges, raised)
        return raised.bound

    def _raised(self, given: _Range, more: int = 0) -> _Range:
        """Return the range with the bound of its best price, if the limit had ``extra_bytes`` more.

        Two choices, one within the budget and one beyond it, define the price at which both cost the same. The
        cheapest choice at that price replaces one of the two, until no choice is cheaper than both.
        """
        cut = self.relaxation.within(int(self.relaxation.levels[given.high]))
        lean, budget = cut.leanest(), self.limit + more - int(self.relaxation.levels[given.low])
        if self._kept(lean) > budget:
            return replace(given, bound=self.time)  # no choice of the range fits
        fast: tuple[int, ...] | None = None
        bound, best, price = given.bound, given.price, given.price
        for _ in range(ROUNDS):
            least, choice = cut.least(price)
            self._offer(choice)
            met = price.bound(least, budget)
            bound, best = (met, price) if met > bound else (bound, best)
            if bound >= self.time or (fast is not None and choice in (lean, fast)):
                break
            if self._kept(choice) > budget:
                fast = choice
            elif price.ticks == 0:
                break
            else:
                lean = choice
            price = self._between(fast, lean)
        if fast is not None and bound < self.time:
            self._mix(fast, lean)
        return _Range(bound, given.low, given.high, best)

    def _between(self, fast: tuple[int, ...] | None, lean: tuple[int, ...]) -> Price:
        """Return the price at which both choices cost the same; 0 while no choice beyond the budget is known."""
        if fast is None:
            return Price(0, 1)
        slower = self.graph.time(lean) - self.graph.time(fast)
        return self.relaxation.price(max(0, slower), self._kept(fast) - self._kept(lean))

    def _mix(self, fast: tuple[int, ...], lean: tuple[int, ...]) -> None:
        """Offer mixtures of a choice beyond the budget and one within it: they use memory that a price leaves idle."""
        for first, second in ((fast, lean), (lean, fast)):
            mixture = self.near.mixed(first, second)
            if mixture is not None:
                self._offer(self.near.polished(mixture))

    def _kept(self, choice: tuple[int, ...]) -> int:
        return sum(each[index] for each, index in zip(self.relaxation.kept, choice, strict=True))

    def _swept(self, least: _Range) -> int:
        """Return the bound of a range of one level after an exact sweep of its choices."""
        level = int(self.relaxation.levels[least.low])
        allowed = tuple(np.flatnonzero(each <= level) for each in self.graph.transient)
        sweep = Sweep(restrict(self.graph, allowed), self.limit - level, least.price)
        if sweep.entries > MOST_SWEEP_ENTRIES:
            return least.bound
        bound = least.bound
        for labels in sorted({min(self.labels, FEW), self.labels}):
            swept = sweep.below(self.time, labels)
            bound = max(bound, min(swept.bound, self.time))
            if swept.choice is not None:
                self._offer(tuple(int(options[index]) for options, index in zip(allowed, swept.choice, strict=True)))
            if bound * (1 + self.gap) >= self.time:
                break
        return bound
