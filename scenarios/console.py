"""What commands print, results on stdout and everything else on stderr, and their exit codes."""

import json
import math
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.simulator.files import escape_text
from meshwise.simulator.units import format_count

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario

DONE = 0
"""The exit code of a command that succeeded."""
FAILED = 1
BAD_INPUT = 2
NOTHING_FITS = 3


def emit(document: Any) -> None:
    """Print one JSON document; numbers that are not finite become null."""
    print(json.dumps(_replace_infinite(document), indent=2, allow_nan=False, default=str))


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _replace_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def note(text: str) -> None:
    """Print a remark on stderr, with unsafe characters escaped."""
    print(escape_text(text), file=sys.stderr)


def list_remarks(scenario: "Scenario") -> list[tuple[str, str]]:
    """Return the remarks about a scenario as rows to print before its figures."""
    return [("remark", line) for line in scenario.remarks]


def print_rows(rows: Iterable[tuple[str, Any]]) -> None:
    """Print names and values in two columns."""
    pairs = [(escape_text(name), escape_text(str(value))) for name, value in rows]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table under a header; all columns but the first are aligned right."""
    cells = [[escape_text(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        label, *values = row
        line = [f"{label:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(values, widths[1:], strict=True))]
        print("  ".join(line).rstrip())


LISTED = 16
"""Largest number of hosts whose commands are printed."""


def tell_hosts(script: Path, nodes: int, processes: int, first_host: str, *, as_json: bool) -> None:
    """Print the command that each of several hosts runs: a script with the number of the host."""
    commands = [f"sh {shlex.quote(str(script.resolve()))} {index}" for index in range(nodes)]
    if as_json:
        emit({"nodes": nodes, "processes": processes, "script": str(script), "commands": commands})
        return
    print(f"{format_count(nodes, 'host')}, {format_count(processes, 'rank')} on each; host 0 is {first_host}")
    for index, command in list(enumerate(commands))[:LISTED]:
        print(f"host {index}: {command}")
    if nodes > LISTED:
        print(f"... and so on to host {nodes - 1}")


class Ticker:
    """A progress line on stderr that overwrites itself, at most five times a second and only on a terminal."""

    def __init__(self) -> None:
        self.last_shown = 0.0
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show ``text`` in place of the line before."""
        now = time.monotonic()
        if self.is_terminal and now - self.last_shown >= 0.2:
            self.last_shown = now
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self.is_terminal and self.last_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
