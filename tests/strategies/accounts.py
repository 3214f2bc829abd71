"""All that is said of where the time of a step goes, as figures that two simulations of it can be compared by."""

from collections import Counter

import numpy as np

from meshwise.simulator.program import Program
from meshwise.simulator.spans import STREAM_KINDS, TASK_KINDS, Occupancy
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.evaluation import compute_resource_times
from meshwise.strategies.explanation.critical_path import critical_path, device_time

Figures = dict[tuple[object, ...], float]


def sums(timeline: Timeline) -> Figures:
    """Return the ticks that the spans of every rank class take by kind, the bytes that they say, and streams' ticks."""
    columns = timeline.columns
    found = Counter[tuple[object, ...]]()
    rows = (columns.rank_class, columns.kind, columns.end - columns.start, columns.bytes)
    for rank_class, kind, ticks, moved in zip(*(row.tolist() for row in rows), strict=True):
        found["ticks", rank_class, TASK_KINDS[kind]] += ticks
        found["bytes", rank_class, TASK_KINDS[kind]] += moved
    occupancy = Occupancy(columns, len(timeline.rank_classes))
    for stream in np.unique(columns.stream).tolist():
        for rank_class, seconds in enumerate(occupancy.seconds(columns.stream == stream).tolist()):
            found["busy", rank_class, STREAM_KINDS[stream]] = round(seconds * columns.per_second)
    return {name: value for name, value in found.items() if value}


def seconds(timeline: Timeline, program: Program) -> Figures:
    """Return the seconds of a step by what they are for, in every account of it."""
    of_kind = {
        "exposed": timeline.exposed_communication(),
        "device": device_time(timeline),
        "spent": compute_resource_times(timeline),
        "path": critical_path(program).sum_by_kind(),
    }
    found: Figures = {(name, str(kind)): value for name, row in of_kind.items() for kind, value in row.items()}
    return found | {("bubble",): timeline.bubble * timeline.length}
