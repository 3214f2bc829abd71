"""The page as one HTML file that contains its style, its scripts and its data; it loads nothing.

The data are one JSON document, and long columns of numbers stored separately.
"""

import json
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import chain, groupby
from math import isfinite
from string import Template
from typing import Any

from meshwise.reports.difference import difference
from meshwise.reports.document import clean_text
from meshwise.reports.explanation import explanation_lines
from meshwise.reports.lanes import lane_row
from meshwise.reports.page.report import Data, Report
from meshwise.reports.page.sections import (
    Columns,
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

_SCRIPTS = (
    "text", "data", "state", "lanes", "paint", "path", "axis", "memory", "hover", "inspector", "charts", "tables",
    "page",
)  # fmt: skip
"""Scripts of the page, in the order in which they are concatenated: later ones use names of earlier ones."""


def html(report: Report) -> str:
    """Return ``report`` as one HTML file; the same report gives the same text.

    A Content-Security-Policy allows the page's own style and program, by their hashes, and nothing else: no network,
    and no script that a name could smuggle in.
    """
    columns = Columns()
    document = _to_json(build_payload(report, columns))
    style, script = _read_resource("page.css"), _build_script()
    return Template(_read_resource("page.html")).substitute(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {_csp_hash(script)}; "
        f"style-src {_csp_hash(style)}",
        title=escape(clean_text(report.title)),
        style=style,
        script=script,
        document=document,
        columns=columns.to_text(),
    )


def _build_script() -> str:
    parts = "\n".join(_read_resource(f"js/{name}.js") for name in _SCRIPTS)
    return f'\n(() => {{\n"use strict";\n{parts}\n}})();\n'


@cache
def _read_resource(name: str) -> str:
    return files("meshwise.reports.page").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}'"


def _to_json(document: Any) -> str:
    """Return ASCII JSON that cannot end a script element; numbers that are not finite become null."""
    # JSON knows no infinity, and `<` could begin `</script>`
    text = json.dumps(_replace_infinite(document), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _replace_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def build_payload(report: Report, columns: Columns) -> dict[str, Any]:
    """Return the JSON document of a page; long columns of numbers go into ``columns``."""
    devices = list(report.plan.placement or range(report.plan.mesh.num_ranks))
    named_timelines = zip(report.timelines, ("predicted", "measured"), strict=False)
    steps = [timeline_document(timeline, name, columns) for timeline, name in named_timelines]
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
        "devices": columns.add(devices, "u4"),
        "nodes": columns.add(report.cluster.device_nodes[devices], "u4"),
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


def list_facts(report: Report) -> list[tuple[str, str, str]]:
    """Return name, value and note of the figures at the top of the page."""
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
            f"{format_number(result['tokens_per_second'])} {result.get('unit', 'tokens')}/s",
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
        measured, predicted = report.run["step_time"], report.run["predicted_step_time"]
        fact_rows.insert(1, ("measured", format_time(measured), f"the prediction is {predicted / measured - 1:+.1%}"))
    return fact_rows


def _capacity_text(result: Data) -> str:
    used_share = result["peak_memory"] / result["memory_capacity"]
    verdict = "fits" if result["fits"] else "does not fit"
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
    return {
        "algorithm": search["algorithm"],
        "colour": colour,
        "history": [[p["evaluations"], p["elapsed"], p["best"]] for p in search["history"] if isfinite(p["best"])],
        "bound": search["lower_bound"],
        "gap": "none known" if search["gap"] is None else format_gap(search["gap"]),
        "evaluations": search["evaluations"],
        "wall_time": search["wall_time"],
        "step_time": best["evaluation"]["step_time"] if best else None,
        "plan": Plan.from_json(best["plan"]).describe() if best else "no plan fits",
    }


def _explanation_sections(document: Data) -> list[dict[str, Any]]:
    """Return the lines of an explanation as sections with a heading; the plan itself has none and gets one."""
    lines = chain(("the plan",) if document.get("plan") else (), explanation_lines(document))
    sections = [list(section) for has_text, section in groupby(lines, bool) if has_text]
    return [{"heading": heading, "lines": rest} for heading, *rest in sections]


def _difference_document(report: Report) -> dict[str, Any] | None:
    if report.measured is None:
        return None
    step_difference = difference(report.timeline, report.measured)
    return {
        "predicted": step_difference.predicted,
        "measured": step_difference.measured,
        "timed": report.run.get("step_time", step_difference.measured),
        "rows": [
            [row.kind, row.operation, row.predicted.time, row.measured.time, row.cost, row.share, row.verdict]
            for row in step_difference.operations()
        ],
    }
