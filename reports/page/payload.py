"""The data of a page: one JSON document, and long columns of numbers stored separately."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from meshwise.reports.difference import difference
from meshwise.reports.document import clean_text
from meshwise.reports.explanation import explanation_lines
from meshwise.reports.lanes import lane_row
from meshwise.reports.page.columns import Columns
from meshwise.reports.page.report import Data, Report
from meshwise.reports.page.sections import (
    build_stage_rows,
    list_groups,
    list_hops,
    list_mesh_axes,
    path_document,
    timeline_document,
)
from meshwise.reports.palette import CATEGORY_COLOUR, CHUNKED, DARK_COLOUR, KIND_COLOUR, SERIES, shade_kind
from meshwise.reports.tables import LINK_COLUMNS, format_gap, format_number, format_percent, pick_busiest_links
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import TaskKind
from meshwise.simulator.spans import TASK_KINDS
from meshwise.simulator.units import format_bandwidth, format_size, format_time
from meshwise.strategies.explanation.critical_path import device_time
from meshwise.strategies.plan.plan import Plan

Facts = list[tuple[str, str, str]]
"""Name, value and note of each figure."""


def build_payload(report: Report, columns: Columns) -> dict[str, Any]:
    """Return the JSON document of a page; long columns of numbers go into ``columns``."""
    names = ("predicted", "measured")
    devices = report.plan.placement or range(report.plan.mesh.num_ranks)
    steps = [
        timeline_document(timeline, name, columns) for timeline, name in zip(report.timelines, names, strict=False)
    ]
    return {
        "title": clean_text(report.title),
        "plan": report.plan.describe(),
        "facts": list_facts(report),
        "kinds": _list_kinds(report),
        "categories": [{"name": str(category), "colour": CATEGORY_COLOUR[category]} for category in CATEGORIES],
        "steps": steps,
        "path": path_document(report.path, steps[0]["unit"], columns) if report.path is not None else None,
        "mesh": list_mesh_axes(report.plan.mesh),
        "positions": report.plan.positions,
        "groups": list_groups(report.plan, report.cluster),
        "hops": list_hops(report.plan, report.cluster),
        "devices": columns.add(list(devices), "u4"),
        "nodes": columns.add(report.cluster.device_nodes[list(devices)], "u4"),
        "device_time": list(device_time(report.timeline).items()),
        "stages": build_stage_rows(report),
        "links": [
            [formatter(link[key]) for key, _, formatter in LINK_COLUMNS]
            for link in pick_busiest_links(report.result.get("links") or ())
        ],
        "searches": [_search_document(value, SERIES[i % len(SERIES)]) for i, value in enumerate(report.searches)],
        "explanation": _explanation_sections(report.explanation),
        "difference": _difference_document(report),
        "assumptions": [clean_text(value, 400) for value in report.result["assumptions"]],
    }


def list_facts(report: Report) -> Facts:
    """Return the figures at the top of the page."""
    result = report.result
    kinds = "kind" if result["classes"] == 1 else "kinds"
    low, high = result["step_time_interval"]
    fact_rows = [
        (
            "predicted step time" if report.run else "step time",
            format_time(result["step_time"]),
            f"90 % of runs: {format_time(low)} to {format_time(high)}",
        ),
        (
            "model FLOP utilisation",
            format_percent(result["mfu"]),
            f"{format_number(result['tokens_per_second'])} tokens/s",
        ),
        ("peak memory", format_size(result["peak_memory"]), _capacity_text(result)),
        ("devices", f"{result['ranks']:,}", f"{result['classes']:,} {kinds} of ranks simulated"),
        ("devices idle (bubble)", format_percent(result["bubble"]), "of all ranks' time"),
    ]
    if result.get("bottleneck"):
        link = result["bottleneck"]
        bandwidth_text = f"{link['name']} (x{link['count']:,}), {format_bandwidth(link['bandwidth'])}"
        fact_rows.append(("busiest link", format_percent(link["utilisation"]), bandwidth_text))
    if report.run:
        fact_rows.insert(1, _measured_fact(report.run))
    return fact_rows


def _measured_fact(run: Data) -> tuple[str, str, str]:
    error = run["predicted_step_time"] / run["step_time"] - 1
    return "measured", format_time(run["step_time"]), f"the prediction is {error:+.1%}"


def _capacity_text(result: Data) -> str:
    used_share, verdict = (
        result["peak_memory"] / result["memory_capacity"],
        "fits" if result["fits"] else "does not fit",
    )
    capacity, usable = format_size(result["memory_capacity"]), format_size(result["memory_usable"])
    return f"{format_percent(used_share)} of {capacity}, usable {usable}: {verdict}"


def _list_kinds(report: Report) -> list[dict[str, Any]]:
    """Return every task kind with its row in a lane and its colours by model chunk, on light and dark ground."""
    chunks = max(len(rank_class.stages) for timeline in report.timelines for rank_class in timeline.rank_classes)

    def shades(kind: TaskKind, colours: Mapping[TaskKind, str]) -> list[str]:
        num_shades = max(chunks, 1) if kind in CHUNKED else 1
        return [shade_kind(kind, chunk, num_shades, colours) for chunk in range(num_shades)]

    return [
        {
            "name": str(kind),
            "row": int(lane_row(kind)),
            "computes": kind.computes,
            "light": shades(kind, KIND_COLOUR),
            "dark": shades(kind, DARK_COLOUR),
        }
        for kind in TASK_KINDS
    ]


def _search_document(search: Data, colour: str) -> dict[str, Any]:
    best = search["best"]
    bound = search["lower_bound"]
    return {
        "algorithm": search["algorithm"],
        "colour": colour,
        "history": [
            [point["evaluations"], point["elapsed"], point["best"]]
            for point in search["history"]
            if isfinite(point["best"])
        ],
        "bound": bound,
        "gap": "none known" if search["gap"] is None else format_gap(search["gap"]),
        "evaluations": search["evaluations"],
        "wall_time": search["wall_time"],
        "step_time": best["evaluation"]["step_time"] if best else None,
        "plan": Plan.from_json(best["plan"]).describe() if best else "no plan fits",
    }


def _explanation_sections(document: Data) -> list[dict[str, Any]]:
    """Return the lines of an explanation as sections with a heading."""
    sections: list[list[str]] = [[]]
    for line in explanation_lines(document):
        if line:
            sections[-1].append(line)
        else:
            sections.append([])
    return [{"heading": lines[0], "lines": lines[1:]} for lines in _add_headings(sections)]


def _add_headings(sections: list[list[str]]) -> Iterator[list[str]]:
    """Yield the sections that have lines; the first, which is the plan itself, gets a heading."""
    for index, lines in enumerate(sections):
        if lines:
            yield lines if index else ["the plan", *lines]


def _difference_document(report: Report) -> dict[str, Any] | None:
    if report.measured is None:
        return None
    step_difference = difference(report.timeline, report.measured)
    timed_step = report.run.get("step_time", step_difference.measured)
    return {
        "predicted": step_difference.predicted,
        "measured": step_difference.measured,
        "timed": timed_step,
        "rows": [
            [row.kind, row.operation, row.predicted.time, row.measured.time, row.cost, row.share, row.verdict]
            for row in step_difference.operations()
        ],
    }
