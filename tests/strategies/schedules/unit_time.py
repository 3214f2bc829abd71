"""When every action starts and ends where transfers take no time: what all closed forms speak of.

It knows a schedule's orders and pairs alone, and nothing of the program's own evaluators.
"""

from typing import NamedTuple

from meshwise.strategies.schedules.rule import PassTimes
from meshwise.strategies.schedules.schedule import Action, Schedule

Done = tuple[int, str, int]


class Clocks(NamedTuple):
    """Per pipeline rank the start of the first action, the end of the last, and the time of all."""

    starts: list[float]
    ends: list[float]
    works: list[float]

    @property
    def step(self) -> float:
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """The most that a rank idles between its first and its last action."""
        return max(end - start - work for start, end, work in zip(*self, strict=True))


def walk(schedule: Schedule, times: PassTimes, together: float | None = None) -> Clocks:
    """Return the clocks of a schedule whose stages all take ``times``; raise where it waits for ever."""
    seconds = {"F": times.forward, "B": times.backward, "I": times.input, "W": times.weight}
    paired = times.total if together is None else together
    todo = [grouped(schedule, order) for order in schedule.orders]
    ranks = range(len(todo))
    position, done = [0 for _ in ranks], dict[Done, float]()
    clocks = Clocks([-1.0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks])
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while position[rank] < len(todo[rank]):
                group = todo[rank][position[rank]]
                needs = [need for action in group for need in needed(action, len(schedule.stage_ranks))]
                if not all(need in done for need in needs):
                    break
                start = max([clocks.ends[rank], *(done[need] for need in needs)])
                taken = paired if len(group) == 2 else seconds[group[0].kind]
                if position[rank] == 0:
                    clocks.starts[rank] = start
                clocks.ends[rank] = start + taken
                clocks.works[rank] += taken
                for stage, kind, microbatch in group:
                    done[stage, "gradient" if kind in ("B", "I") else kind.value, microbatch] = start + taken
                position[rank] += 1
                moved = True
    assert position == [len(groups) for groups in todo], f"{schedule.name} waits for ever"
    return clocks


def grouped(schedule: Schedule, order: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    pairs = dict(schedule.overlapped)
    backwards = set(pairs.values())
    return [(a, pairs[a]) if a in pairs else (a,) for a in order if a not in backwards]


def needed(action: Action, stages: int) -> list[Done]:
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "gradient", microbatch)]
    above: list[Done] = [(stage + 1, "gradient", microbatch)] if stage < stages - 1 else []
    return [(stage, "F", microbatch), *above]
