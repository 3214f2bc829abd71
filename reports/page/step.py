"""One step on a page: the spans and the memory of every rank class once, and which ranks are of which class."""

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.bars import row_of
from reports.page.columns import Columns
from reports.text import plain
from simulator.memory import CATEGORIES, MemoryProfile
from simulator.spans import STREAM_KINDS, TASK_KINDS
from simulator.timeline import Timeline

_FINEST = -9  # the power of ten of a nanosecond
_MOMENTS = 2**32 - 1


def step(timeline: Timeline, name: str, columns: Columns) -> dict[str, Any]:
    """Return a timeline for a page; its spans and memory go into ``columns``.

    Moments are counted in ``unit`` seconds: nanoseconds, or ten times as many as often as the step needs. Spans that
    touch still touch.
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
    """Return the class of every rank, -1 where a number below the largest is no rank."""
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
    """Return spans in order of rank class, row, stream and start; the first three are told once a slice."""
    found = timeline.columns
    row = np.array([row_of(kind) for kind in TASK_KINDS])[found.kind]
    order = np.lexsort((found.end, found.start, found.stream, row, found.rank_class))
    keys = np.stack([found.rank_class, row, found.stream], axis=1)[order]
    first = np.flatnonzero(np.append(True, np.any(keys[1:] != keys[:-1], axis=1)))
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
    """Return memory over time: whole bytes of every category as what each is more than the one before."""
    usage = np.rint(np.asarray(profile.usage, np.float64)).reshape(-1, len(CATEGORIES))
    changes = np.diff(usage, axis=0, prepend=0.0)
    return {
        "class": profile.rank_class,
        "capacity": profile.capacity if isfinite(profile.capacity) else None,
        "times": columns.add_steps(np.rint(np.asarray(profile.times) / unit).astype(np.int64)),
        "usage": [columns.add(changes[:, index], "f8") for index in range(len(CATEGORIES))],
    }
