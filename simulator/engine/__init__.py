"""Evaluators of one program: SimPy's discrete events, the longest path, and a bound."""

from collections.abc import Callable

from meshwise.simulator.engine import longest_path
from meshwise.simulator.engine.bound import step_bound
from meshwise.simulator.engine.steady_state import window
from meshwise.simulator.engine.step_graph import Deadlock
from meshwise.simulator.program import IntArray, Program
from meshwise.simulator.timeline import Timeline, simulated


def _by_events(program: Program) -> tuple[IntArray, IntArray]:
    """Return starts and ends by SimPy's events; it is imported when it runs, for ranks that train need no SimPy."""
    from meshwise.simulator.engine.discrete_event import finish_times

    return finish_times(program)


ENGINES: dict[str, Callable[[Program], tuple[IntArray, IntArray]]] = {
    "discrete_event": _by_events,
    "longest_path": longest_path.finish_times,
}

__all__ = ["ENGINES", "Deadlock", "simulate", "step_bound", "step_ticks", "step_time"]


def step_time(program: Program, engine: str = "discrete_event") -> float:
    """Return the seconds of one step: the end of its last task, or in the steady state of many what one adds.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    return window(program, _engine(engine)(program)[1]).step_time


def step_ticks(program: Program, engine: str = "discrete_event") -> int:
    """Return the whole ticks of one step, as `step_time` its seconds."""
    return window(program, _engine(engine)(program)[1]).ticks


def simulate(program: Program, engine: str = "discrete_event") -> Timeline:
    """Return what happens when ``program`` runs: spans, memory, links and step time.

    Raises
    ------
    Deadlock
        Where the order of tasks cannot finish; the message names the cycle.
    """
    starts, ends = _engine(engine)(program)
    return simulated(program, starts, ends, engine, window(program, ends) if program.steps is not None else None)


def _engine(name: str) -> Callable[[Program], tuple[IntArray, IntArray]]:
    if name not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}, met {name}")
    return ENGINES[name]
