"""The plan table of a page: what every stage holds, and whether it fits."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from reports.lanes import labels
from reports.page.report import Report
from reports.text import plain
from simulator.memory import CATEGORIES


def stage_rows(report: Report) -> list[dict[str, Any]]:
    """Return a row a rank class: its stages, their blocks, bytes by category at its peak, and capacity.

    Classes of the same stages that hold the same are one row.
    """
    classes = report.timeline.rank_classes
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    memory = zip(report.timeline.memory, report.result["memory"], labels(classes), strict=True)
    for profile, held, name in memory:
        members = classes[profile.rank_class]
        sizes = [held[str(category)] for category in CATEGORIES]
        row = {
            "name": name.split(" (")[0],
            "ranks": 0,
            "blocks": "; ".join(blocks_text(report.plan.stages[stage].blocks) for stage in members.stages),
            "sizes": sizes,
            "peak": profile.peak,
            "capacity": profile.capacity,
            "host": held.get("host_peak", 0.0),
            "during": held.get("peak_operator", ""),
        }
        merged = rows.setdefault((members.stages, *sizes, profile.capacity), row)
        merged["ranks"] += len(members.ranks)
    return list(rows.values())


def blocks_text(blocks: Sequence[str]) -> str:
    """Return the names of blocks, those that differ in their number as a range.

    >>> blocks_text(["embedding", "layers.0", "layers.1", "layers.2", "head"])
    'embedding, layers.0 to 2, head'
    """
    return plain(", ".join(_ranges(blocks)), 200)


def _ranges(blocks: Sequence[str]) -> Iterator[str]:
    def run(place: int) -> tuple[str, int | None]:
        stem, _, number = blocks[place].rpartition(".")
        return (stem, int(number) - place) if number.isdecimal() and stem else (blocks[place], None)

    for _, places in groupby(range(len(blocks)), run):
        first, *rest = (blocks[place] for place in places)
        yield f"{first} to {rest[-1].rpartition('.')[2]}" if rest else first
