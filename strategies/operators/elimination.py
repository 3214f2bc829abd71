"""Dynamic programming by elimination, as in MindSpore's automatic parallel.

Source: MindSpore, ``frontend/parallel/auto_parallel`` (``dp_algo_costmodel.cc``, ``graph_costmodel.cc``). The graph
shrinks by the first of six eliminations that applies, again and again. Each elimination keeps lists of costs with the
decisions behind them; at the end one cost is chosen and its decisions are replayed.

The published algorithm has two defects. A list drops costs that are no better in computation and communication, even
if they save memory. And a source with several consumers is folded into the list of one of them, which only remembers
the choices of the others: in the end they may choose differently. ``faithful=True`` reproduces both. Otherwise lists
keep all rows that no other row beats in time, kept and transient memory, and a source with two consumers becomes an
edge between them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.operators.bucket_elimination import undominated
from meshwise.strategies.operators.cost_graph import CostGraph, IntArray, Shortfall, Solution, least_time, shortfall
from meshwise.strategies.operators.frontier import frontier

Simplify = Callable[[IntArray, IntArray], IntArray]
"""Returns the rows of a list that are worth keeping, given the group and the costs of each row."""


class ListsTooLong(ValueError):
    """Raised where lists of costs would have more rows than allowed."""


@dataclass(frozen=True, eq=False)
class CostList:
    """Costs of partial plans, by the choices of some nodes.

    Parameters
    ----------
    nodes
        The nodes whose choices distinguish rows.
    choices
        Shape (nodes, rows).
    costs
        Shape (4, rows): ticks of nodes, ticks of edges, bytes kept, bytes transient.
    decisions
        The lists that this one was made from, and for each row its row there.
    """

    nodes: tuple[int, ...]
    choices: IntArray
    costs: IntArray
    decisions: tuple[tuple["CostList", IntArray], ...] = ()

    def key(self, nodes: tuple[int, ...], sizes: tuple[int, ...]) -> IntArray:
        """Return for every row one number of its choices of ``nodes``."""
        result = np.zeros(self.costs.shape[1], dtype=np.int64)
        for node in nodes:
            result = result * sizes[node] + self.choices[self.nodes.index(node)]
        return result

    def rows(self, rows: IntArray, nodes: tuple[int, ...]) -> "CostList":
        """Return some of the rows as a list over ``nodes`` only."""
        places = [self.nodes.index(node) for node in nodes]
        return CostList(nodes, self.choices[places][:, rows], self.costs[:, rows], ((self, rows),))


def eliminate(
    graph: CostGraph, limit: int | None = None, *, faithful: bool = False, rows: int = 2**23
) -> Solution | Shortfall:
    """Return the fastest choice within ``limit`` bytes, or the proof that none fits.

    Parameters
    ----------
    faithful
        Run the algorithm as published, with its defects: it may say that nothing fits when something does, and its
        choice may not be the fastest. The bound is then the sum of the least time of every node and edge, and a
        shortfall has the least memory that the algorithm saw.
    max_rows
        Rows of all lists together while they are joined, at most.

    Notes
    -----
    Memory is added to the lists only where the fastest choice does not fit. Graphs that no elimination reduces to
    single nodes, or whose lists get too long, are solved by `meshwise.strategies.operators.frontier.frontier`.

    Raises
    ------
    ListsTooLong
        If the published lists need more than ``max_rows`` rows.
    """
    if faithful:
        published = Elimination(graph, _published, rows, faithful=True)
        published.run()
        return published.chosen(limit)
    missing = shortfall(graph, limit)
    if missing is not None:
        return missing
    found = _exact(graph, None, _by_time, rows)
    if limit is None or (isinstance(found, Solution) and found.memory <= limit):
        return found or frontier(graph)
    return _exact(graph, limit, _with_memory, rows) or frontier(graph, limit)


def _exact(graph: CostGraph, limit: int | None, simplify: Simplify, rows: int) -> Solution | Shortfall | None:
    """Return what exact eliminations choose; None if they do not reduce the graph, or their lists get too long."""
    shrinking = Elimination(graph, simplify, rows, faithful=False)
    try:
        shrinking.run()
        return None if shrinking.edges else shrinking.chosen(limit)
    except ListsTooLong:
        return None


class Elimination:
    """A graph that shrinks by eliminations: the lists of costs of its remaining nodes and edges."""

    def __init__(self, graph: CostGraph, simplify: Simplify, rows: int, faithful: bool) -> None:
        self.graph, self.simplify, self.faithful = graph, simplify, faithful
        self.most_rows, self.num_rows = rows, 0
        self.nodes = {node: _node_list(graph, node) for node in range(len(graph.times))}
        self.edges: dict[tuple[int, int], list[CostList]] = {}
        self.before: dict[int, set[int]] = {node: set() for node in self.nodes}
        self.after: dict[int, set[int]] = {node: set() for node in self.nodes}
        for source, target, times in graph.edges:
            self._add(_edge_list(source, target, times))

    def run(self) -> None:
        """Apply eliminations until none applies: at best only nodes without edges are left."""
        kinds = (self._operator, self._edge, self._merge, self._contract, self._triangle, self._star, self._last)
        while any(kind() for kind in kinds):
            check_deadline()

    def chosen(self, limit: int | None) -> Solution | Shortfall:
        """Return the best combination of rows of the remaining lists, as a choice for every node."""
        total = CostList((), np.zeros((0, 1), dtype=np.int64), np.zeros((4, 1), dtype=np.int64))
        for each in self.nodes.values():
            alone = each if self.faithful else self._simplified(each, ())
            total = self._joined(total, CostList((), alone.choices[:0], alone.costs, _through(alone)))
            total = total if self.faithful else self._simplified(total, ())
        memory = total.costs[2] + total.costs[3]
        fits = np.flatnonzero(memory <= limit) if limit is not None else np.arange(len(memory))
        if limit is not None and not len(fits):
            choice = self._replayed(total, int(memory.argmin()))
            return Shortfall(choice, self.graph.memory(choice), limit)
        choice = self._replayed(total, int(fits[total.costs[:2, fits].sum(axis=0).argmin()]))
        time = self.graph.time(choice)
        return Solution(choice, time, self.graph.memory(choice), least_time(self.graph) if self.faithful else time)

    def _replayed(self, last: CostList, row: int) -> tuple[int, ...]:
        """Return the choice of every node behind a row, by following its decisions back to the lists of nodes."""
        choice = [0] * len(self.graph.times)
        waiting = [(last, row)]
        while waiting:
            now, row = waiting.pop()
            if not now.decisions and len(now.nodes) == 1:
                choice[now.nodes[0]] = int(now.choices[0, row])
            waiting += [(other, int(rows[row])) for other, rows in now.decisions]
        return tuple(choice)

    def _operator(self) -> bool:
        """Replace u -> w -> v by an edge u -> v, where w has no other neighbours."""
        for node in self.nodes:
            before, after = self._before(node), self._after(node)
            if len(before) == len(after) == 1 and self._single(before[0], node) and self._single(node, after[0]):
                first, second = before[0], after[0]
                joined = self._joined(self._taken(first, node), self.nodes.pop(node))
                joined = self._joined(joined, self._taken(node, second))
                self._add(self._simplified(joined, (first, second)))
                return True
        return False

    def _edge(self) -> bool:
        """Replace two edges between the same nodes by one."""
        for ends, lists in self.edges.items():
            if len(lists) > 1:
                self.edges[ends] = [self._simplified(self._joined(lists[0], lists[1]), ends), *lists[2:]]
                return True
        return False

    def _merge(self) -> bool:
        """Absorb a source into its only consumer, which has other producers."""
        for node in self.nodes:
            after = self._after(node)
            if not self._before(node) and len(after) == 1 and len(self._before(after[0])) > 1:
                return self._absorb(after[0], (node, after[0]))
        return False

    def _contract(self) -> bool:
        """Absorb a sink into its only producer, which has other consumers."""
        for node in self.nodes:
            before = self._before(node)
            if not self._after(node) and len(before) == 1 and len(self._after(before[0])) > 1:
                return self._absorb(before[0], (before[0], node))
        return False

    def _last(self) -> bool:
        """Absorb the source of a component of two nodes into its consumer."""
        for source, target in self.edges:
            alone = not self._before(source) and not self._after(target)
            if alone and self._before(target) == (source,) and self._after(source) == (target,):
                return self._absorb(target, (source, target))
        return False

    def _triangle(self) -> bool:
        """Remove a source with two consumers between which there is an edge."""
        for node in self.nodes:
            after = self._after(node)
            if not self._before(node) and len(after) == 2 and after in self.edges:
                return self._fold(node, after)
        return False

    def _star(self) -> bool:
        """Remove a source with several consumers; without ``faithful`` only one with two."""
        for node in self.nodes:
            after = self._after(node)
            if not self._before(node) and (len(after) > 1 if self.faithful else len(after) == 2):
                return self._fold(node, after)
        return False

    def _fold(self, node: int, after: tuple[int, ...]) -> bool:
        """Replace a source by an edge between its consumers; as published fold it into the list of the first one."""
        joined = self._joined(self.nodes.pop(node), self._taken(node, after[0]))
        if not self.faithful:
            joined = self._joined(joined, self._taken(node, after[1]))
            self._add(self._simplified(joined, (after[0], after[1])))
            return True
        for other in after[1:]:
            joined = self._simplified(self._joined(joined, self._taken(node, other)), (node, after[0]))
        self.nodes[after[0]] = self._simplified(self._joined(self.nodes[after[0]], joined), (after[0],))
        return True

    def _absorb(self, node: int, ends: tuple[int, int]) -> bool:
        """Join the edge ``ends`` and the node at its other end into the list of ``node``."""
        other = ends[0] if ends[1] == node else ends[1]
        joined = self._joined(self._joined(self.nodes.pop(other), self._taken(*ends)), self.nodes[node])
        self.nodes[node] = self._simplified(joined, (node,))
        return True

    def _add(self, edge: CostList) -> None:
        source, target = edge.nodes
        self.edges.setdefault((source, target), []).append(edge)
        self.after[source].add(target)
        self.before[target].add(source)

    def _taken(self, source: int, target: int) -> CostList:
        """Remove an edge and return its list; parallel edges are joined."""
        first, *others = self.edges.pop((source, target))
        self.after[source].discard(target)
        self.before[target].discard(source)
        for other in others:
            first = self._simplified(self._joined(first, other), (source, target))
        return first

    def _single(self, source: int, target: int) -> bool:
        return len(self.edges[source, target]) == 1

    def _before(self, node: int) -> tuple[int, ...]:
        return tuple(sorted(self.before[node]))

    def _after(self, node: int) -> tuple[int, ...]:
        return tuple(sorted(self.after[node]))

    def _simplified(self, given: CostList, nodes: tuple[int, ...]) -> CostList:
        return given.rows(self.simplify(given.key(nodes, self.graph.sizes), given.costs), nodes)

    def _joined(self, first: CostList, second: CostList) -> CostList:
        """Return the list of all pairs of rows that agree on the nodes which both lists have."""
        shared = tuple(node for node in first.nodes if node in second.nodes)
        own = first.key(shared, self.graph.sizes)
        keys = second.key(shared, self.graph.sizes)
        order = np.argsort(keys, kind="stable")
        starts, ends = (np.searchsorted(keys[order], own, side=side) for side in ("left", "right"))
        counts = ends - starts
        self.num_rows += int(counts.sum())
        if self.num_rows > self.most_rows:
            raise ListsTooLong(f"lists of costs have at most {self.most_rows} rows in all, got {self.num_rows}")
        # a join by sorting: each row of the first list, once for each row of the second one with its key
        left = np.repeat(np.arange(len(own)), counts)
        right = order[np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)]
        new = [place for place, node in enumerate(second.nodes) if node not in first.nodes]
        nodes = first.nodes + tuple(second.nodes[place] for place in new)
        choices = np.concatenate([first.choices[:, left], second.choices[new][:, right]])
        costs = first.costs[:, left] + second.costs[:, right]
        # transient bytes are not there at the same time: the larger counts, not the sum
        costs[3] = np.maximum(first.costs[3, left], second.costs[3, right])
        return CostList(nodes, choices, costs, ((first, left), (second, right)))


def _through(given: CostList) -> tuple[tuple[CostList, IntArray], ...]:
    """Return the decisions of a list whose rows are the rows of ``cost_list``."""
    return ((given, np.arange(given.costs.shape[1])),)


def _node_list(graph: CostGraph, node: int) -> CostList:
    times = graph.times[node]
    costs = np.stack([times, np.zeros_like(times), graph.kept[node], graph.transient[node]])
    return CostList((node,), np.arange(len(times))[None], costs)


def _edge_list(source: int, target: int, times: IntArray) -> CostList:
    costs = np.zeros((4, times.size), dtype=np.int64)
    costs[1] = times.ravel()
    return CostList((source, target), np.indices(times.shape).reshape(2, -1), costs)


def _published(group: IntArray, costs: IntArray) -> IntArray:
    """Return the rows that none beats in ticks of nodes and ticks of edges, as published."""
    return undominated(group, costs[0], costs[1])


def _by_time(group: IntArray, costs: IntArray) -> IntArray:
    """Return the fastest row of every group."""
    return undominated(group, costs[0] + costs[1])


def _with_memory(group: IntArray, costs: IntArray) -> IntArray:
    """Return the rows that none beats in time, kept bytes and transient bytes."""
    return undominated(group, costs[0] + costs[1], costs[2], costs[3])
