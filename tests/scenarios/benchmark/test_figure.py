"""Figures of the program's own speed: rates reach a goal from above, times from below, and the best run counts."""

import time

import pytest

from meshwise.scenarios.benchmark.figure import Figure, measure_best, measure_seconds


@pytest.mark.parametrize(
    ("value", "unit", "goal", "reached"),
    [
        (10.0, "tasks/s", 9.0, True),
        (10.0, "tasks/s", 11.0, False),
        (10.0, "s", 11.0, True),
        (10.0, "s", 9.0, False),
        (10.0, "MB", 10.0, True),
        (10.0, "s", None, True),
    ],
)
def test_a_goal(value: float, unit: str, goal: float | None, reached: bool) -> None:
    assert Figure("f", value, unit, goal, "").reached == reached


def test_the_best_run_counts_in_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    takes = iter([5.0, 2.0, 3.0, 1.0])

    def work() -> None:
        clock[0] += next(takes)

    assert measure_best(work) == 2.0
    assert measure_seconds(work) == 1.0
