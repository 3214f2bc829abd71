"""How far the longest path is the simulation: up to where the first two transfers meet.

Before that instant nothing has shared a link, so that events happen exactly when the
longest path says. A simulation may begin there, with what has ended by then taken as done.
"""

from typing import NamedTuple

import numpy as np

from simulator.engine.longest_path import Walk
from simulator.engine.step_graph import StepGraph
from simulator.program import IntArray, ragged
from simulator.ragged import expand


class Head(NamedTuple):
    """A step up to a tick: ``ends`` of the tasks that are done, -1 for all others.

    ``ready`` are the tasks that wait for none of the others, each with the tick ``due`` at which it ends
    or, where others can disturb it, its bytes begin to move. ``waiting`` counts what every task still
    waits for.
    """

    time: int
    ends: IntArray
    waiting: IntArray
    ready: IntArray
    due: IntArray


def fast_forward(graph: StepGraph, walk: Walk) -> Head | None:
    """Return a step up to where transfers first meet; ``None`` where they never do, and the walk is exact."""
    due = walk.starts + graph.latencies
    begin = _last_quiet_tick(graph, due, walk.ends)
    if begin is None:
        return None
    done = due < begin
    ends = np.where(done, walk.ends, -1)
    behind = np.repeat(done, np.diff(graph.successor_start))
    waiting = graph.waiting - np.bincount(graph.successors[behind], minlength=graph.num_tasks)
    ready = np.flatnonzero(~done & (waiting == 0))
    return Head(begin, ends, waiting, ready, due[ready])


def _last_quiet_tick(graph: StepGraph, due: IntArray, ends: IntArray) -> int | None:
    """Return the last tick at which no transfer is on its way, before two of them share a link."""
    tasks = np.flatnonzero((graph.flow >= 0) & (ends > due))
    meeting = _first_meeting(graph, tasks, due, ends)
    if meeting is None:
        return None
    order = np.argsort(due[tasks], kind="stable")
    begins, over = due[tasks][order], np.maximum.accumulate(ends[tasks][order])
    quiet = np.append(True, begins[1:] >= over[:-1])
    return int(begins[quiet & (begins <= meeting)].max())


def _first_meeting(graph: StepGraph, tasks: IntArray, due: IntArray, ends: IntArray) -> int | None:
    """Return the first tick at which a transfer begins on a link that another one is using."""
    link_start, link_of = ragged([[link for link, _ in shape.shares] for shape in graph.bundles])
    row, index = expand(link_start, graph.flow[tasks])
    task, link = tasks[row], link_of[index]
    order = np.lexsort((due[task], link))
    task, link = task[order], np.unique(link[order], return_inverse=True)[1]
    span = int(ends.max(initial=0)) + 1
    if (int(link.max(initial=0)) + 1) * span >= 2**62:
        return 0  # too long to be told apart on one axis
    over = np.maximum.accumulate(ends[task] + link * span)
    meets = due[task][1:] + link[1:] * span < over[:-1]
    found = due[task][1:][meets & (link[1:] == link[:-1])]
    return int(found.min()) if len(found) else None
