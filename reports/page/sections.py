"""The sections of a page: steps, the stage table, communicating groups, and the critical path."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.document import plain
from meshwise.reports.lanes import labels, row_of
from meshwise.reports.page.columns import Columns
from meshwise.reports.page.report import Report
from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import STREAM_KINDS, TASK_KINDS
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import TICKS_PER_SECOND, format_bandwidth
from meshwise.strategies.explanation.critical_path import CriticalPath
from meshwise.strategies.plan.mesh import CONTEXT, DATA, EXPERT, GROUPS, OPERATOR_AXES, PIPELINE, REPLICA, Mesh
from meshwise.strategies.plan.plan import Plan

_FINEST = -9  # the power of ten of a nanosecond
_MOMENTS = 2**32 - 1


def step(timeline: Timeline, name: str, columns: Columns) -> dict[str, Any]:
    """Return a timeline as a page's document; its spans and memory go into ``columns``.

    Moments are whole multiples of ``unit`` seconds: a nanosecond, or the smallest larger power of ten for which the
    step fits 32 bits. Spans that touch still touch.
    """
    unit = _unit(timeline)
    return {
        "name": name,
        "source": f"{timeline.source}, {timeline.engine.replace('_', ' ')}",
        "step_time": timeline.step_time,
        "length": timeline.length,
        "begin": timeline.begin,
        "steps": timeline.steps,
        "unit": unit,
        "classes": [{"name": plain(c.name), "stages": c.stages} for c in timeline.rank_classes],
        "class_of": columns.add(class_of_rank(timeline), "i4"),
        "spans": _spans(timeline, unit, columns),
        "memory": [_memory(profile, unit, columns) for profile in timeline.memory],
    }


def class_of_rank(timeline: Timeline) -> NDArray[np.int64]:
    """Return the index of every rank's class, -1 for numbers below the largest that are no rank."""
    found = np.full(1 + max((rank for c in timeline.rank_classes for rank in c.ranks), default=-1), -1)
    for index, members in enumerate(timeline.rank_classes):
        found[list(members.ranks)] = index
    return found


def _unit(timeline: Timeline) -> float:
    last = max(
        timeline.length,
        float(timeline.columns.end.max(initial=0)) / timeline.columns.per_second,
        max((float(np.asarray(profile.times)[-1]) for profile in timeline.memory), default=0.0),
    )
    return next(10.0**power for power in range(_FINEST, 309) if last / 10.0**power < _MOMENTS)


def _spans(timeline: Timeline, unit: float, columns: Columns) -> dict[str, Any]:
    """Return spans in order of rank class, row, stream and start; the first three are stored once per slice."""
    found = timeline.columns
    row = np.array([row_of(kind) for kind in TASK_KINDS])[found.kind]
    order = np.lexsort((found.end, found.start, found.stream, row, found.rank_class))
    keys = np.stack([found.rank_class, row, found.stream], axis=1)[order]
    first = np.flatnonzero(np.append(True, np.any(keys[1:] != keys[:-1], axis=1)))
    # rounded ends, not rounded durations: spans that touch still touch
    start, end = (
        np.rint(times[order] / (found.per_second * unit)).astype(np.int64) for times in (found.start, found.end)
    )
    return {
        "streams": [str(kind) for kind in STREAM_KINDS],
        "names": [plain(name) for name in found.names],
        "slice_class": columns.add(keys[first, 0], "u4"),
        "slice_row": columns.add(keys[first, 1], "u4"),
        "slice_stream": columns.add(keys[first, 2], "u4"),
        "slice_start": columns.add(np.append(first, len(keys)), "u4"),
        "kind": columns.add(found.kind[order], "u1"),
        "stage": columns.add(found.stage[order], "i4"),
        "microbatch": columns.add(found.microbatch[order], "i4"),
        "operators": columns.add(found.operators[order], "u4"),
        "start": columns.add_steps(start),
        "duration": columns.add(end - start, "u4"),
        "bytes": columns.add(found.bytes[order], "f8"),
    }


def _memory(profile: MemoryProfile, unit: float, columns: Columns) -> dict[str, Any]:
    """Return memory over time: whole bytes of every category, as differences from one moment to the next."""
    usage = np.rint(np.asarray(profile.usage, np.float64)).reshape(-1, len(CATEGORIES))
    changes = np.diff(usage, axis=0, prepend=0.0)
    return {
        "class": profile.rank_class,
        "capacity": profile.capacity if isfinite(profile.capacity) else None,
        "times": columns.add_steps(np.rint(np.asarray(profile.times) / unit).astype(np.int64)),
        "usage": [columns.add(changes[:, index], "f8") for index in range(len(CATEGORIES))],
    }


def stage_rows(report: Report) -> list[dict[str, Any]]:
    """Return one row per rank class: its stages, their blocks, bytes by category at its peak, and capacity.

    Classes with the same stages and the same memory are merged into one row.
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
    """Return the names of blocks as text; consecutively numbered names become a range.

    >>> blocks_text(["embedding", "layers.0", "layers.1", "layers.2", "head"])
    'embedding, layers.0 to 2, head'
    """
    return plain(", ".join(_ranges(blocks)), 200)


def _ranges(blocks: Sequence[str]) -> Iterator[str]:
    # number minus index is constant along a run of consecutive numbers
    def run(place: int) -> tuple[str, int | None]:
        stem, _, number = blocks[place].rpartition(".")
        return (stem, int(number) - place) if number.isdecimal() and stem else (blocks[place], None)

    for _, places in groupby(range(len(blocks)), run):
        first, *rest = (blocks[place] for place in places)
        yield f"{first} to {rest[-1].rpartition('.')[2]}" if rest else first


_AXES = {
    TaskKind.TENSOR_COMMUNICATION: OPERATOR_AXES,
    TaskKind.EXPERT_COMMUNICATION: GROUPS[EXPERT],
    TaskKind.CONTEXT_COMMUNICATION: GROUPS[CONTEXT],
}
"""The mesh axes of the groups of a kind of communication inside passes."""


def groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the groups of ranks that communicate: their kind, mesh axes, and links at every pipeline position.

    A group with a ``stream`` describes only the kind's communication on that stream.
    """
    some = "data (or a part of it, for experts)" if plan.expert > 1 else "data"
    data = (TaskKind.DATA_COMMUNICATION, some, GROUPS[DATA], "")
    asked = [(kind, kind.value.split()[0], axes, "") for kind, axes in _AXES.items()]
    replicas = (TaskKind.DATA_COMMUNICATION, "replica", GROUPS[REPLICA], str(StreamKind.REPLICA))
    links = interconnect(cluster)
    return [
        {
            "kind": str(kind),
            "name": name,
            "stream": stream,
            "axes": [axis for axis in axes if plan.mesh.size(axis) > 1],
            "links": _links_of_positions(plan, axes, links),
        }
        for kind, name, axes, stream in (*asked, replicas, data)
        if any(plan.mesh.size(axis) > 1 for axis in axes)
    ]


def hops(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the stage boundaries: both stages, and the links between their first ranks."""
    positions, links = plan.positions, interconnect(cluster)
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    return [
        {"from": one, "to": two, "links": _links(plan, [positions[one] * stride, positions[two] * stride], links)}
        for stage in range(len(positions) - 1)
        for one, two in ((stage, stage + 1), (stage + 1, stage))
        if positions[one] != positions[two]
    ]


def mesh_axes(mesh: Mesh) -> list[dict[str, Any]]:
    """Return the mesh axes with more than one rank."""
    return [{"name": a.name, "size": a.size, "stride": mesh.stride(a.name)} for a in mesh.axes if a.size > 1]


def _links_of_positions(plan: Plan, axes: Sequence[str], links: Interconnect) -> list[str]:
    """Return for every pipeline position the links of a ring through the ranks of its first group."""
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    (group, *_) = plan.mesh.rows(*(axis for axis in axes if plan.mesh.size(axis) > 1)).tolist()
    rings = [[rank + position * stride for rank in (*group, group[0])] for position in range(plan.pipeline)]
    return [_links(plan, ring, links) for ring in rings]


def _links(plan: Plan, ranks: Sequence[int], links: Interconnect) -> str:
    """Return the kinds of links between neighbours in ``ranks``, slowest first, each with its lowest bandwidth."""
    devices = np.array([plan.placement[rank] if plan.placement else rank for rank in ranks])
    used = np.unique(links.routes(devices[:-1], devices[1:]).link)
    slowest: dict[str, float] = {}
    for link in used[np.argsort(links.bandwidth[used], kind="stable")].tolist():
        slowest.setdefault(links.kind(link), float(links.bandwidth[link]))
    return ", ".join(f"{kind} at {format_bandwidth(rate)}" for kind, rate in slowest.items())


def path(found: CriticalPath, unit: float, columns: Columns) -> dict[str, Any]:
    """Return the stretches of a critical path as columns; moments are multiples of ``unit`` seconds."""
    stretches = np.array(found.stretches(), np.int64).reshape(-1, 3)
    start, end = np.rint(stretches[:, 1:].T / (TICKS_PER_SECOND * unit)).astype(np.int64)
    return {
        "class": columns.add(stretches[:, 0], "u4"),
        "start": columns.add_steps(start),
        "duration": columns.add(end - start, "u4"),
    }
