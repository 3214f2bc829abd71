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
    def node_edges(self) -> tuple[tuple[Edge, ...], ...]:
        """Per node the edges that touch it."""
        result: list[list[Edge]] = [[] for _ in self.graph.times]
        for edge in self.graph.edges:
            result[edge.source].append(edge)
            result[edge.target].append(edge)
        return tuple(tuple(edges) for edges in result)

    def mix_choices(self, prefix_choice: Sequence[int], suffix_choice: Sequence[int]) -> tuple[int, ...] | None:
        """Return the fastest mixture that fits: a prefix of the nodes as in one choice, the others as in another.

        Layers are alike, so it matters only how many of them choose as in ``prefix_choice``; and since they follow each
        other, one change between neighbours costs least.
        """
        times, memory = self._compute_mixtures(np.array(prefix_choice), np.array(suffix_choice))
        positions = np.flatnonzero(memory <= self.limit)
        if not len(positions):
            return None
        position = int(positions[np.argmin(times[positions])])
        return (*prefix_choice[:position], *suffix_choice[position:])

    def _compute_mixtures(self, prefix_choice: IntArray, suffix_choice: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ticks and bytes of the mixtures with a prefix of 0, 1, ... and all nodes."""
        changes = np.zeros(len(prefix_choice) + 2, dtype=np.int64)
        for source, target, times in self.graph.edges:
            suffix_ticks, prefix_ticks = (
                times[suffix_choice[source], suffix_choice[target]],
                times[prefix_choice[source], prefix_choice[target]],
            )
            mixed_ticks = times[prefix_choice[source], suffix_choice[target]]
            # for every length of the prefix the time of the edge, as differences that a cumulative sum adds up
            changes[0] += suffix_ticks
            changes[source + 1] += mixed_ticks - suffix_ticks
            changes[target + 1] += prefix_ticks - mixed_ticks
        edges = np.cumsum(changes)[: len(prefix_choice) + 1]
        times = _sum_splits(
            self._select_costs(self.graph.times, prefix_choice), self._select_costs(self.graph.times, suffix_choice)
        )
        kept_bytes = _sum_splits(
            self._select_costs(self.graph.kept_bytes, prefix_choice),
            self._select_costs(self.graph.kept_bytes, suffix_choice),
        )
        prefix_transient = np.maximum.accumulate(
            np.r_[0, self._select_costs(self.graph.transient_bytes, prefix_choice)]
        )
        suffix_transient = np.maximum.accumulate(
            np.r_[0, self._select_costs(self.graph.transient_bytes, suffix_choice)[::-1]]
        )[::-1]
        return times + edges, kept_bytes + np.maximum(prefix_transient, suffix_transient)

    def _select_costs(self, columns: tuple[IntArray, ...], choice: IntArray) -> IntArray:
        return np.array([node_costs[index] for node_costs, index in zip(columns, choice, strict=True)], dtype=np.int64)

    def polish_choice(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return a choice that fits, improved one node at a time until no change is faster within the limit."""
        current_choice = list(choice)
        kept_bytes = sum(
            int(node_bytes[index]) for node_bytes, index in zip(self.graph.kept_bytes, current_choice, strict=True)
        )
        has_improved = True
        while has_improved:
            has_improved = False
            max_transient = max(
                int(node_bytes[index])
                for node_bytes, index in zip(self.graph.transient_bytes, current_choice, strict=True)
            )
            for node, (option_bytes, option_transient) in enumerate(
                zip(self.graph.kept_bytes, self.graph.transient_bytes, strict=True)
            ):
                rest_bytes = kept_bytes - int(option_bytes[current_choice[node]])
                best_index = self._find_best(
                    node, current_choice, rest_bytes + option_bytes + np.maximum(max_transient, option_transient)
                )
                has_improved = has_improved or best_index != current_choice[node]
                current_choice[node], kept_bytes, max_transient = (
                    best_index,
                    rest_bytes + int(option_bytes[best_index]),
                    max(max_transient, int(option_transient[best_index])),
                )
        return tuple(current_choice)

    def _find_best(self, node: int, current_choice: list[int], memory: IntArray) -> int:
        times = self.graph.times[node].copy()
        for source, target, table in self.node_edges[node]:
            times += table[:, current_choice[target]] if source == node else table[current_choice[source]]
        faster_choices = np.flatnonzero((memory <= self.limit) & (times < times[current_choice[node]]))
        return int(faster_choices[np.argmin(times[faster_choices])]) if len(faster_choices) else current_choice[node]


def _sum_splits(prefix_values: IntArray, suffix_values: IntArray) -> IntArray:
    """Return for every i the sum of the first i values of the prefix and of all but the first i of the suffix."""
    result: IntArray = np.r_[0, np.cumsum(prefix_values)] + np.r_[np.cumsum(suffix_values[::-1])[::-1], 0]
    return result
