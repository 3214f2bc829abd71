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

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr

Order = NDArray[np.int64]
"""The actions of one pipeline rank as rows: stage, number of the kind, microbatch."""

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Numbers of the kinds: a forward; gradients of inputs and weights together, of inputs only, of weights only."""


Columns = tuple[Order, Order]
"""The stages and the microbatches of all actions of one kind, in their order."""


def merge_columns(kinds: Order, columns: dict[int, Columns]) -> Order:
    """Return an order whose rows have the given kinds; each kind takes its stages and microbatches in turn.

    >>> first = np.array([0, 0]), np.array([0, 1])
    >>> merge_columns(np.array([FORWARD, BACKWARD, FORWARD, BACKWARD]), {FORWARD: first, BACKWARD: first}).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    """
    rows = np.stack([kinds, kinds, kinds], axis=1)
    for kind, (stages, microbatches) in columns.items():
        is_kind = kinds == kind
        rows[is_kind, 0], rows[is_kind, 2] = stages, microbatches
    return rows


def build_columns(stage: int, num_microbatches: int) -> Columns:
    """Return the columns of a stage that takes the microbatches in ascending order."""
    return np.full(num_microbatches, stage), np.arange(num_microbatches)


def build_rounds(
    rank: int, num_ranks: int, num_chunks: int, round_size: int, num_microbatches: int
) -> tuple[Columns, Columns]:
    """Return the columns of forwards and backwards that take ``round_size`` microbatches through each chunk in turn.

    Forwards visit the chunks of a looped placement from the first to the last, backwards from the last to the first.
    """
    turn = np.arange(num_microbatches * num_chunks)
    chunk = turn // round_size % num_chunks
    microbatch = turn // (round_size * num_chunks) * round_size + turn % round_size
    return (chunk * num_ranks + rank, microbatch), ((num_chunks - 1 - chunk) * num_ranks + rank, microbatch)


class Placement(StrEnum):
    """How stages lie on pipeline ranks: round and round, down and up again, or as a written schedule says."""

    LOOP = "loop"
    V = "v"
    WRITTEN = "written"


@lru_cache(maxsize=1024)
def place_stages(placement: Placement, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage.

    >>> place_stages(Placement.LOOP, 3, 2), place_stages(Placement.V, 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    even_ranks = tuple(range(num_ranks))
    odd_ranks = even_ranks[::-1] if placement is Placement.V else even_ranks
    return tuple(rank for chunk in range(num_chunks) for rank in (odd_ranks if chunk % 2 else even_ranks))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the number of microbatches of a schedule.

    ``is_fulfilled`` returns whether it holds, of (pipeline ranks, microbatches), and ``equation`` returns it as text,
    with both numbers. ``is_necessary`` says whether no order exists otherwise; if not, one exists that the schedule's
    source does not run.
    """

    is_fulfilled: Callable[[int, int], bool]
    equation: Callable[[int, int], str]
    is_necessary: bool = True

    def find_nearest(self, num_ranks: int, num_microbatches: int) -> int:
        """Return the nearest number of microbatches that fulfils the condition, of two the smaller."""
        candidates = (m for distance in count() for m in (num_microbatches - distance, num_microbatches + distance))
        return next(m for m in candidates if m >= 1 and self.is_fulfilled(num_ranks, m))


AT_LEAST_ONE = Condition(lambda ranks, m: m >= 1, lambda ranks, m: f"microbatches({m}) >= 1")
AS_MANY_AS_RANKS = Condition(
    lambda ranks, m: m >= ranks, lambda ranks, m: f"microbatches({m}) >= pipeline({ranks})", is_necessary=False
)
AS_MANY_AS_STAGES = Condition(
    lambda ranks, m: m >= 2 * ranks, lambda ranks, m: f"microbatches({m}) >= 2 * pipeline({ranks})"
)


def count_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Return into how many rounds torch's interleaved schedules divide microbatches, of ``num_ranks`` or more each."""
    return max(1, num_microbatches // num_ranks)


def find_round_size(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of microbatches that interleaved schedules take through a chunk before the next.

    >>> find_round_size(4, 8), find_round_size(4, 10)
    (4, 5)
    """
    return num_microbatches // count_rounds(num_ranks, num_microbatches)


def _format_whole_rounds(num_ranks: int, num_microbatches: int) -> str:
    """Return the condition that rounds are equally long, as text."""
    if num_microbatches < num_ranks:
        return AS_MANY_AS_RANKS.equation(num_ranks, num_microbatches)
    return f"microbatches({num_microbatches}) % ({num_microbatches} // pipeline({num_ranks})) = 0"


WHOLE_ROUNDS = Condition(
    lambda ranks, m: m >= ranks and m % count_rounds(ranks, m) == 0,
    _format_whole_rounds,
)


def keep_one_version(rank: int, num_ranks: int) -> int:
    """Return how many versions of its weights a rank of a synchronous schedule keeps: 1."""
    return 1


def list_no_pairs(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
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
    condition: Condition = AT_LEAST_ONE
    splits_backward: bool = False
    is_asynchronous: bool = False
    weight_versions: Callable[[int, int], int] = keep_one_version
    updates_every_microbatch: bool = False
    pairs: Callable[[int, int, int, int], tuple[int, ...]] = list_no_pairs

    __repr__ = brief_repr("name", "source")

    @property
    def overlaps_passes(self) -> bool:
        """Whether passes run in pairs, each computing during the communication of the other."""
        return self.pairs is not list_no_pairs

    def list_stage_ranks(self, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return place_stages(self.placement, num_ranks, num_chunks)

    def count_stages(self, num_ranks: int, num_chunks: int) -> int:
        """Return the stages of all ranks."""
        return num_ranks * num_chunks

    def explain_undefined(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str | None:
        """Return the equation without which no order exists, and the nearest size; None where one exists."""
        min_chunks, max_chunks = self.chunks
        if num_ranks < 1:
            return f"{self.name}: pipeline({num_ranks}) >= 1 does not hold; nearest: 1"
        if num_chunks < min_chunks or (max_chunks is not None and num_chunks > max_chunks):
            sign, nearest_count = (">=", min_chunks) if max_chunks is None else ("=", max_chunks)
            return f"{self.name}: chunks({num_chunks}) {sign} {nearest_count} does not hold; nearest: {nearest_count}"
        if num_microbatches < 1:
            return self._explain_unfulfilled(AT_LEAST_ONE, num_ranks, num_microbatches)
        if not self.condition.is_necessary:
            return None
        return self._explain_unfulfilled(self.condition, num_ranks, num_microbatches)

    def find_violation(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str | None:
        """Return the first equation that these sizes break, and the nearest size; None where all hold."""
        fault = self.explain_undefined(num_ranks, num_microbatches, num_chunks)
        return fault or self._explain_unfulfilled(self.condition, num_ranks, num_microbatches)

    def _explain_unfulfilled(self, condition: Condition, num_ranks: int, num_microbatches: int) -> str | None:
        if condition.is_fulfilled(num_ranks, num_microbatches):
            return None
        nearest_count = self.condition.find_nearest(num_ranks, max(num_microbatches, 1))
        return f"{self.name}: {condition.equation(num_ranks, num_microbatches)} does not hold; nearest: {nearest_count}"


CUSTOM_NAME = "custom"
"""The name of a written schedule, in messages."""


@dataclass(frozen=True, slots=True)
class WrittenRule(ScheduleRule):
    """A written schedule: it exists for one number of pipeline ranks and of microbatches.

    ``ranks_of_stages`` has the pipeline rank of every stage.
    """

    ranks_of_stages: tuple[int, ...] = (0,)
    num_microbatches: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return 1 + max(self.ranks_of_stages)

    @property
    def overlaps_passes(self) -> bool:
        """Whether passes run in pairs, each computing during the communication of the other."""
        return self.pairs is not list_no_pairs

    def list_stage_ranks(self, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return self.ranks_of_stages

    def count_stages(self, num_ranks: int, num_chunks: int) -> int:
        """Return the stages of all ranks."""
        return len(self.ranks_of_stages)

    def explain_undefined(self, num_ranks: int, num_microbatches: int, num_chunks: int) -> str | None:
        """Return the equation that these sizes break, with the only size; None where they are that size."""
        sizes = (("pipeline", num_ranks, self.num_ranks), ("chunks", num_chunks, self.chunks[0]))
        for name, value, required_value in (*sizes, ("microbatches", num_microbatches, self.num_microbatches)):
            if value != required_value:
                return f"{self.name}: {name}({value}) = {required_value} does not hold; nearest: {required_value}"
        return None


def build_written_rule(
    orders: Sequence[Order], pairs: Sequence[tuple[int, ...]], stage_ranks: tuple[int, ...], num_microbatches: int
) -> WrittenRule:
    """Return the rule of a schedule that is written out, given the order of every rank.

    ``pairs`` are for every rank the rows that run as one with the row after them.
    """
    num_ranks = len(orders)
    num_chunks = max(Counter(stage_ranks).values())
    places = {place_stages(placement, num_ranks, num_chunks): placement for placement in (Placement.V, Placement.LOOP)}
    return WrittenRule(
        CUSTOM_NAME,
        lambda rank, *_: orders[rank],
        "written by hand",
        placement=places.get(stage_ranks, Placement.WRITTEN),
        chunks=(num_chunks, num_chunks),
        splits_backward=any((rows[:, 1] == INPUT).any() for rows in orders),
        pairs=(lambda rank, *_: pairs[rank]) if any(pairs) else list_no_pairs,
        ranks_of_stages=stage_ranks,
        num_microbatches=num_microbatches,
    )
