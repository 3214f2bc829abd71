"""When every action starts and ends where transfers take no time: what all closed forms speak of.

It knows a schedule's orders and pairs alone, and nothing of the program's own evaluators.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from meshwise.strategies.schedules.schedule import SCHEDULES, Action, Schedule, build_schedule

from .closed_forms import PassSeconds

ONE = PassSeconds(1, 1, 1)
UNEVEN = (ONE, PassSeconds(3, 4, 2), PassSeconds(5, 3, 7))
SHORT_WEIGHTS = (ONE, PassSeconds(3, 4, 2), PassSeconds(5, 3, 3))
RANKS = (2, 3, 4, 5, 8, 16)
Form = Callable[..., float]
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


def walk(schedule: Schedule, times: PassSeconds, together: float | None = None) -> Clocks:
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
    pairs = dict(schedule.overlapped_pairs)
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


def counts(name: str, ranks: int, chunks: int, fewest: int) -> list[int]:
    """Microbatches from 2 to 64, at least ``fewest``, for which there is such an order."""
    wanted = {2, 3, 5, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks, 64}
    return sorted(
        m for m in wanted if fewest <= m <= 64 and SCHEDULES[name].explain_undefined(ranks, m, chunks) is None
    )


ACTIVATION_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}
"""A backward frees activations; where it is split, its gradients of weights do."""


def held(value: Schedule) -> list[int]:
    """Return the most activations, each of one microbatch and chunk, that every rank holds at once."""
    changes = ([ACTIVATION_CHANGE[action.kind] for action in order] for order in value.orders)
    return [max(accumulate(row)) for row in changes]


def check_flat(
    name: str, bubble: Form, in_flight: Form, times: tuple[PassSeconds, ...], fewest: Callable[[int], int], ranks: int
) -> None:
    """Compare the closed forms of a schedule with one stage a rank with its actions."""
    for microbatches in counts(name, ranks, 1, fewest(ranks)):
        value = build_schedule(name, ranks, microbatches)
        assert held(value) == [in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        for each in times:
            assert walk(value, each).bubble == bubble(ranks, microbatches, each)


def check_looped(
    name: str,
    bubble: Form,
    in_flight: Form,
    times: tuple[PassSeconds, ...],
    fewest: Callable[[int], int],
    ranks: int,
    chunks: int,
) -> None:
    """Compare the closed forms of a schedule with several stages a rank with its actions."""
    for microbatches in counts(name, ranks, chunks, fewest(ranks)):
        value = build_schedule(name, ranks, microbatches, chunks)
        assert held(value) == [in_flight(rank, ranks, microbatches, chunks) for rank in range(ranks)]
        for each in times:
            assert walk(value, each).bubble == bubble(ranks, microbatches, chunks, each)
