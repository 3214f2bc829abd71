"""Evaluators of one program: SimPy's discrete events, and the longest path."""

from collections.abc import Callable

from simulator.engine import discrete_event, longest_path
from simulator.engine.deadlock import Deadlock
from simulator.memory import MemoryProfile, sweep
from simulator.program import MemoryChange, Program
from simulator.timeline import Span, Timeline
from simulator.units import to_seconds

ENGINES: dict[str, Callable[[Program], tuple[list[int], list[int]]]] = {
    "discrete_event": discrete_event.finish_times,
    "longest_path": longest_path.finish_times,
}

__all__ = ["ENGINES", "Deadlock", "simulate", "step_time"]


def step_time(program: Program, engine: str = "discrete_event") -> float:
    """Return the seconds of one step; the end of its last task."""
    _, ends = _engine(engine)(program)
    return to_seconds(max(ends, default=0))


def simulate(program: Program, engine: str = "discrete_event") -> Timeline:
    """Return what happens when ``program`` runs: spans, memory and step time.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    starts, ends = _engine(engine)(program)
    spans = sorted(_spans(program, starts, ends), key=lambda span: (span.start, span.end, span.rank_class))
    return Timeline(
        source="simulated",
        rank_classes=program.rank_classes,
        spans=tuple(spans),
        memory=_memory(program, starts, ends),
        step_time=to_seconds(max(ends, default=0)),
        engine=engine,
    )


def _engine(name: str) -> Callable[[Program], tuple[list[int], list[int]]]:
    if name not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, met {name}")
    return ENGINES[name]


def _spans(program: Program, starts: list[int], ends: list[int]) -> list[Span]:
    spans = []
    for task, start, end in zip(program.tasks, starts, ends, strict=True):
        for index in task.streams:
            stream = program.streams[index]
            spans.append(
                Span(
                    stream.rank_class,
                    stream.kind,
                    task.kind,
                    task.origin.stage,
                    task.origin.microbatch,
                    task.origin.operators,
                    to_seconds(start),
                    to_seconds(end),
                )
            )
    return spans


def _memory(program: Program, starts: list[int], ends: list[int]) -> tuple[MemoryProfile, ...]:
    changes: list[list[tuple[float, MemoryChange]]] = [[] for _ in program.rank_classes]
    for task, start, end in zip(program.tasks, starts, ends, strict=True):
        for change in task.acquired:
            changes[change.rank_class].append((to_seconds(start), change))
        for change in task.released:
            changes[change.rank_class].append((to_seconds(end), change))
    return tuple(
        sweep(index, program.capacity, program.resident, changes[index]) for index in range(len(program.rank_classes))
    )
