"""Why a program cannot finish: the cycle of tasks that wait for each other."""

from collections.abc import Sequence

from simulator.program import Program, Task, dependencies


class Deadlock(ValueError):
    """A program whose order of tasks cannot finish; the message names the cycle."""


def deadlock(program: Program, finished: Sequence[bool]) -> Deadlock:
    """Return the error that names a wait-for cycle among the tasks that did not finish."""
    successors, _ = dependencies(program.tasks, len(program.streams))
    blocker: dict[int, int] = {}
    for index, following in enumerate(successors):
        if not finished[index]:
            for successor in following:
                blocker.setdefault(successor, index)
    current = next(index for index, done in enumerate(finished) if not done)
    path: dict[int, None] = {}
    while current not in path:
        path[current] = None
        current = blocker[current]
    cycle = list(path)[list(path).index(current) :]
    names = [describe(program, program.tasks[index]) for index in cycle[:12]]
    more = f" and {len(cycle) - 12} more" if len(cycle) > 12 else ""
    blocked = sum(not done for done in finished)
    return Deadlock(
        f"{blocked} tasks wait for each other: {' waits for '.join(names)}{more}, which waits for the first"
    )


def describe(program: Program, task: Task) -> str:
    """Return a task in words: class, what, stage and microbatch."""
    classes = {program.streams[stream].rank_class for stream in task.streams}
    who = " and ".join(program.rank_classes[index].name for index in sorted(classes))
    microbatch = f" of microbatch {task.origin.microbatch}" if task.origin.microbatch >= 0 else ""
    return f"[{who}: {task.kind}{microbatch} on stage {task.origin.stage}]"
