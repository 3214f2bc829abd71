"""Which tests are slow: seconds of tests and of what files set up, as the suite took them last, in ``durations.json``.

``pytest -n 2 --dist loadfile -m "not long" --measure-durations`` writes them anew.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
SLOW = 1.0
"""Seconds from which a test, with all its parameters, is left to the second part of the suite."""
EVERY_CHANGE = 20.0
"""Seconds of one test that every change is checked with: so many of its cases, evenly chosen, or one."""


class Durations:
    """A plugin that adds up what tests take, and writes those that are slow when all are done."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, bool, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test took, or its fixtures."""
        self.reports.append((report.nodeid, report.when == "call", report.duration))

    def pytest_sessionfinish(self) -> None:
        """Write what is slow."""
        FILE.write_text(json.dumps(slow(self.reports), indent=0) + "\n")


def slow(reports: Iterable[tuple[str, bool, float]]) -> dict[str, float]:
    """Return the seconds of slow tests, and of slow files: those whose fixtures take long.

    Parameters
    ----------
    reports
        Name of a test, whether it is of the test itself, and seconds.

    >>> slow([("a.py::test_x[1]", True, 0.8), ("a.py::test_x[2]", True, 0.8), ("b.py::test_y", False, 3.0)])
    {'a.py::test_x': 1.6, 'b.py': 3.0}
    """
    seconds: Counter[str] = Counter()
    for test, itself, spent in reports:
        seconds[name(test) if itself else file(test)] += spent
    return {each: round(spent, 1) for each, spent in sorted(seconds.items()) if spent >= SLOW}


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the tests that are slow, and all tests of slow files."""
    known = json.loads(FILE.read_text()).keys()
    for item in items:
        if known & {name(item.nodeid), file(item.nodeid)}:
            item.add_marker(pytest.mark.slow)


def mark_long(items: list[pytest.Item]) -> None:
    """Mark as long the cases of a test that are more than every change is checked with."""
    known: dict[str, float] = json.loads(FILE.read_text())
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(name(item.nodeid), []).append(item)
    for test, rows in cases.items():
        for number in sorted(set(range(len(rows))) - sample_cases(len(rows), known.get(test, 0.0))):
            rows[number].add_marker(pytest.mark.long)


def sample_cases(cases: int, seconds: float) -> set[int]:
    """Return which of so many cases, which take so many seconds together, every change is checked with.

    >>> sorted(sample_cases(6, 60.0)), sorted(sample_cases(3, 1.0)), sorted(sample_cases(2, 100.0))
    ([0, 3], [0, 1, 2], [0])
    """
    count = cases if seconds <= EVERY_CHANGE else max(1, int(cases * EVERY_CHANGE / seconds))
    return {number * cases // count for number in range(count)}


def name(test: str) -> str:
    """Return the name of a test without its parameters.

    >>> name("tests/simulator/engine/test_engine.py::test_order[two streams]")
    'tests/simulator/engine/test_engine.py::test_order'
    """
    return re.sub(r"\[.*", "", test, flags=re.DOTALL)


def file(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]
