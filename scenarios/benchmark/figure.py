"""A figure of the program's own speed, and the measurement of CPU time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure and its goal: the least rate, or the largest time or size.

    ``goal`` is None where there is no goal; ``detail`` says what was run.
    """

    name: str
    value: float
    unit: str
    goal: float | None
    detail: str

    @property
    def reached(self) -> bool:
        """Whether the goal is reached: rates reach it from above, times and sizes from below."""
        if self.goal is None:
            return True
        return self.value >= self.goal if self.unit.endswith("/s") else self.value <= self.goal


def measure_call(work: Callable[[], _Result]) -> tuple[float, _Result]:
    """Return the CPU time of one call of ``work``, in seconds, and what it returns."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call of ``work``, in seconds."""
    return measure_call(work)[0]


def measure_best(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least CPU time of several calls of ``work``, in seconds."""
    return min(measure_seconds(work) for _ in range(repeats))
