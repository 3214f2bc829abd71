"""A program compiled for the engines: successors, waiting counts, durations, shared transfers."""

from collections.abc import Hashable
from dataclasses import dataclass

from simulator.network import Bundle, bundle
from simulator.program import Program, Task, dependencies
from simulator.units import TICKS_PER_SECOND


@dataclass(frozen=True)
class StepGraph:
    """What the engines run.

    Parameters
    ----------
    successors, waiting
        Tasks behind each task, and how many it waits for.
    durations
        Ticks of each task where nothing contends with it.
    latencies
        Ticks before the bytes of a contended task start to flow (its whole duration otherwise).
    bundles
        What a task moves over ports that other streams use too; ``None`` for all others.
    """

    successors: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...]
    durations: tuple[int, ...]
    latencies: tuple[int, ...]
    bundles: tuple[Bundle | None, ...]
    capacity: dict[Hashable, float]


def compile_program(program: Program) -> StepGraph:
    """Return the step graph of a program.

    A port used by one stream only is never contended, because a stream runs its tasks one
    after another: such transfers become plain durations, exactly.
    """
    successors, waiting = dependencies(program.tasks, len(program.streams))
    capacity: dict[Hashable, float] = {port: link.bandwidth for port, link in program.links}
    users: dict[Hashable, set[int]] = {}
    for task in program.tasks:
        for transfer in task.transfers:
            users.setdefault(transfer.port, set()).update(task.streams[:1])
    shared = {port for port, streams in users.items() if len(streams) > 1}
    known: dict[tuple[Hashable, ...], Bundle] = {}
    durations, latencies, bundles = [], [], []
    for task in program.tasks:
        shape = _bundle(task, capacity, known)
        contended = shape is not None and any(port in shared for port, _ in shape.shares)
        total = task.duration + (shape.solo_ticks if shape else 0)
        durations.append(total)
        latencies.append(task.duration if contended else total)
        bundles.append(shape if contended else None)
    return StepGraph(
        tuple(map(tuple, successors)), tuple(waiting), tuple(durations), tuple(latencies), tuple(bundles), capacity
    )


def _bundle(task: Task, capacity: dict[Hashable, float], known: dict[tuple[Hashable, ...], Bundle]) -> Bundle | None:
    if not task.transfers:
        return None
    if task.transfers not in known:
        known[task.transfers] = bundle(task.transfers, capacity, TICKS_PER_SECOND)
    return known[task.transfers]
