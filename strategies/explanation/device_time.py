"""What devices do all through a step: seconds by kind, and waiting; they add up to the step time."""

from collections.abc import Mapping

from simulator.program import TaskKind
from simulator.timeline import Timeline

WAITING = "waiting"
"""Time in which a device neither computes nor communicates: the bubble of a pipeline, and the wait for others."""

_ORDER = (*(kind for kind in TaskKind if kind.computes), *(kind for kind in TaskKind if not kind.computes))


def device_time(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of one step that a device spends on each kind of work, on average over all devices.

    Where several kinds run at once the first one counts, in the order of `TaskKind` and what computes before all
    others: communication beneath computing costs nothing.
    """
    ranks = [len(members.ranks) for members in timeline.rank_classes]
    whole = sum(ranks) * timeline.steps
    found: dict[str, float] = {}
    before, kinds = 0.0, list[TaskKind]()
    for kind in _ORDER:
        kinds.append(kind)
        busy = sum(count * timeline.busy(each, kinds) for each, count in enumerate(ranks)) / max(whole, 1)
        if busy > before:
            found[str(kind)] = busy - before
        before = busy
    if timeline.step_time > before:
        found[WAITING] = timeline.step_time - before
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by kind the seconds that ``after`` takes more, the most first; they add up to what it takes more in all.

    >>> difference({"forward": 2.0, "backward": 4.0}, {"forward": 2.0, "recompute": 1.5, "backward": 4.25})
    {'recompute': 1.5, 'backward': 0.25}
    """
    kinds = dict.fromkeys((*before, *after))
    more = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in kinds}
    return dict(sorted(((kind, value) for kind, value in more.items() if value), key=lambda item: -item[1]))
