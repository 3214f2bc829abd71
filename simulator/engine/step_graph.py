"""A program compiled for the engines: successors, waiting counts, durations, shared transfers."""

from collections.abc import Hashable
from dataclasses import dataclass

from simulator.cluster import Port
from simulator.network import Bundle, bundle
from simulator.program import Program, dependencies
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
    number = {port: index for index, (port, _) in enumerate(program.links)}
    capacity: dict[Hashable, float] = {number[port]: link.bandwidth for port, link in program.links}
    shapes = _shapes(program, number, capacity)
    shared = _shared_ports(program, shapes)
    durations, latencies, bundles = [], [], []
    for task in program.tasks:
        shape = shapes[id(task.transfers)] if task.transfers else None
        contended = shape is not None and any(port in shared for port, _ in shape.shares)
        total = task.duration + (shape.solo_ticks if shape else 0)
        durations.append(total)
        latencies.append(task.duration if contended else total)
        bundles.append(shape if contended else None)
    return StepGraph(
        tuple(map(tuple, successors)), tuple(waiting), tuple(durations), tuple(latencies), tuple(bundles), capacity
    )


def _shapes(program: Program, number: dict[Port, int], capacity: dict[Hashable, float]) -> dict[int, Bundle]:
    """Return the bundle of every tuple of transfers, by identity: tasks of a template share one."""
    shapes: dict[int, Bundle] = {}
    for task in program.tasks:
        if task.transfers and id(task.transfers) not in shapes:
            usage = [(number[transfer.port], transfer.size) for transfer in task.transfers]
            shapes[id(task.transfers)] = bundle(usage, capacity, TICKS_PER_SECOND)
    return shapes


def _shared_ports(program: Program, shapes: dict[int, Bundle]) -> set[Hashable]:
    """Return the ports that tasks of more than one stream use."""
    users: dict[tuple[int, int], None] = {}
    for task in program.tasks:
        if task.transfers:
            users[id(task.transfers), task.streams[0]] = None
    streams: dict[Hashable, set[int]] = {}
    for identity, stream in users:
        for port, _ in shapes[identity].shares:
            streams.setdefault(port, set()).add(stream)
    return {port for port, found in streams.items() if len(found) > 1}
