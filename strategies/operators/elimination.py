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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.operators.bucket_elimination import find_undominated
from meshwise.strategies.operators.cost_graph import (
    CostGraph,
    IntArray,
    Shortfall,
    Solution,
    compute_time_bound,
    find_shortfall,
)
from meshwise.strategies.operators.frontier import frontier

RowFilter = Callable[[IntArray, IntArray], IntArray]
"""Returns the rows of a list that are worth keeping, given the group and the costs of each row."""


class TooManyRowsError(ValueError):
    """Raised where lists of costs would have more rows than allowed."""


@dataclass(frozen=True, eq=False)
class CostList:
    """Costs of partial plans, by the choices of some nodes.

    ``nodes`` are those whose choices, of shape (nodes, rows), distinguish rows. ``costs`` has the shape (4, rows):
    ticks of nodes, ticks of edges, bytes kept, bytes transient. ``decisions`` are the lists that this one was made
    from, and for each row its row there.
    """

    nodes: tuple[int, ...]
    choices: IntArray
    costs: IntArray
    decisions: tuple[tuple["CostList", IntArray], ...] = ()

    def number_rows(self, nodes: tuple[int, ...], sizes: tuple[int, ...]) -> IntArray:
        """Return for every row one number of its choices of ``nodes``."""
        result = np.zeros(self.costs.shape[1], dtype=np.int64)
        for node in nodes:
            result = result * sizes[node] + self.choices[self.nodes.index(node)]
        return result

    def select_rows(self, rows: IntArray, nodes: tuple[int, ...]) -> "CostList":
        """Return some of the rows as a list over ``nodes`` only."""
        positions = [self.nodes.index(node) for node in nodes]
        return CostList(nodes, self.choices[positions][:, rows], self.costs[:, rows], ((self, rows),))


def eliminate(
    graph: CostGraph, limit: int | None = None, *, faithful: bool = False, max_rows: int = 2**23
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
    TooManyRowsError
        If the published lists need more than ``max_rows`` rows.
    """
    if faithful:
        elimination = Elimination(graph, _filter_as_published, max_rows, faithful=True)
        elimination.run()
        return elimination.choose_best(limit)
    shortfall = find_shortfall(graph, limit)
    if shortfall is not None:
        return shortfall
    solution = _solve_exactly(graph, None, _filter_by_time, max_rows)
    if limit is None or (isinstance(solution, Solution) and solution.memory <= limit):
        return solution or frontier(graph)
    return _solve_exactly(graph, limit, _filter_with_memory, max_rows) or frontier(graph, limit)


def _solve_exactly(
    graph: CostGraph, limit: int | None, simplify: RowFilter, max_rows: int
) -> Solution | Shortfall | None:
    """Return what exact eliminations choose; None if they do not reduce the graph, or their lists get too long."""
    elimination = Elimination(graph, simplify, max_rows, faithful=False)
    try:
        elimination.run()
        return None if elimination.edges else elimination.choose_best(limit)
    except TooManyRowsError:
        return None


class Elimination:
    """A graph that shrinks by eliminations: the lists of costs of its remaining nodes and edges."""

    def __init__(self, graph: CostGraph, simplify: RowFilter, max_rows: int, faithful: bool) -> None:
        self.graph, self.simplify, self.faithful = graph, simplify, faithful
        self.max_rows, self.num_rows = max_rows, 0
        self.nodes = {node: _build_node_list(graph, node) for node in range(len(graph.times))}
        self.edges: dict[tuple[int, int], list[CostList]] = {}
        self.producers: dict[int, set[int]] = {node: set() for node in self.nodes}
        self.consumers: dict[int, set[int]] = {node: set() for node in self.nodes}
        for source, target, times in graph.edges:
            self._add_edge(_build_edge_list(source, target, times))

    def run(self) -> None:
        """Apply eliminations until none applies: at best only nodes without edges are left."""
        reductions = (
            self._eliminate_operator,
            self._merge_edges,
            self._merge_source,
            self._contract_sink,
            self._remove_triangle,
            self._remove_star,
            self._absorb_last,
        )
        while any(reduction() for reduction in reductions):
            check_deadline()

    def choose_best(self, limit: int | None) -> Solution | Shortfall:
        """Return the best combination of rows of the remaining lists, as a choice for every node."""
        total = CostList((), np.zeros((0, 1), dtype=np.int64), np.zeros((4, 1), dtype=np.int64))
        for cost_list in self.nodes.values():
            reduced_list = cost_list if self.faithful else self._simplify_list(cost_list, ())
            own_rows = ((reduced_list, np.arange(reduced_list.costs.shape[1])),)
            total = self._join_lists(total, CostList((), reduced_list.choices[:0], reduced_list.costs, own_rows))
            total = total if self.faithful else self._simplify_list(total, ())
        memory = total.costs[2] + total.costs[3]
        fitting_rows = np.flatnonzero(memory <= limit) if limit is not None else np.arange(len(memory))
        if limit is not None and not len(fitting_rows):
            choice = self._replay_decisions(total, int(memory.argmin()))
            return Shortfall(choice, self.graph.memory(choice), limit)
        choice = self._replay_decisions(total, int(fitting_rows[total.costs[:2, fitting_rows].sum(axis=0).argmin()]))
        time = self.graph.time(choice)
        bound = compute_time_bound(self.graph) if self.faithful else time
        return Solution(choice, time, self.graph.memory(choice), bound)

    def _replay_decisions(self, final_list: CostList, row: int) -> tuple[int, ...]:
        """Return the choice of every node behind a row, by following its decisions back to the lists of nodes."""
        choice = [0] * len(self.graph.times)
        stack = [(final_list, row)]
        while stack:
            source_list, row = stack.pop()
            if not source_list.decisions and len(source_list.nodes) == 1:
                choice[source_list.nodes[0]] = int(source_list.choices[0, row])
            stack += [(parent_list, int(rows[row])) for parent_list, rows in source_list.decisions]
        return tuple(choice)

    def _eliminate_operator(self) -> bool:
        """Replace u -> w -> v by an edge u -> v, where w has no other neighbours."""
        for node, producers, consumers in self._list_nodes():
            if len(producers) != 1 or len(consumers) != 1:
                continue
            ends = in_edge, out_edge = (producers[0], node), (node, consumers[0])
            if all(len(self.edges[edge]) == 1 for edge in ends):
                cost_list = self._join_lists(self._pop_edge(*in_edge), self.nodes.pop(node))
                cost_list = self._join_lists(cost_list, self._pop_edge(*out_edge))
                self._add_edge(self._simplify_list(cost_list, (producers[0], consumers[0])))
                return True
        return False

    def _merge_edges(self) -> bool:
        """Replace two edges between the same nodes by one."""
        for ends, lists in self.edges.items():
            if len(lists) > 1:
                self.edges[ends] = [self._simplify_list(self._join_lists(lists[0], lists[1]), ends), *lists[2:]]
                return True
        return False

    def _merge_source(self) -> bool:
        """Absorb a source into its only consumer, which has other producers."""
        for node, producers, consumers in self._list_nodes():
            if not producers and len(consumers) == 1 and len(self.producers[consumers[0]]) > 1:
                return self._absorb_node(consumers[0], (node, consumers[0]))
        return False

    def _contract_sink(self) -> bool:
        """Absorb a sink into its only producer, which has other consumers."""
        for node, producers, consumers in self._list_nodes():
            if not consumers and len(producers) == 1 and len(self.consumers[producers[0]]) > 1:
                return self._absorb_node(producers[0], (producers[0], node))
        return False

    def _absorb_last(self) -> bool:
        """Absorb the source of a component of two nodes into its consumer."""
        for source, target in self.edges:
            is_component = not self.producers[source] and not self.consumers[target]
            if is_component and self.producers[target] == {source} and self.consumers[source] == {target}:
                return self._absorb_node(target, (source, target))
        return False

    def _remove_triangle(self) -> bool:
        """Remove a source with two consumers between which there is an edge."""
        for node, producers, consumers in self._list_nodes():
            if not producers and len(consumers) == 2 and consumers in self.edges:
                return self._fold_source(node, consumers)
        return False

    def _remove_star(self) -> bool:
        """Remove a source with several consumers; without ``faithful`` only one with two."""
        for node, producers, consumers in self._list_nodes():
            if not producers and (len(consumers) > 1 if self.faithful else len(consumers) == 2):
                return self._fold_source(node, consumers)
        return False

    def _fold_source(self, node: int, consumers: tuple[int, ...]) -> bool:
        """Replace a source by an edge between its consumers; as published fold it into the list of the first one."""
        cost_list = self._join_lists(self.nodes.pop(node), self._pop_edge(node, consumers[0]))
        if not self.faithful:
            cost_list = self._join_lists(cost_list, self._pop_edge(node, consumers[1]))
            self._add_edge(self._simplify_list(cost_list, (consumers[0], consumers[1])))
            return True
        for consumer in consumers[1:]:
            cost_list = self._join_lists(cost_list, self._pop_edge(node, consumer))
            cost_list = self._simplify_list(cost_list, (node, consumers[0]))
        cost_list = self._join_lists(self.nodes[consumers[0]], cost_list)
        self.nodes[consumers[0]] = self._simplify_list(cost_list, (consumers[0],))
        return True

    def _absorb_node(self, node: int, ends: tuple[int, int]) -> bool:
        """Join the edge ``ends`` and the node at its other end into the list of ``node``."""
        absorbed_node = ends[0] if ends[1] == node else ends[1]
        cost_list = self._join_lists(self.nodes.pop(absorbed_node), self._pop_edge(*ends))
        self.nodes[node] = self._simplify_list(self._join_lists(cost_list, self.nodes[node]), (node,))
        return True

    def _add_edge(self, edge: CostList) -> None:
        source, target = edge.nodes
        self.edges.setdefault((source, target), []).append(edge)
        self.consumers[source].add(target)
        self.producers[target].add(source)

    def _pop_edge(self, source: int, target: int) -> CostList:
        """Remove an edge and return its list; parallel edges are joined."""
        edge_list, *parallel_lists = self.edges.pop((source, target))
        self.consumers[source].discard(target)
        self.producers[target].discard(source)
        for parallel_list in parallel_lists:
            edge_list = self._simplify_list(self._join_lists(edge_list, parallel_list), (source, target))
        return edge_list

    def _list_nodes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield every node with its producers and its consumers."""
        for node in self.nodes:
            yield node, tuple(sorted(self.producers[node])), tuple(sorted(self.consumers[node]))

    def _simplify_list(self, cost_list: CostList, nodes: tuple[int, ...]) -> CostList:
        rows = self.simplify(cost_list.number_rows(nodes, self.graph.sizes), cost_list.costs)
        return cost_list.select_rows(rows, nodes)

    def _join_lists(self, left_list: CostList, right_list: CostList) -> CostList:
        """Return the list of all pairs of rows that agree on the nodes which both lists have."""
        shared_nodes = tuple(node for node in left_list.nodes if node in right_list.nodes)
        left_keys = left_list.number_rows(shared_nodes, self.graph.sizes)
        right_keys = right_list.number_rows(shared_nodes, self.graph.sizes)
        order = np.argsort(right_keys, kind="stable")
        starts, ends = (np.searchsorted(right_keys[order], left_keys, side=side) for side in ("left", "right"))
        counts = ends - starts
        self.num_rows += int(counts.sum())
        if self.num_rows > self.max_rows:
            raise TooManyRowsError(f"lists of costs have at most {self.max_rows} rows in all, got {self.num_rows}")
        # a join by sorting: each row of the first list, once for each row of the second one with its key
        left_rows = np.repeat(np.arange(len(left_keys)), counts)
        right_rows = order[
            np.arange(len(left_rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        ]
        new_positions = [position for position, node in enumerate(right_list.nodes) if node not in left_list.nodes]
        nodes = left_list.nodes + tuple(right_list.nodes[position] for position in new_positions)
        choices = np.concatenate([left_list.choices[:, left_rows], right_list.choices[new_positions][:, right_rows]])
        costs = left_list.costs[:, left_rows] + right_list.costs[:, right_rows]
        # transient bytes are not there at the same time: the larger counts, not the sum
        costs[3] = np.maximum(left_list.costs[3, left_rows], right_list.costs[3, right_rows])
        return CostList(nodes, choices, costs, ((left_list, left_rows), (right_list, right_rows)))


def _build_node_list(graph: CostGraph, node: int) -> CostList:
    times = graph.times[node]
    costs = np.stack([times, np.zeros_like(times), graph.kept_bytes[node], graph.transient_bytes[node]])
    return CostList((node,), np.arange(len(times))[None], costs)


def _build_edge_list(source: int, target: int, times: IntArray) -> CostList:
    costs = np.zeros((4, times.size), dtype=np.int64)
    costs[1] = times.ravel()
    return CostList((source, target), np.indices(times.shape).reshape(2, -1), costs)


def _filter_as_published(group: IntArray, costs: IntArray) -> IntArray:
    """Return the rows that none beats in ticks of nodes and ticks of edges, as published."""
    return find_undominated(group, costs[0], costs[1])


def _filter_by_time(group: IntArray, costs: IntArray) -> IntArray:
    """Return the fastest row of every group."""
    return find_undominated(group, costs[0] + costs[1])


def _filter_with_memory(group: IntArray, costs: IntArray) -> IntArray:
    """Return the rows that none beats in time, kept bytes and transient bytes."""
    return find_undominated(group, costs[0] + costs[1], costs[2], costs[3])
