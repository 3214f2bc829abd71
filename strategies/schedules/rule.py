"""Rules of schedules: the order of a rank's actions, the placement of stages, and the sizes for which they exist.

An order is the actions of one pipeline rank as rows of numbers. A rule holds for any size; a schedule of one size may
also be written out, action by action.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief

Order = NDArray[np.int64]
"""The actions of one pipeline rank as rows: stage, number of the kind, microbatch."""

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Numbers of the kinds: a forward; gradients of inputs and weights together, of inputs only, of weights only."""


class PassTimes(NamedTuple):
    """Seconds of one microbatch in one stage: of forward, gradients of inputs and gradients of weights."""

    forward: float
    input: float
    weight: float

    @property
    def backward(self) -> float:
        """Seconds of a backward that is not split."""
        return self.input + self.weight

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


Columns = tuple[Order, Order]
"""The stages and the microbatches of all actions of one kind, in their order."""


def merged(kinds: Order, columns: dict[int, Columns]) -> Order:
    """Return an order whose rows have the given kinds; each kind takes its stages and microbatches in turn.

    >>> first = np.array([0, 0]), np.array([0, 1])
    >>> merged(np.array([FORWARD, BACKWARD, FORWARD, BACKWARD]), {FORWARD: first, BACKWARD: first}).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    """
    rows = np.stack([kinds, kinds, kinds], axis=1)
    for kind, (stages, microbatches) in columns.items():
        here = kinds == kind
        rows[here, 0], rows[here, 2] = stages, microbatches
    return rows


def in_turn(stage: int, microbatches: int) -> Columns:
    """Return the columns of a stage that takes the microbatches in ascending order."""
    return np.full(microbatches, stage), np.arange(microbatches)


def rounds(rank: int, ranks: int, chunks: int, size: int, microbatches: int) -> tuple[Columns, Columns]:
    """Return the columns of forwards and backwards that take ``round_size`` microbatches through each chunk in turn.

    Forwards visit the chunks of a looped placement from the first to the last, backwards from the last to the first.
    """
    turn = np.arange(microbatches * chunks)
    chunk, microbatch = turn // size % chunks, turn // (size * chunks) * size + turn % size
    return (chunk * ranks + rank, microbatch), ((chunks - 1 - chunk) * ranks + rank, microbatch)


class Placement(StrEnum):
    """How stages lie on pipeline ranks: round and round, down and up again, or as a written schedule says."""

    LOOP = "loop"
    V = "v"
    WRITTEN = "written"


@lru_cache(maxsize=1024)
def place(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage.

    >>> place(Placement.LOOP, 3, 2), place(Placement.V, 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    down = tuple(range(ranks))
    turns = down[::-1] if placement is Placement.V else down
    return tuple(rank for chunk in range(chunks) for rank in (turns if chunk % 2 else down))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the number of microbatches of a schedule.

    Parameters
    ----------
    is_fulfilled
        Returns whether it holds, of (pipeline ranks, microbatches).
    equation
        Returns it as text, with both numbers.
    is_necessary
        Whether no order exists otherwise; if not, one exists that the schedule's source does not run.
    """

    holds: Callable[[int, int], bool]
    equation: Callable[[int, int], str]
    defines: bool = True

    def nearest(self, ranks: int, microbatches: int) -> int:
        """Return the nearest number of microbatches that fulfils the condition, of two the smaller."""
        near = (m for distance in count() for m in (microbatches - distance, microbatches + distance))
        return next(m for m in near if m >= 1 and self.holds(ranks, m))


ANY = Condition(lambda ranks, m: m >= 1, lambda ranks, m: f"microbatches({m}) >= 1")
AS_MANY_AS_RANKS = Condition(
    lambda ranks, m: m >= ranks, lambda ranks, m: f"microbatches({m}) >= pipeline({ranks})", defines=False
)
AS_MANY_AS_STAGES = Condition(
    lambda ranks, m: m >= 2 * ranks, lambda ranks, m: f"microbatches({m}) >= 2 * pipeline({ranks})"
)
WHOLE_ROUNDS = Condition(lambda ranks, m: m % ranks == 0, lambda ranks, m: f"microbatches({m}) % pipeline({ranks}) = 0")


def one_version(rank: int, ranks: int) -> int:
    """Return how many versions of its weights a rank of a synchronous schedule keeps: 1."""
    return 1


def no_pairs(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the rows that run as one with the next row, of a schedule without pairs: none."""
    return ()


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """A schedule for any number of pipeline ranks, microbatches and chunks.

    Parameters
    ----------
    order
        Returns the actions of a rank, of (rank, ranks, microbatches, chunks).
    source
        The publication.
    placement
        How stages lie on ranks.
    chunks
        The fewest and the most stages a rank; None for no limit.
    condition
        What the number of microbatches must fulfil.
    splits_backward
        Whether gradients of inputs and of weights are separate actions, at least of some microbatches.
    is_asynchronous
        Whether a step begins on older weights, before the previous step has ended on all ranks.
    weight_versions
        Returns how many versions of its weights a rank keeps, of (rank, ranks).
    updates_every_microbatch
        Whether weights are updated after every backward, not once a step.
    pairs
        Returns the rows of ``order`` that run as one with the row after them, of the same arguments.
    """

    name: str
    order: Callable[[int, int, int, int], Order]
    source: str
    placement: Placement = Placement.LOOP
    chunks: tuple[int, int | None] = (1, 1)
    condition: Condition = ANY
    splits_backward: bool = False
    asynchronous: bool = False
    weight_versions: Callable[[int, int], int] = one_version
    updates_every_microbatch: bool = False
    pairs: Callable[[int, int, int, int], tuple[int, ...]] = no_pairs

    __repr__ = brief("name", "source")

    def stage_ranks(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return place(self.placement, ranks, chunks)

    def num_stages(self, ranks: int, chunks: int) -> int:
        """Return the stages of all ranks."""
        return ranks * chunks

    def undefined(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Return the equation without which no order exists, and the nearest size; None where one exists."""
        fewest, most = self.chunks
        if ranks < 1:
            return f"{self.name}: pipeline({ranks}) >= 1 does not hold; nearest: 1"
        if chunks < fewest or (most is not None and chunks > most):
            sign, near = (">=", fewest) if most is None else ("=", most)
            return f"{self.name}: chunks({chunks}) {sign} {near} does not hold; nearest: {near}"
        if microbatches < 1:
            return self._unfulfilled(ANY, ranks, microbatches)
        return self._unfulfilled(self.condition, ranks, microbatches) if self.condition.defines else None

    def violation(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Return the first equation that these sizes break, and the nearest size; None where all hold."""
        undefined = self.undefined(ranks, microbatches, chunks)
        return undefined or self._unfulfilled(self.condition, ranks, microbatches)

    def _unfulfilled(self, condition: Condition, ranks: int, microbatches: int) -> str | None:
        if condition.holds(ranks, microbatches):
            return None
        near = self.condition.nearest(ranks, max(microbatches, 1))
        return f"{self.name}: {condition.equation(ranks, microbatches)} does not hold; nearest: {near}"


NAME = "custom"
"""The name of a written schedule, in messages."""


@dataclass(frozen=True, slots=True)
class WrittenRule(ScheduleRule):
    """A written schedule: it exists for one number of pipeline ranks and of microbatches.

    Parameters
    ----------
    ranks_of_stages
        The pipeline rank of every stage.
    num_microbatches
        The number of microbatches.
    """

    ranks_of_stages: tuple[int, ...] = (0,)
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return 1 + max(self.ranks_of_stages)

    def stage_ranks(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return self.ranks_of_stages

    def num_stages(self, ranks: int, chunks: int) -> int:
        """Return the stages of all ranks."""
        return len(self.ranks_of_stages)

    def undefined(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Return the equation that these sizes break, with the only size; None where they are that size."""
        met = (("pipeline", ranks, self.ranks), ("chunks", chunks, self.chunks[0]))
        for name, value, own in (*met, ("microbatches", microbatches, self.microbatches)):
            if value != own:
                return f"{self.name}: {name}({value}) = {own} does not hold; nearest: {own}"
        return None


def written(
    orders: Sequence[Order], pairs: Sequence[tuple[int, ...]], stage_ranks: tuple[int, ...], microbatches: int
) -> WrittenRule:
    """Return the rule of a schedule that is written out, given the order of every rank.

    Parameters
    ----------
    pairs
        For every rank the rows that run as one with the row after them.
    """
    ranks = len(orders)
    chunks = max(Counter(stage_ranks).values())
    known = (Placement.LOOP, Placement.V)
    return WrittenRule(
        NAME,
        lambda rank, *_: orders[rank],
        "written by hand",
        placement=next((each for each in known if place(each, ranks, chunks) == stage_ranks), Placement.WRITTEN),
        chunks=(chunks, chunks),
        splits_backward=any((rows[:, 1] == INPUT).any() for rows in orders),
        pairs=(lambda rank, *_: pairs[rank]) if any(pairs) else no_pairs,
        ranks_of_stages=stage_ranks,
        microbatches=microbatches,
    )
