"""The step as a longest path: exact where no port is shared, a lower bound where one is."""

from simulator.engine.deadlock import deadlock
from simulator.engine.step_graph import compile_program
from simulator.program import Program


def finish_times(program: Program) -> tuple[list[int], list[int]]:
    """Return start and end of every task in ticks, as if no two transfers shared a port.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    graph = compile_program(program)
    waiting = list(graph.waiting)
    starts, ends = [0] * len(waiting), [-1] * len(waiting)
    ready = [task for task, count in enumerate(waiting) if not count]
    while ready:
        task = ready.pop()
        end = ends[task] = starts[task] + graph.durations[task]
        for successor in graph.successors[task]:
            if end > starts[successor]:
                starts[successor] = end
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    if -1 in ends:
        raise deadlock(program, [end >= 0 for end in ends])
    return starts, ends
