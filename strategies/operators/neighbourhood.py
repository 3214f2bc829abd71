"""Local improvements of choices: mixtures of two choices, and changes of one node at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.strategies.operators.cost_graph import CostGraph, IntArray


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Improves choices of a cost graph within ``limit`` bytes."""

    graph: CostGraph
    limit: int

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
            suffix_ticks = times[suffix_choice[source], suffix_choice[target]]
            prefix_ticks = times[prefix_choice[source], prefix_choice[target]]
            mixed_ticks = times[prefix_choice[source], suffix_choice[target]]
            # for every length of the prefix the time of the edge, as differences that a cumulative sum adds up
            changes[0] += suffix_ticks
            changes[source + 1] += mixed_ticks - suffix_ticks
            changes[target + 1] += prefix_ticks - mixed_ticks
        edges = np.cumsum(changes)[: len(prefix_choice) + 1]
        splits = []
        for columns, combine in (
            (self.graph.times, np.add),
            (self.graph.kept_bytes, np.add),
            (self.graph.transient_bytes, np.maximum),
        ):
            prefix_costs, suffix_costs = (
                np.array([node_costs[index] for node_costs, index in zip(columns, choice, strict=True)], np.int64)
                for choice in (prefix_choice, suffix_choice)
            )
            suffix_total = combine.accumulate(np.r_[0, suffix_costs[::-1]])[::-1]
            splits.append(combine(combine.accumulate(np.r_[0, prefix_costs]), suffix_total))
        times, kept_bytes, transient_bytes = splits
        return times + edges, kept_bytes + transient_bytes

    def polish_choice(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return a choice that fits, improved one node at a time until no change is faster within the limit."""
        current_choice = list(choice)
        kept_bytes = self.graph.count_kept(current_choice)
        has_improved = True
        while has_improved:
            has_improved = False
            max_transient = self.graph.find_max_transient(current_choice)
            options = zip(self.graph.kept_bytes, self.graph.transient_bytes, strict=True)
            for node, (option_bytes, option_transient) in enumerate(options):
                rest_bytes = kept_bytes - int(option_bytes[current_choice[node]])
                memory = rest_bytes + option_bytes + np.maximum(max_transient, option_transient)
                best_index = self._find_best(node, current_choice, memory)
                has_improved = has_improved or best_index != current_choice[node]
                current_choice[node] = best_index
                kept_bytes = rest_bytes + int(option_bytes[best_index])
                max_transient = max(max_transient, int(option_transient[best_index]))
        return tuple(current_choice)

    def _find_best(self, node: int, current_choice: list[int], memory: IntArray) -> int:
        times = self.graph.times[node].copy()
        for source, target, table in self.graph.node_edges[node]:
            times += table[:, current_choice[target]] if source == node else table[current_choice[source]]
        faster_choices = np.flatnonzero((memory <= self.limit) & (times < times[current_choice[node]]))
        return int(faster_choices[np.argmin(times[faster_choices])]) if len(faster_choices) else current_choice[node]
