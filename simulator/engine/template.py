"""The makespans of many steps that differ only in how long their tasks take."""

from dataclasses import dataclass

import numpy as np

from simulator.brief import brief
from simulator.engine.compiled import compiled, pays
from simulator.engine.longest_path import walk
from simulator.engine.step_graph import StepGraph
from simulator.program import IntArray

LANES = 32
"""Steps that a compiled loop walks side by side: their ends of 2,000 tasks fit a core's second cache."""

COLUMNS = 1024
"""Steps that NumPy walks side by side."""


@dataclass(frozen=True, eq=False)
class PathTemplate:
    """A step graph in topological order, between a source and a sink that take no time.

    Parameters
    ----------
    predecessor_start, predecessors
        The rows that end before row ``i`` starts, each above ``i``; row 0 is the source.
    slot
        Column of a duration table for every row; -1 for source and sink.
    """

    predecessor_start: IntArray
    predecessors: IntArray
    slot: IntArray

    __repr__ = brief()

    def makespans(self, tables: IntArray) -> IntArray:
        """Return the end in ticks of every step of ``tables`` [steps, slots], as if no link were shared."""
        tables = np.ascontiguousarray(tables, dtype=np.int64)
        if tables.ndim != 2 or tables.shape[1] <= self.slot.max():
            raise ValueError(f"a table of durations is [steps, {self.slot.max() + 1} slots], met {tables.shape}")
        if not pays(len(self.slot) * len(tables)):
            return self._by_columns(tables)
        ends = np.zeros((len(self.slot), LANES), np.int64)
        ticks = np.zeros((tables.shape[1] + 1, LANES), np.int64)
        result = np.empty(len(tables), np.int64)
        compiled(_walk_lanes)(self.predecessor_start, self.predecessors, self.slot, tables, ends, ticks, result)
        return result

    def _by_columns(self, tables: IntArray) -> IntArray:
        parts = [self._walk_columns(tables[first : first + COLUMNS]) for first in range(0, len(tables), COLUMNS)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _walk_columns(self, tables: IntArray) -> IntArray:
        ticks = np.vstack([tables.T, np.zeros((1, len(tables)), np.int64)])
        ends = np.zeros((len(self.slot), len(tables)), np.int64)
        start, slot = self.predecessor_start.tolist(), self.slot.tolist()
        before = self.predecessors.tolist()
        for row in range(1, len(slot)):
            end = ends[row]
            for index in range(start[row], start[row + 1]):
                np.maximum(end, ends[before[index]], out=end)
            end += ticks[slot[row]]
        result: IntArray = ends[-1]
        return result


def template(graph: StepGraph, slot_of_task: IntArray) -> PathTemplate:
    """Return the template of a graph whose task ``t`` takes what stands in slot ``slot_of_task[t]``.

    Raises
    ------
    ValueError
        Where tasks wait for each other in a cycle.
    """
    count, order = graph.num_tasks, walk(graph).order
    if len(order) < count:
        raise ValueError(f"tasks of a template wait for each other in no cycle, met {count - len(order)} that do")
    row = np.empty(count, np.int64)
    row[order] = np.arange(1, count + 1)
    degree = np.diff(graph.successor_start)
    roots, sinks = row[graph.waiting == 0], row[degree == 0]
    source = np.concatenate([np.repeat(row, degree), np.zeros_like(roots), sinks])
    target = np.concatenate([row[graph.successors], roots, np.full_like(sinks, count + 1)])
    start = np.zeros(count + 3, np.int64)
    np.cumsum(np.bincount(target, minlength=count + 2), out=start[1:])
    slot = np.concatenate([[-1], slot_of_task[order], [-1]]).astype(np.int64)
    return PathTemplate(start, source[np.lexsort((source, target))], slot)


def makespans(graph: StepGraph, slot_of_task: IntArray, tables: IntArray) -> IntArray:
    """Return the end in ticks of every step of ``tables`` [steps, slots], as if no link were shared.

    >>> columns = [np.array(column) for column in ([0, 1, 2, 2], [2, 2], [0, 0, 2], [0, 0, 0])]
    >>> graph = StepGraph(*columns, columns[-1], np.full(3, -1))
    >>> makespans(graph, np.array([0, 1, 0]), np.array([[3, 5], [6, 5]])).tolist()
    [8, 12]
    """
    return template(graph, slot_of_task).makespans(tables)


def _walk_lanes(
    predecessor_start: IntArray,
    predecessors: IntArray,
    slot: IntArray,
    tables: IntArray,
    ends: IntArray,
    ticks: IntArray,
    result: IntArray,
) -> None:
    """Fill ``result``; ``ends`` and ``ticks`` are zeros, one row of lanes a task and a slot, and one slot more."""
    steps, lanes = len(tables), ends.shape[1]
    for first in range(0, steps, lanes):
        width = min(lanes, steps - first)
        for lane in range(width):
            for column in range(tables.shape[1]):
                ticks[column, lane] = tables[first + lane, column]
        for row in range(1, len(slot)):
            end, duration = ends[row], ticks[slot[row]]
            end[:] = ends[predecessors[predecessor_start[row]]]
            for index in range(predecessor_start[row] + 1, predecessor_start[row + 1]):
                other = ends[predecessors[index]]
                for lane in range(lanes):
                    end[lane] = max(end[lane], other[lane])
            for lane in range(lanes):
                end[lane] += duration[lane]
        result[first : first + width] = ends[-1, :width]
