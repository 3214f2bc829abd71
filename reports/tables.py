"""Results as tables for the terminal, made from the mappings that ``--json`` prints."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Table

from meshwise.simulator.files import escape_text
from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_count, format_size, format_time

Formatter = Callable[[Any], str]
_NONE = "-"


def console() -> Console:
    """Return where tables are printed: stdout, and wide where that is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def escape_markup(text: str) -> str:
    """Return text that rich prints literally: no markup, no control characters."""
    return markup.escape(escape_text(text))


def format_percent(fraction: float) -> str:
    """Return a fraction as a percentage with three digits.

    >>> format_percent(0.1234)
    '12.3 %'
    """
    return f"{100 * fraction:.3g} %"


def format_number(number: float) -> str:
    """Return a number with thousands separators.

    >>> format_number(12345.6)
    '12,346'
    """
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:,.3g}"


def format_truth(value: bool) -> str:
    """Return ``yes`` or ``no``."""
    return "yes" if value else "no"


def format_busiest_link(link: Mapping[str, Any]) -> str:
    """Return one line on how busy a link is.

    >>> format_busiest_link({"name": "nic 0 out", "count": 1024, "bandwidth": 24e9, "utilisation": 0.43})
    'nic 0 out (x1024), 43 % of 24 GB/s'
    """
    count_text = f" (x{link['count']})" if link["count"] > 1 else ""
    return f"{link['name']}{count_text}, {format_percent(link['utilisation'])} of {format_bandwidth(link['bandwidth'])}"


def join_ends(formatter: Formatter) -> Formatter:
    """Return a formatter of intervals that formats both ends by ``formatter``.

    >>> join_ends(format_time)((1.5, 2.5))
    '1.5 s to 2.5 s'
    """
    return lambda ends: " to ".join(map(formatter, ends))


def format_ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as ranges.

    >>> format_ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


_RESULT: tuple[tuple[str, str, Formatter], ...] = (
    ("step_time", "step time", format_time),
    ("step_time_interval", "90 % of steps like it", join_ends(format_time)),
    ("tokens_per_second", "UNIT per second", format_number),
    ("tokens_per_second_per_device", "UNIT per second and device", format_number),
    ("model_flops_per_second_per_device", "model FLOP/s per device", format_compute_rate),
    ("mfu", "model FLOP utilisation", format_percent),
    ("fits", "fits in memory", format_truth),
    ("out_of_memory", "probability of running out of memory", format_percent),
    ("peak_memory", "peak memory of tensors and runtime", format_size),
    ("peak_memory_interval", "90 % of peaks", join_ends(format_size)),
    ("peak_reserved", "reserved by the allocator", format_size),
    ("peak_device", "taken of the device in all", format_size),
    ("memory_usable", "usable memory of a device", format_size),
    ("memory_capacity", "of the memory that is reported", format_size),
    ("bubble", "devices idle (bubble)", format_percent),
    ("bottleneck", "busiest link", format_busiest_link),
    ("engine", "engine", str),
    ("tasks", "tasks", format_number),
    ("classes", "rank classes", format_number),
    ("ranks", "ranks", format_number),
    ("wall_time", "time to simulate", format_time),
)
_MEMORY = {
    **{name: name for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")},
    "host_peak": "whole host",
}
LINK_COLUMNS: tuple[tuple[str, str, Formatter], ...] = (
    ("name", "link", str),
    ("count", "how many", format_number),
    ("bandwidth", "bandwidth", format_bandwidth),
    ("bytes", "bytes a step", format_size),
    ("utilisation", "utilisation", format_percent),
)
"""Key of a link in a result, heading of its column, and formatter."""
TABLE_COLUMNS: tuple[tuple[str, str, Formatter], ...] = (
    ("name", "table", str),
    ("rows", "rows", format_number),
    ("size", "size", format_size),
    ("placement", "lies", str),
    ("hit_rate", "found on devices", format_percent),
)
"""Key of an embedding table in a result, heading of its column, and formatter."""
RANK_COLUMNS: tuple[tuple[str, str, Formatter], ...] = (
    ("ranks", "ranks", format_ranges),
    ("kept", "on the device", format_size),
    ("on_host", "on its host", format_size),
    ("buffers", "exchanged and staged", format_size),
    ("read", "read and written", format_size),
    ("exchanged", "exchanged", format_size),
    ("from_host", "from the host", format_size),
)
"""The same for data ranks of equal loads."""
_MAX_TABLES = 8
_MAX_STAGES = 3
_MAX_LINKS, _MAX_ASSUMPTIONS = 6, 5
_NUMBER_OR_DIRECTION = re.compile(r"\d+| (in|out|up|down)$|[+-]$")


def list_result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and formatted value of the figures of one training step."""
    for key, name, formatter in _RESULT:
        if key in result:
            runs = result.get(f"{key}_runs")
            title = name.replace("UNIT", result.get("unit", "tokens"))
            yield f"{title} of {runs}" if runs else title, _format_cell(result[key], formatter)
    for kind, seconds in (result.get("exposed_communication") or {}).items():
        yield f"exposed {kind}", _format_cell(seconds, format_time)


def print_result(console: Console, result: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print the result of ``simulate --json``: figures, exposed communication, memory by stage, links, assumptions.

    Only the first few assumptions and embedding tables are printed unless ``verbose``.
    """
    table = _make_table("one training step", ("", "left"), ("", "right"))
    for name, value in list_result_rows(result):
        table.add_row(escape_markup(name), value)
    console.print(table)
    if result.get("memory"):
        print_memory(console, result["memory"], result.get("memory_usable", result.get("memory_capacity")))
    if result.get("embedding_tables"):
        print_embedding_tables(console, result["embedding_tables"], verbose=verbose)
    if result.get("links"):
        print_links(console, result["links"])
    assumptions = result.get("assumptions") or ()
    num_shown = len(assumptions) if verbose else _MAX_ASSUMPTIONS
    for assumption in assumptions[:num_shown]:
        console.print(f"assumed: {escape_markup(str(assumption))}", style="dim", highlight=False)
    if num_hidden := len(assumptions[num_shown:]):
        note = f"... and {num_hidden} more assumed (--verbose or --json shows all)"
        console.print(note, style="dim", highlight=False)


def format_reserved(reserved: float, device: float) -> str:
    """Return in words the bytes of the allocator's segments, and those of the whole device.

    >>> format_reserved(71 * 2**30, 72 * 2**30)
    '71 GiB by the allocator for the tensors; 72 GiB of the device, with runtime and communicators'
    """
    return (
        f"{format_size(reserved)} by the allocator for the tensors; {format_size(device)} of the device, "
        f"with runtime and communicators"
    )


def format_stages(row: Mapping[str, Any]) -> str:
    """Return the stages of a row of memory: all of them, or of many the first two and the last.

    >>> format_stages({"stage": 1, "stages": [1, 5, 9, 13]})
    '1, 5, ... 13'
    """
    stages = [str(stage) for stage in row.get("stages") or [row.get("stage", _NONE)]]
    return ", ".join(stages if len(stages) <= _MAX_STAGES else [*stages[:2], f"... {stages[-1]}"])


def find_fullest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of the ranks that use most of what is usable of their devices; an empty row for none."""
    return max(rows, key=lambda row: float(row.get("peak", 0)) / (row.get("usable") or 1.0), default={})


def format_fullest(row: Mapping[str, Any]) -> str:
    """Return in words whose memory a row is, when its peak is and what runs then.

    >>> row = {"rank": 8, "ranks": 4, "stages": [1], "peak_time": 0.5, "peak_operator": "backward, head"}
    >>> format_fullest(row)
    'rank 8 and 3 alike, stage 1, at 500 ms, in backward, head'
    """
    count = int(row.get("ranks", 1))
    alike = f" and {count - 1:,} alike" if count > 1 else ""
    rank = f"rank {row['rank']}{alike}, " if "rank" in row else ""
    moment = f", at {format_time(row['peak_time'])}, in {row['peak_operator']}" if row.get("peak_operator") else ""
    return f"{rank}{'stages' if len(row.get('stages') or ()) > 1 else 'stage'} {format_stages(row)}{moment}"


def print_memory(console: Console, stages: Sequence[Mapping[str, Any]], capacity: float | None = None) -> None:
    """Print memory by stage and category, equal rows once, and the fullest rank.

    Peaks above the usable bytes of their devices, by default ``capacity``, are red.
    """
    usable_sizes = {float(usable) for stage in stages if (usable := stage.get("usable") or capacity)}
    columns = [key for key in _MEMORY if any(stage.get(key) for stage in stages)]
    usable_text = " or ".join(dict.fromkeys(map(format_size, sorted(usable_sizes))))
    heading = "peak memory of one device by stage" + (f", of {usable_text} usable" if usable_sizes else "")
    table = _make_table(heading, ("stage", "right"), *((_MEMORY[key], "right") for key in columns))
    rows: dict[tuple[str, ...], bool] = {}
    for stage in stages:
        cells = (format_stages(stage), *(_format_cell(stage.get(key), format_size) for key in columns))
        usable = stage.get("usable") or capacity
        rows[cells] = rows.get(cells, False) or (bool(usable) and stage.get("peak", 0) > usable)
    for cells, exceeds_capacity in rows.items():
        table.add_row(*cells, style="red" if exceeds_capacity else None)
    console.print(table)
    fullest = find_fullest(stages)
    if fullest.get("peak_operator"):
        console.print(f"fullest: {escape_markup(format_fullest(fullest))}", highlight=False)


def print_embedding_tables(console: Console, document: Mapping[str, Any], *, verbose: bool = False) -> None:
    """Print how embedding tables lie, and what data ranks have of them; equal ranks in one row.

    Only the largest tables, and the first of many rows of ranks, are printed unless ``verbose``.
    """
    tables, devices = document["tables"], document["devices"]
    num_shown = max(len(tables), len(devices)) if verbose else _MAX_TABLES
    hidden_tables, hidden_devices = tables[num_shown:], devices[num_shown:]
    hidden_texts = []
    if hidden_tables:
        size = format_size(sum(row["size"] for row in hidden_tables))
        hidden_texts.append(f"{format_count(len(hidden_tables), 'smaller table')}, {size} in all")
    if hidden_devices:
        hidden_texts.append(f"{sum(len(row['ranks']) for row in hidden_devices)} more data ranks")
    for heading, columns, rows in (
        ("embedding tables", TABLE_COLUMNS, tables[:num_shown]),
        ("data ranks by their tables", RANK_COLUMNS, devices[:num_shown]),
    ):
        table = _make_table(heading, *((name, "left" if key == columns[0][0] else "right") for key, name, _ in columns))
        for row in rows:
            table.add_row(*(escape_markup(_format_cell(row[key], formatter)) for key, _, formatter in columns))
        console.print(table)
    if hidden_texts:
        console.print(f"... and {' and '.join(hidden_texts)} (--verbose or --json shows all)")
    fullest, busiest = document["most_memory"], document["most_work"]
    console.print(f"data rank {fullest} keeps most of the tables, and rank {busiest} reads and writes most")


def print_links(console: Console, links: Sequence[Mapping[str, Any]]) -> None:
    """Print the busiest link of each kind, the busiest kind first."""
    columns = [(name, "left" if formatter is str else "right") for _, name, formatter in LINK_COLUMNS]
    table = _make_table("busiest links, one of each kind", *columns)
    for link in pick_busiest_links(links):
        table.add_row(*(_format_cell(link[key], formatter) for key, _, formatter in LINK_COLUMNS))
    console.print(table)


def pick_busiest_links(links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the busiest link of each kind, the busiest kinds first.

    Links whose names differ only in numbers or direction are of one kind.
    """
    busiest: dict[str, Mapping[str, Any]] = {}
    for link in sorted(links, key=lambda link: -float(link["utilisation"])):
        busiest.setdefault(_NUMBER_OR_DIRECTION.sub("", link["name"]), link)
    return list(busiest.values())[:_MAX_LINKS]


def print_accuracy(console: Console, accuracy: Mapping[str, Mapping[str, Any]]) -> None:
    """Print errors of predictions by source.

    Parameters
    ----------
    accuracy
        For every source, and for ``all``: ``rows``, ``predicted``, and the fractions ``mape``, ``median``, ``max``
        and ``bias``, either there or under ``step_time`` and ``memory``.
    """
    names = ("mape", "median", "max", "bias")
    errors = [f"{measure} {name}" for measure in ("time", "memory") for name in names]
    columns = [(heading, "right") for heading in ("rows", "predicted", *errors)]
    table = _make_table("predicted against measured", ("source", "left"), *columns)
    for source, row in accuracy.items():
        time, memory = row.get("step_time", row), row.get("memory", {})
        cells = [_format_cell(row.get(name), format_number) for name in ("rows", "predicted")]
        cells += [_format_cell((part or {}).get(name), format_percent) for part in (time, memory) for name in names]
        table.add_row(escape_markup(str(source)), *cells, style="bold" if source == "all" else None)
    console.print(table)


def _make_table(heading: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=escape_markup(heading), title_justify="left", show_header=any(name for name, _ in columns))
    for name, side in columns:
        table.add_column(escape_markup(name), justify="right" if side == "right" else "left", overflow="fold")
    return table


def _format_cell(value: Any, formatter: Formatter) -> str:
    """Return ``value`` formatted and escaped; a dash for a missing or infinite value."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return _NONE
    return escape_markup(formatter(value))


def format_gap(fraction: float) -> str:
    """Return the gap of a search in words."""
    return "proven optimal" if fraction == 0 else format_percent(fraction)
