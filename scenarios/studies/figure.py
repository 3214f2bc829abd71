"""A figure of the program's own speed, and how CPU time is taken."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: what was measured, and what is asked: a rate at the least, a time or a size at the most.

    ``goal`` is None where nothing is asked; ``detail`` says what was run.
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


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of one run, in seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def best(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the least CPU time of several runs, in seconds."""
    return min(seconds(work) for _ in range(repeats))
