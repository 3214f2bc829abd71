"""The sections of a page: steps, the stage table, communicating groups, and the critical path.

Long columns of numbers are kept as bytes, concatenated and compressed together.
"""

import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.reports.document import clean_text
from meshwise.reports.lanes import lane_labels, lane_row
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

_ALIGNMENT = 8  # bytes: the widest number of a column, so that each can be read in place
Reference = dict[str, Any]
"""Location of a column: its type, its first byte, and its count of numbers."""


class Columns:
    """Columns of numbers that are embedded in a page; `add` returns a reference to each."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Any, kind: str) -> Reference:
        """Add a column of little-endian numbers of ``kind`` (such as ``u4``), and return its reference.

        Raises
        ------
        ValueError
            Where a number does not fit into ``kind``.
        """
        numbers = np.asarray(values)
        column = numbers.astype(f"<{kind}")
        if not np.array_equal(column, numbers):
            raise ValueError(f"numbers of a page fit into {kind}, met {numbers.min()} to {numbers.max()}")
        return self._append(column, kind)

    def add_steps(self, values: NDArray[np.int64]) -> Reference:
        """Add whole numbers in [0, 2**32) as differences between neighbours, modulo 2**32.

        The differences in a schedule repeat, and so compress, while the moments themselves do not.
        """
        if len(values) and not 0 <= values.min() <= values.max() < 2**32:
            raise ValueError(f"moments of a page lie in [0, 2**32), met {values.min()} to {values.max()}")
        return self._append((np.diff(values, prepend=0) % 2**32).astype("<u4"), "u4")

    def to_text(self) -> str:
        """Return all columns as zlib data in base 64."""
        return b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")

    def _append(self, column: NDArray[Any], kind: str) -> Reference:
        data = column.tobytes()
        reference = {"type": kind, "at": self._size, "count": len(column)}
        self._parts += [data, bytes(-len(data) % _ALIGNMENT)]
        self._size += len(data) + len(self._parts[-1])
        return reference


_FINEST_POWER = -9  # the power of ten of a nanosecond
_MOMENTS = 2**32 - 1


def timeline_document(timeline: Timeline, name: str, columns: Columns) -> dict[str, Any]:
    """Return a timeline as a page's document; its spans and memory go into ``columns``.

    Moments are whole multiples of ``unit`` seconds: a nanosecond, or the smallest larger power of ten for which the
    step fits 32 bits. Spans that touch still touch.
    """
    unit = _time_unit(timeline)
    return {
        "name": name,
        "source": f"{timeline.source}, {timeline.engine.replace('_', ' ')}",
        "step_time": timeline.step_time,
        "length": timeline.length,
        "begin": timeline.begin,
        "steps": timeline.steps,
        "unit": unit,
        "classes": [
            {"name": clean_text(rank_class.name), "stages": rank_class.stages} for rank_class in timeline.rank_classes
        ],
        "class_of": columns.add(rank_classes_array(timeline), "i4"),
        "spans": _spans_document(timeline, unit, columns),
        "memory": [_memory_document(profile, unit, columns) for profile in timeline.memory],
    }


def rank_classes_array(timeline: Timeline) -> NDArray[np.int64]:
    """Return the index of every rank's class, -1 for numbers below the largest that are no rank."""
    ranks = [rank for rank_class in timeline.rank_classes for rank in rank_class.ranks]
    class_of = np.full(1 + max(ranks, default=-1), -1)
    for index, members in enumerate(timeline.rank_classes):
        class_of[list(members.ranks)] = index
    return class_of


def _time_unit(timeline: Timeline) -> float:
    last_moment = max(
        timeline.length,
        float(timeline.columns.end.max(initial=0)) / timeline.columns.per_second,
        max((float(np.asarray(profile.times)[-1]) for profile in timeline.memory), default=0.0),
    )
    return next(10.0**power for power in range(_FINEST_POWER, 309) if last_moment / 10.0**power < _MOMENTS)


def _spans_document(timeline: Timeline, unit: float, columns: Columns) -> dict[str, Any]:
    """Return spans in order of rank class, row, stream and start; the first three are stored once per slice."""
    span_columns = timeline.columns
    rows = np.array([lane_row(kind) for kind in TASK_KINDS])[span_columns.kind]
    order = np.lexsort((span_columns.end, span_columns.start, span_columns.stream, rows, span_columns.rank_class))
    keys = np.stack([span_columns.rank_class, rows, span_columns.stream], axis=1)[order]
    slice_starts = np.flatnonzero(np.append(True, np.any(keys[1:] != keys[:-1], axis=1)))
    # rounded ends, not rounded durations: spans that touch still touch
    start, end = (
        np.rint(times[order] / (span_columns.per_second * unit)).astype(np.int64)
        for times in (span_columns.start, span_columns.end)
    )
    return {
        "streams": [str(kind) for kind in STREAM_KINDS],
        "names": [clean_text(name) for name in span_columns.names],
        "slice_class": columns.add(keys[slice_starts, 0], "u4"),
        "slice_row": columns.add(keys[slice_starts, 1], "u4"),
        "slice_stream": columns.add(keys[slice_starts, 2], "u4"),
        "slice_start": columns.add(np.append(slice_starts, len(keys)), "u4"),
        "kind": columns.add(span_columns.kind[order], "u1"),
        "stage": columns.add(span_columns.stage[order], "i4"),
        "microbatch": columns.add(span_columns.microbatch[order], "i4"),
        "operators": columns.add(span_columns.operators[order], "u4"),
        "start": columns.add_steps(start),
        "duration": columns.add(end - start, "u4"),
        "bytes": columns.add(span_columns.bytes[order], "f8"),
    }


def _memory_document(profile: MemoryProfile, unit: float, columns: Columns) -> dict[str, Any]:
    """Return memory over time: whole bytes of every category, as differences from one moment to the next."""
    usage = np.rint(np.asarray(profile.usage, np.float64)).reshape(-1, len(CATEGORIES))
    changes = np.diff(usage, axis=0, prepend=0.0)
    return {
        "class": profile.rank_class,
        "capacity": profile.capacity if isfinite(profile.capacity) else None,
        "times": columns.add_steps(np.rint(np.asarray(profile.times) / unit).astype(np.int64)),
        "usage": [columns.add(changes[:, index], "f8") for index in range(len(CATEGORIES))],
    }


def build_stage_rows(report: Report) -> list[dict[str, Any]]:
    """Return one row per rank class: its stages, their blocks, bytes by category at its peak, and capacity.

    Classes with the same stages and the same memory are merged into one row.
    """
    classes = report.timeline.rank_classes
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    memory = zip(report.timeline.memory, report.result["memory"], lane_labels(classes), strict=True)
    for profile, class_memory, name in memory:
        members = classes[profile.rank_class]
        sizes = [class_memory[str(category)] for category in CATEGORIES]
        row = {
            "name": name.split(" (")[0],
            "ranks": 0,
            "blocks": "; ".join(format_blocks(report.plan.stages[stage].blocks) for stage in members.stages),
            "sizes": sizes,
            "peak": profile.peak,
            "capacity": profile.capacity,
            "host": class_memory.get("host_peak", 0.0),
            "during": class_memory.get("peak_operator", ""),
        }
        stage_row = rows.setdefault((members.stages, *sizes, profile.capacity), row)
        stage_row["ranks"] += len(members.ranks)
    return list(rows.values())


def format_blocks(blocks: Sequence[str]) -> str:
    """Return the names of blocks as text; consecutively numbered names become a range.

    >>> format_blocks(["embedding", "layers.0", "layers.1", "layers.2", "head"])
    'embedding, layers.0 to 2, head'
    """
    return clean_text(", ".join(_block_ranges(blocks)), 200)


def _block_ranges(blocks: Sequence[str]) -> Iterator[str]:
    # number minus index is constant along a run of consecutive numbers
    def run(index: int) -> tuple[str, int | None]:
        prefix, _, number = blocks[index].rpartition(".")
        return (prefix, int(number) - index) if number.isdecimal() and prefix else (blocks[index], None)

    for _, places in groupby(range(len(blocks)), run):
        first_block, *other_blocks = (blocks[place] for place in places)
        yield f"{first_block} to {other_blocks[-1].rpartition('.')[2]}" if other_blocks else first_block


_AXES = {
    TaskKind.TENSOR_COMMUNICATION: OPERATOR_AXES,
    TaskKind.EXPERT_COMMUNICATION: GROUPS[EXPERT],
    TaskKind.CONTEXT_COMMUNICATION: GROUPS[CONTEXT],
}
"""The mesh axes of the groups of a kind of communication inside passes."""


def list_groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the groups of ranks that communicate: their kind, mesh axes, and links at every pipeline position.

    A group with a ``stream`` describes only the kind's communication on that stream.
    """
    data_name = "data (or a part of it, for experts)" if plan.expert > 1 else "data"
    data_group = (TaskKind.DATA_COMMUNICATION, data_name, GROUPS[DATA], "")
    pass_groups = [(kind, kind.value.split()[0], axes, "") for kind, axes in _AXES.items()]
    replica_group = (TaskKind.DATA_COMMUNICATION, "replica", GROUPS[REPLICA], str(StreamKind.REPLICA))
    links = interconnect(cluster)
    return [
        {
            "kind": str(kind),
            "name": name,
            "stream": stream,
            "axes": [axis for axis in axes if plan.mesh.size(axis) > 1],
            "links": _position_links(plan, axes, links),
        }
        for kind, name, axes, stream in (*pass_groups, replica_group, data_group)
        if any(plan.mesh.size(axis) > 1 for axis in axes)
    ]


def list_hops(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the stage boundaries: both stages, and the links between their first ranks."""
    positions, links = plan.positions, interconnect(cluster)
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    hops = [hop for stage in range(len(positions) - 1) for hop in ((stage, stage + 1), (stage + 1, stage))]
    return [
        {"from": a, "to": b, "links": _link_text(plan, [positions[a] * stride, positions[b] * stride], links)}
        for a, b in hops
        if positions[a] != positions[b]
    ]


def list_mesh_axes(mesh: Mesh) -> list[dict[str, Any]]:
    """Return the mesh axes with more than one rank."""
    return [
        {"name": axis.name, "size": axis.size, "stride": mesh.stride(axis.name)} for axis in mesh.axes if axis.size > 1
    ]


def _position_links(plan: Plan, axes: Sequence[str], links: Interconnect) -> list[str]:
    """Return for every pipeline position the links of a ring through the ranks of its first group."""
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    (group, *_) = plan.mesh.rows(*(axis for axis in axes if plan.mesh.size(axis) > 1)).tolist()
    rings = [[rank + position * stride for rank in (*group, group[0])] for position in range(plan.pipeline)]
    return [_link_text(plan, ring, links) for ring in rings]


def _link_text(plan: Plan, ranks: Sequence[int], links: Interconnect) -> str:
    """Return the kinds of links between neighbours in ``ranks``, slowest first, each with its lowest bandwidth."""
    devices = np.array([plan.placement[rank] if plan.placement else rank for rank in ranks])
    used_links = np.unique(links.routes(devices[:-1], devices[1:]).link)
    slowest: dict[str, float] = {}
    for link in used_links[np.argsort(links.bandwidth[used_links], kind="stable")].tolist():
        slowest.setdefault(links.kind(link), float(links.bandwidth[link]))
    return ", ".join(f"{kind} at {format_bandwidth(rate)}" for kind, rate in slowest.items())


def path_document(critical_path: CriticalPath, unit: float, columns: Columns) -> dict[str, Any]:
    """Return the stretches of a critical path as columns; moments are multiples of ``unit`` seconds."""
    stretches = np.array(critical_path.list_stretches(), np.int64).reshape(-1, 3)
    start, end = np.rint(stretches[:, 1:].T / (TICKS_PER_SECOND * unit)).astype(np.int64)
    return {
        "class": columns.add(stretches[:, 0], "u4"),
        "start": columns.add_steps(start),
        "duration": columns.add(end - start, "u4"),
    }
