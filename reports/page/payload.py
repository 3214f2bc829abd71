"""The data of a page: one JSON document, and long columns of numbers stored separately."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from meshwise.reports.difference import difference
from meshwise.reports.document import plain
from meshwise.reports.explanation import explanation_lines
from meshwise.reports.lanes import row_of
from meshwise.reports.page.columns import Columns
from meshwise.reports.page.report import Data, Report
from meshwise.reports.page.sections import groups, hops, mesh_axes, path, stage_rows, step
from meshwise.reports.palette import CATEGORY_COLOUR, CHUNKED, DARK_COLOUR, KIND_COLOUR, SERIES, shade
from meshwise.reports.tables import busiest_of_each_kind, count, gap_words, percent
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import TaskKind
from meshwise.simulator.spans import TASK_KINDS
from meshwise.simulator.units import format_bandwidth, format_size, format_time
from meshwise.strategies.explanation.critical_path import device_time
from meshwise.strategies.plan.plan import Plan

Facts = list[tuple[str, str, str]]
"""Name, value and note of each figure."""


def payload(report: Report, columns: Columns) -> dict[str, Any]:
    """Return the JSON document of a page; long columns of numbers go into ``columns``."""
    names = ("predicted", "measured")
    devices = report.plan.placement or range(report.plan.mesh.num_ranks)
    steps = [step(timeline, name, columns) for timeline, name in zip(report.timelines, names, strict=False)]
    return {
        "title": plain(report.title),
        "plan": report.plan.describe(),
        "facts": facts(report),
        "kinds": _kinds(report),
        "categories": [{"name": str(c), "colour": CATEGORY_COLOUR[c]} for c in CATEGORIES],
        "steps": steps,
        "path": path(report.path, steps[0]["unit"], columns) if report.path is not None else None,
        "mesh": mesh_axes(report.plan.mesh),
        "positions": report.plan.positions,
        "groups": groups(report.plan, report.cluster),
        "hops": hops(report.plan, report.cluster),
        "devices": columns.add(list(devices), "u4"),
        "nodes": columns.add(report.cluster.device_nodes[list(devices)], "u4"),
        "device_time": list(device_time(report.timeline).items()),
        "stages": stage_rows(report),
        "links": _links(report.result),
        "searches": [_search(each, SERIES[i % len(SERIES)]) for i, each in enumerate(report.searches)],
        "explanation": _explanation(report.explanation),
        "difference": _difference(report),
        "assumptions": [plain(each, 400) for each in report.result["assumptions"]],
    }


def facts(report: Report) -> Facts:
    """Return the figures at the top of the page."""
    result = report.result
    kinds = "kind" if result["classes"] == 1 else "kinds"
    low, high = result["step_time_interval"]
    found = [
        (
            "predicted step time" if report.run else "step time",
            format_time(result["step_time"]),
            f"90 % of runs: {format_time(low)} to {format_time(high)}",
        ),
        ("model FLOP utilisation", percent(result["mfu"]), f"{count(result['tokens_per_second'])} tokens/s"),
        ("peak memory", format_size(result["peak_memory"]), _of_capacity(result)),
        ("devices", f"{result['ranks']:,}", f"{result['classes']:,} {kinds} of ranks simulated"),
        ("devices idle (bubble)", percent(result["bubble"]), "of all ranks' time"),
    ]
    if result.get("bottleneck"):
        link = result["bottleneck"]
        note = f"{link['name']} (x{link['count']:,}), {format_bandwidth(link['bandwidth'])}"
        found.append(("busiest link", percent(link["utilisation"]), note))
    if report.run:
        found.insert(1, _measured(report.run))
    return found


def _measured(run: Data) -> tuple[str, str, str]:
    error = run["predicted_step_time"] / run["step_time"] - 1
    return "measured", format_time(run["step_time"]), f"the prediction is {error:+.1%}"


def _of_capacity(result: Data) -> str:
    used, verdict = result["peak_memory"] / result["memory_capacity"], "fits" if result["fits"] else "does not fit"
    capacity, usable = format_size(result["memory_capacity"]), format_size(result["memory_usable"])
    return f"{percent(used)} of {capacity}, usable {usable}: {verdict}"


def _kinds(report: Report) -> list[dict[str, Any]]:
    """Return every task kind with its row in a lane and its colours by model chunk, on light and dark ground."""
    chunks = max(len(c.stages) for timeline in report.timelines for c in timeline.rank_classes)

    def shades(kind: TaskKind, colours: Mapping[TaskKind, str]) -> list[str]:
        several = max(chunks, 1) if kind in CHUNKED else 1
        return [shade(kind, chunk, several, colours) for chunk in range(several)]

    return [
        {
            "name": str(kind),
            "row": int(row_of(kind)),
            "computes": kind.computes,
            "light": shades(kind, KIND_COLOUR),
            "dark": shades(kind, DARK_COLOUR),
        }
        for kind in TASK_KINDS
    ]


def _links(result: Data) -> list[list[str]]:
    return [
        [
            link["name"],
            f"{link['count']:,}",
            format_bandwidth(link["bandwidth"]),
            format_size(link["bytes"]),
            percent(link["utilisation"]),
        ]
        for link in busiest_of_each_kind(result.get("links") or ())
    ]


def _search(search: Data, colour: str) -> dict[str, Any]:
    best = search["best"]
    bound = search["lower_bound"]
    return {
        "algorithm": search["algorithm"],
        "colour": colour,
        "history": [[p["evaluations"], p["elapsed"], p["best"]] for p in search["history"] if isfinite(p["best"])],
        "bound": bound,
        "gap": "none known" if search["gap"] is None else gap_words(search["gap"]),
        "evaluations": search["evaluations"],
        "wall_time": search["wall_time"],
        "step_time": best["evaluation"]["step_time"] if best else None,
        "plan": Plan.from_json(best["plan"]).describe() if best else "no plan fits",
    }


def _explanation(document: Data) -> list[dict[str, Any]]:
    """Return the lines of an explanation as sections with a heading."""
    sections: list[list[str]] = [[]]
    for line in explanation_lines(document):
        if line:
            sections[-1].append(line)
        else:
            sections.append([])
    return [{"heading": lines[0], "lines": lines[1:]} for lines in _headed(sections)]


def _headed(sections: list[list[str]]) -> Iterator[list[str]]:
    """Yield the sections that have lines; the first, which is the plan itself, gets a heading."""
    for index, lines in enumerate(sections):
        if lines:
            yield lines if index else ["the plan", *lines]


def _difference(report: Report) -> dict[str, Any] | None:
    if report.measured is None:
        return None
    found = difference(report.timeline, report.measured)
    timed = report.run.get("step_time", found.measured)
    return {
        "predicted": found.predicted,
        "measured": found.measured,
        "timed": timed,
        "rows": [
            [row.kind, row.operation, row.predicted.time, row.measured.time, row.cost, row.share, row.verdict]
            for row in found.operations()
        ],
    }
