"""How long ranks run each kind of task."""

from simulator.program import TaskKind
from simulator.timeline import Timeline


def busy_by_kind(timeline: Timeline) -> dict[TaskKind, float]:
    """Return the seconds of a step in which the mean rank runs each kind of task; kinds that never run are left out."""
    total = sum(len(each.ranks) for each in timeline.rank_classes) * timeline.steps
    found = {}
    for kind in TaskKind:
        busy = (timeline.busy(index, [kind]) * len(each.ranks) for index, each in enumerate(timeline.rank_classes))
        if seconds := sum(busy) / total:
            found[kind] = seconds
    return found
