"""The exact solver of a cost graph: bucket elimination, a price of memory, and a proof of the gap.

Without a limit bucket elimination alone is exact. With a limit, memory is the sum of the kept bytes and the largest
transient bytes. A range of levels of transient bytes gives a relaxation: all choices up to its highest level, with the
budget of kept bytes that its lowest level leaves. A price on kept bytes bounds every range from below (Lagrangian
relaxation; Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 1980). Ranges are
halved, the one with the least bound first; a single level is solved by an exact sweep.
"""

import heapq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.memo import memoise
from meshwise.strategies.operators.bucket_elimination import MAX_SWEEP_ENTRIES, Buckets, Price, Sweep, build_buckets
from meshwise.strategies.operators.cost_graph import (
    MAX_SUM,
    CostGraph,
    IntArray,
    Shortfall,
    Solution,
    find_leanest_choice,
    find_shortfall,
    restrict_choices,
)
from meshwise.strategies.operators.neighbourhood import Neighbourhood

MAX_PRICES = 40
"""Prices tried for one range, at most; each one about halves what lies between two choices, so more never help."""


def frontier(
    graph: CostGraph, limit: int | None = None, *, gap: float = 0.0, max_labels: int = 10_000
) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes, or the proof that none fits.

    Parameters
    ----------
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
    shortfall = find_shortfall(graph, limit)
    if shortfall is not None:
        return shortfall
    relaxation = Relaxation(graph, build_buckets(graph))
    free_choice = relaxation.limit_graph(relaxation.levels[-1]).find_minimum(Price(0, 1))[1]
    time, memory = graph.time(free_choice), graph.memory(free_choice)
    if limit is None or memory <= limit:
        return Solution(free_choice, time, memory, time, price=0.0)
    return _Search(relaxation, limit, gap, max_labels).run(time)


LIMIT_PARTS = 100
"""The price of memory is measured over one part of this many of the limit.

The very next byte may save far more than those after it, where it lets another choice fit.
"""

FEW_LABELS = 500
"""Partial choices of a first, quick sweep, which often finds a better choice to prune the full sweep with."""


@dataclass(frozen=True, eq=False)
class LimitedGraph:
    """The graph without choices above some level of transient bytes.

    ``allowed_choices`` are those that remain per class of nodes; ``times``, ``kept_bytes`` and ``edges`` are the costs
    of those choices per distinct node and edge table.
    """

    buckets: Buckets
    allowed_choices: dict[int, IntArray]
    times: tuple[IntArray, ...]
    kept_bytes: tuple[IntArray, ...]
    edges: tuple[IntArray, ...]

    def find_minimum(self, price: Price) -> tuple[int, tuple[int, ...]]:
        """Return the least of ``price.num_bytes`` * ticks + ``price.ticks`` * kept bytes, and the choice with it."""
        costs = [
            price.num_bytes * times + price.ticks * kept_bytes
            for times, kept_bytes in zip(self.times, self.kept_bytes, strict=True)
        ]
        value, choice = self.buckets.find_minimum(costs, [price.num_bytes * edge_times for edge_times in self.edges])
        return value, self._to_graph_choice(choice)

    def find_leanest(self) -> tuple[int, ...]:
        """Return the choice that keeps fewest bytes; of equal choices of a node the fastest."""
        option_of_class = {
            number: int(np.lexsort((times, kept_bytes))[0])
            for (_, number), times, kept_bytes in zip(self.buckets.nodes, self.times, self.kept_bytes, strict=True)
        }
        return self._to_graph_choice(tuple(option_of_class[number] for number in self.buckets.classes))

    def _to_graph_choice(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """Return the choice with the indices of the whole graph."""
        option_lists = {number: options.tolist() for number, options in self.allowed_choices.items()}
        return tuple(option_lists[number][index] for number, index in zip(self.buckets.classes, choice, strict=True))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A graph with its eliminations, limited to any level of transient bytes; the limited graphs are cached."""

    graph: CostGraph
    buckets: Buckets

    @cached_property
    def levels(self) -> IntArray:
        """The values that the largest transient bytes of a choice can take, ascending."""
        class_bytes = [self.graph.transient_bytes[node] for node, _ in self.buckets.nodes]
        levels = np.unique(np.concatenate(class_bytes))
        result: IntArray = levels[levels >= max(int(node_bytes.min()) for node_bytes in class_bytes)]
        return result

    @cached_property
    def kept_lists(self) -> tuple[list[int], ...]:
        """Per node the bytes that each choice keeps; nodes of one class share the list."""
        lists = {number: self.graph.kept_bytes[node].tolist() for node, number in self.buckets.nodes}
        return tuple(lists[number] for number in self.buckets.classes)

    def build_price(self, ticks: int, num_bytes: int) -> Price:
        """Return a price of about ``ticks`` for ``num_bytes`` bytes, such that no priced sum leaves 64 bits."""
        most_ticks, most_bytes = max(1, self.graph.max_ticks), max(1, self.graph.max_kept)
        # the larger the scale the finer the price, which is rounded to a whole number of ticks
        max_price = MAX_SUM // most_bytes
        scale = 1
        while scale < 2**40 and 2 * scale * most_ticks < MAX_SUM and 2 * scale * ticks < max_price * num_bytes:
            scale *= 2
        return Price(min(max_price, scale * ticks // num_bytes), scale)

    @memoise
    def limit_graph(self, level: int) -> LimitedGraph:
        """Return the graph without choices above ``level`` transient bytes."""
        graph, nodes, classes = self.graph, self.buckets.nodes, self.buckets.classes
        allowed_choices = {number: np.flatnonzero(graph.transient_bytes[node] <= level) for node, number in nodes}
        edges = (graph.edges[index] for index, _ in self.buckets.edges)
        return LimitedGraph(
            self.buckets,
            allowed_choices,
            tuple(graph.times[node][allowed_choices[number]] for node, number in nodes),
            tuple(graph.kept_bytes[node][allowed_choices[number]] for node, number in nodes),
            tuple(times[np.ix_(*(allowed_choices[classes[end]] for end in ends))] for *ends, times in edges),
        )


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    """A range of levels of transient bytes, by index; no choice within it takes fewer ticks than ``bound``."""

    bound: int
    low_level: int
    high_level: int
    price: Price


class _Search:
    """Best-first search over ranges of levels of transient bytes."""

    def __init__(self, relaxation: Relaxation, limit: int, gap: float, max_labels: int) -> None:
        self.relaxation, self.graph = relaxation, relaxation.graph
        self.limit, self.gap, self.max_labels = limit, gap, max_labels
        self.neighbourhood = Neighbourhood(self.graph, limit)
        self.best_choice = self.neighbourhood.polish_choice(find_leanest_choice(self.graph))
        self.best_time = self.graph.time(self.best_choice)
        self.ranges: list[_Range] = []

    def run(self, bound: int) -> Solution:
        """Return the best choice; ``bound`` is the least time without a limit."""
        full_range = _Range(bound, 0, len(self.relaxation.levels) - 1, Price(0, 1))
        relaxed_bound = self._push_range(full_range)
        closed_bound = self.best_time
        while self.ranges and min(closed_bound, self.ranges[0].bound) * (1 + self.gap) < self.best_time:
            check_deadline()
            best_range = heapq.heappop(self.ranges)
            if best_range.low_level == best_range.high_level:
                closed_bound = min(closed_bound, self._sweep_level(best_range))
                continue
            middle_level = (best_range.low_level + best_range.high_level) // 2
            self._push_range(_Range(best_range.bound, best_range.low_level, middle_level, best_range.price))
            self._push_range(_Range(best_range.bound, middle_level + 1, best_range.high_level, best_range.price))
        proven_bound = min([self.best_time, closed_bound, *(open_range.bound for open_range in self.ranges)])
        extra_bytes = max(1, self.limit // LIMIT_PARTS)
        price = max(relaxed_bound - self._raise_bound(full_range, extra_bytes).bound, 0) / extra_bytes
        return Solution(self.best_choice, self.best_time, self.graph.memory(self.best_choice), proven_bound, price)

    def _offer_choice(self, choice: tuple[int, ...]) -> None:
        if self.graph.memory(choice) <= self.limit and self.graph.time(choice) < self.best_time:
            self.best_choice, self.best_time = choice, self.graph.time(choice)

    def _push_range(self, level_range: _Range) -> int:
        """Raise the bound of a range, queue the range if it may hold a faster choice, and return the bound."""
        raised_range = self._raise_bound(level_range)
        if raised_range.bound < self.best_time:
            heapq.heappush(self.ranges, raised_range)
        return raised_range.bound

    def _raise_bound(self, level_range: _Range, extra_bytes: int = 0) -> _Range:
        """Return the range with the bound of its best price, if the limit had ``extra_bytes`` more.

        Two choices, one within the budget and one beyond it, define the price at which both cost the same. The
        cheapest choice at that price replaces one of the two, until no choice is cheaper than both.
        """
        limited_graph = self.relaxation.limit_graph(int(self.relaxation.levels[level_range.high_level]))
        lean_choice = limited_graph.find_leanest()
        budget = self.limit + extra_bytes - int(self.relaxation.levels[level_range.low_level])
        if self._count_kept(lean_choice) > budget:
            return replace(level_range, bound=self.best_time)  # no choice of the range fits
        fast_choice: tuple[int, ...] | None = None
        bound, best_price, price = level_range.bound, level_range.price, level_range.price
        for _ in range(MAX_PRICES):
            min_priced, choice = limited_graph.find_minimum(price)
            self._offer_choice(choice)
            price_bound = price.bound(min_priced, budget)
            if price_bound > bound:
                bound, best_price = price_bound, price
            if bound >= self.best_time or (fast_choice is not None and choice in (lean_choice, fast_choice)):
                break
            if self._count_kept(choice) > budget:
                fast_choice = choice
            elif price.ticks == 0:
                break
            else:
                lean_choice = choice
            price = self._find_price(fast_choice, lean_choice)
        if fast_choice is not None and bound < self.best_time:
            self._mix_choices(fast_choice, lean_choice)
        return _Range(bound, level_range.low_level, level_range.high_level, best_price)

    def _find_price(self, fast_choice: tuple[int, ...] | None, lean_choice: tuple[int, ...]) -> Price:
        """Return the price at which both choices cost the same; 0 while no choice beyond the budget is known."""
        if fast_choice is None:
            return Price(0, 1)
        extra_ticks = self.graph.time(lean_choice) - self.graph.time(fast_choice)
        saved_bytes = self._count_kept(fast_choice) - self._count_kept(lean_choice)
        return self.relaxation.build_price(max(0, extra_ticks), saved_bytes)

    def _mix_choices(self, fast_choice: tuple[int, ...], lean_choice: tuple[int, ...]) -> None:
        """Offer mixtures of a choice beyond the budget and one within it: they use memory that a price leaves idle."""
        for prefix_choice, suffix_choice in ((fast_choice, lean_choice), (lean_choice, fast_choice)):
            mixture = self.neighbourhood.mix_choices(prefix_choice, suffix_choice)
            if mixture is not None:
                self._offer_choice(self.neighbourhood.polish_choice(mixture))

    def _count_kept(self, choice: tuple[int, ...]) -> int:
        return sum(node_bytes[index] for node_bytes, index in zip(self.relaxation.kept_lists, choice, strict=True))

    def _sweep_level(self, level_range: _Range) -> int:
        """Return the bound of a range of one level after an exact sweep of its choices."""
        level = int(self.relaxation.levels[level_range.low_level])
        allowed_choices = {
            node: np.flatnonzero(node_bytes <= level) for node, node_bytes in enumerate(self.graph.transient_bytes)
        }
        sweep = Sweep(restrict_choices(self.graph, allowed_choices), self.limit - level, level_range.price)
        if sweep.max_entries > MAX_SWEEP_ENTRIES:
            return level_range.bound
        bound = level_range.bound
        for num_labels in sorted({min(self.max_labels, FEW_LABELS), self.max_labels}):
            result = sweep.find_below(self.best_time, num_labels)
            bound = max(bound, min(result.bound, self.best_time))
            if result.choice is not None:
                choice = zip(allowed_choices.values(), result.choice, strict=True)
                self._offer_choice(tuple(int(options[index]) for options, index in choice))
            if bound * (1 + self.gap) >= self.best_time:
                break
        return bound
