"""Evaluators of a program: discrete events on SimPy, the longest path, and a lower bound."""

from collections.abc import Callable

from meshwise.simulator.engine import longest_path
from meshwise.simulator.engine.bound import step_bound
from meshwise.simulator.engine.steady_state import find_window
from meshwise.simulator.engine.step_graph import Deadlock
from meshwise.simulator.program import IntArray, Program
from meshwise.simulator.timeline import Timeline, build_timeline


def _run_events(program: Program) -> tuple[IntArray, IntArray]:
    """Return start and end of every task in ticks by discrete events.

    SimPy is imported here and not above: ranks that train import this package, and do not need it.
    """
    from meshwise.simulator.engine.discrete_event import finish_times

    return finish_times(program)


ENGINES: dict[str, Callable[[Program], tuple[IntArray, IntArray]]] = {
    "discrete_event": _run_events,
    "longest_path": longest_path.finish_times,
}

__all__ = ["ENGINES", "Deadlock", "simulate", "step_bound", "step_ticks", "step_time"]


def step_time(program: Program, engine: str = "discrete_event") -> float:
    """Return the seconds of one step: the end of its last task or, in a program of several steps, what one more adds.

    Raises
    ------
    Deadlock
        If tasks wait for each other in a cycle, which the message names.
    """
    return find_window(program, _find_engine(engine)(program)[1]).step_time


def step_ticks(program: Program, engine: str = "discrete_event") -> int:
    """Return the time of one step as `step_time` does, in whole ticks."""
    return find_window(program, _find_engine(engine)(program)[1]).ticks


def simulate(program: Program, engine: str = "discrete_event") -> Timeline:
    """Return the timeline of ``program``: spans, memory, links and step time.

    Raises
    ------
    Deadlock
        If tasks wait for each other in a cycle, which the message names.
    """
    starts, ends = _find_engine(engine)(program)
    return build_timeline(
        program, starts, ends, engine, find_window(program, ends) if program.steps is not None else None
    )


def _find_engine(name: str) -> Callable[[Program], tuple[IntArray, IntArray]]:
    if name not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, met {name}")
    return ENGINES[name]
