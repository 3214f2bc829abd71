"""Results as tables for the terminal, made from the mappings that ``--json`` prints."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Table

from meshwise.simulator.files import escaped
from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_size, format_time

Formatter = Callable[[Any], str]
_NONE = "-"


def console() -> Console:
    """Return where tables are printed: stdout, and wide where that is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def escape(text: str) -> str:
    """Return text that rich prints literally: no markup, no control characters."""
    return markup.escape(escaped(text))


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with three digits.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * fraction:.3g} %"


def count(number: float) -> str:
    """Return a number with thousands separators.

    >>> count(12345.6)
    '12,346'
    """
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:,.3g}"


def yes_or_no(value: bool) -> str:
    """Return ``yes`` or ``no``."""
    return "yes" if value else "no"


def busiest_link(link: Mapping[str, Any]) -> str:
    """Return one line on how busy a link is.

    >>> busiest_link({"name": "nic 0 out", "count": 1024, "bandwidth": 24e9, "utilisation": 0.43})
    'nic 0 out (x1024), 43 % of 24 GB/s'
    """
    alike = f" (x{link['count']})" if link["count"] > 1 else ""
    return f"{link['name']}{alike}, {percent(link['utilisation'])} of {format_bandwidth(link['bandwidth'])}"


def between(formatter: Formatter) -> Formatter:
    """Return a formatter of intervals that formats both ends by ``formatter``.

    >>> between(format_time)((1.5, 2.5))
    '1.5 s to 2.5 s'
    """
    return lambda ends: " to ".join(map(formatter, ends))


_RESULT: tuple[tuple[str, str, Formatter], ...] = (
    ("step_time", "step time", format_time),
    ("step_time_interval", "90 % of steps like it", between(format_time)),
    ("tokens_per_second", "tokens per second", count),
    ("tokens_per_second_per_device", "tokens per second and device", count),
    ("model_flops_per_second_per_device", "model FLOP/s per device", format_compute_rate),
    ("mfu", "model FLOP utilisation", percent),
    ("fits", "fits in memory", yes_or_no),
    ("out_of_memory", "probability of running out of memory", percent),
    ("peak_memory", "peak memory", format_size),
    ("peak_memory_interval", "90 % of peaks", between(format_size)),
    ("memory_usable", "usable memory of a device", format_size),
    ("memory_capacity", "of the memory that is reported", format_size),
    ("bubble", "devices idle (bubble)", percent),
    ("bottleneck", "busiest link", busiest_link),
    ("engine", "engine", str),
    ("tasks", "tasks", count),
    ("classes", "rank classes", count),
    ("ranks", "ranks", count),
    ("wall_time", "time to simulate", format_time),
)
_MEMORY = {
    **{name: name for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")},
    "host_peak": "whole host",
}
_MOST_LINKS, _MOST_ASSUMPTIONS = 6, 5
_NUMBER_OR_DIRECTION = re.compile(r"\d+| (in|out|up|down)$|[+-]$")


def result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and formatted value of the figures of one training step."""
    for key, name, formatter in _RESULT:
        if key in result:
            runs = result.get(f"{key}_runs")
            yield f"{name} of {runs}" if runs else name, _cell(result[key], formatter)
    for kind, seconds in _items(result.get("exposed_communication")):
        yield f"exposed {kind}", _cell(seconds, format_time)


def print_result(console: Console, result: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print the result of ``simulate --json``: figures, exposed communication, memory by stage, links, assumptions.

    Only the first few assumptions are printed unless ``verbose``.
    """
    table = _table("one training step", ("", "left"), ("", "right"))
    for name, value in result_rows(result):
        table.add_row(escape(name), value)
    console.print(table)
    if result.get("memory"):
        print_memory(console, result["memory"], result.get("memory_usable", result.get("memory_capacity")))
    if result.get("links"):
        print_links(console, result["links"])
    assumptions = result.get("assumptions") or ()
    shown = len(assumptions) if verbose else _MOST_ASSUMPTIONS
    for assumption in assumptions[:shown]:
        console.print(f"assumed: {escape(str(assumption))}", style="dim", highlight=False)
    if more := len(assumptions[shown:]):
        console.print(f"... and {more} more assumed (--verbose or --json shows all)", style="dim", highlight=False)


def print_memory(console: Console, stages: Sequence[Mapping[str, Any]], capacity: float | None = None) -> None:
    """Print memory by stage and category, equal rows once; peaks above ``capacity``, the usable bytes, are red."""
    columns = [key for key in _MEMORY if any(stage.get(key) for stage in stages)]
    heading = "memory of one device by stage" + (f", of {format_size(capacity)} usable" if capacity else "")
    table = _table(heading, ("stage", "right"), *((_MEMORY[key], "right") for key in columns))
    rows: dict[tuple[str, ...], bool] = {}
    for stage in stages:
        cells = (_cell(stage.get("stage"), str), *(_cell(stage.get(key), format_size) for key in columns))
        rows[cells] = capacity is not None and stage.get("peak", 0) > capacity
    for cells, over in rows.items():
        table.add_row(*cells, style="red" if over else None)
    console.print(table)
    fullest = max(stages, key=lambda stage: stage.get("peak", 0), default={})
    if fullest.get("peak_operator"):
        when, what = format_time(fullest["peak_time"]), escape(str(fullest["peak_operator"]))
        console.print(f"fullest: stage {fullest.get('stage')} at {when}, in {what}", highlight=False)


def print_links(console: Console, links: Sequence[Mapping[str, Any]]) -> None:
    """Print the busiest link of each kind, the busiest kind first."""
    names = ("how many", "bandwidth", "bytes a step", "utilisation")
    table = _table("busiest links, one of each kind", ("link", "left"), *((name, "right") for name in names))
    for link in busiest_of_each_kind(links):
        table.add_row(
            _cell(link["name"], str),
            _cell(link["count"], count),
            _cell(link["bandwidth"], format_bandwidth),
            _cell(link["bytes"], format_size),
            _cell(link["utilisation"], percent),
        )
    console.print(table)


def busiest_of_each_kind(links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the busiest link of each kind, the busiest kinds first.

    Links whose names differ only in numbers or direction are of one kind.
    """
    busiest: dict[str, Mapping[str, Any]] = {}
    for link in sorted(links, key=lambda link: -float(link["utilisation"])):
        busiest.setdefault(_NUMBER_OR_DIRECTION.sub("", link["name"]), link)
    return list(busiest.values())[:_MOST_LINKS]


def print_search(console: Console, searches: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print the result of ``search --json`` or ``compare --json``: one row per algorithm, the best first."""
    rows = [searches] if isinstance(searches, Mapping) else list(searches)
    headings = (
        "algorithm",
        "step time",
        "peak memory",
        "fits",
        "evaluations",
        "lower bound",
        "gap",
        "search time",
        "plan",
    )
    table = _table("search", *((name, "left" if name in ("algorithm", "plan") else "right") for name in headings))
    for row in sorted(rows, key=_best_time):
        table.add_row(*_search_cells(row))
    console.print(table)


def _search_cells(row: Mapping[str, Any]) -> Iterator[str]:
    best = row.get("best") or {}
    evaluation = best.get("evaluation") or {}
    yield _cell(row.get("algorithm"), str)
    yield _cell(evaluation.get("step_time"), format_time)
    yield _cell(evaluation.get("peak_memory"), format_size)
    yield _cell(evaluation.get("fits"), yes_or_no)
    yield _cell(row.get("evaluations"), count)
    yield _cell(row.get("lower_bound"), format_time)
    yield _cell(row.get("gap"), gap_words)
    yield _cell(row.get("wall_time"), format_time)
    yield _cell(best.get("plan"), _plan)


def print_accuracy(console: Console, accuracy: Mapping[str, Mapping[str, Any]]) -> None:
    """Print errors of predictions by source.

    Parameters
    ----------
    accuracy
        For every source, and for ``all``: ``rows``, ``predicted``, and the fractions ``mape``, ``median``, ``max``
        and ``bias``, either there or under ``step_time`` and ``memory``.
    """
    names = ("mape", "median", "max", "bias")
    headings = ("source", "rows", "predicted", *(f"time {n}" for n in names), *(f"memory {n}" for n in names))
    table = _table("predicted against measured", *((n, "left" if n == "source" else "right") for n in headings))
    for source, row in accuracy.items():
        time, memory = row.get("step_time", row), row.get("memory", {})
        errors = [_cell((part or {}).get(name), percent) for part in (time, memory) for name in names]
        style = "bold" if source == "all" else None
        table.add_row(
            escape(str(source)), _cell(row.get("rows"), count), _cell(row.get("predicted"), count), *errors, style=style
        )
    console.print(table)


def print_rows(console: Console, heading: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under ``columns``; columns that are not all text are right-aligned."""
    sides = ["left" if all(isinstance(r[i], str) for r in rows) else "right" for i in range(len(columns))]
    table = _table(heading, *zip(columns, sides, strict=True))
    for row in rows:
        table.add_row(*(_cell(value, str) for value in row))
    console.print(table)


def _table(heading: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=escape(heading), title_justify="left", show_header=any(name for name, _ in columns))
    for name, side in columns:
        table.add_column(escape(name), justify="right" if side == "right" else "left", overflow="fold")
    return table


def _cell(value: Any, formatter: Formatter) -> str:
    """Return ``value`` formatted and escaped; a dash for a missing or infinite value."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return _NONE
    return escape(formatter(value))


def gap_words(fraction: float) -> str:
    """Return the gap of a search in words."""
    return "proven optimal" if fraction == 0 else percent(fraction)


def _plan(plan: Any) -> str:
    """Return the parallel degrees of a plan document, or the text of any other plan."""
    if not isinstance(plan, Mapping):
        return str(plan)
    axes = (plan.get("mesh") or {}).get("axes") or ()
    return " x ".join(f"{name} {size}" for name, size in axes) or _NONE


def _best_time(row: Mapping[str, Any]) -> float:
    step_time = ((row.get("best") or {}).get("evaluation") or {}).get("step_time")
    return float("inf") if step_time is None else float(step_time)


def _items(value: Mapping[Any, Any] | None) -> list[tuple[Any, Any]]:
    return list((value or {}).items())
