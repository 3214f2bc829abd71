"""What a schedule is by name: its order, where its stages are, and for which sizes it exists."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import count

from simulator.brief import brief
from strategies.schedules.order import Order


class Placement(StrEnum):
    """Where the stages are: round and round the pipeline ranks, down and up again, or anywhere, as it is written."""

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
    """What the microbatches of a schedule must fulfil.

    Parameters
    ----------
    holds
        Whether it does for so many pipeline ranks and microbatches.
    equation
        The same in words, with both numbers.
    defines
        Whether there is no order otherwise; else there is one, but its source does not run it.
    """

    holds: Callable[[int, int], bool]
    equation: Callable[[int, int], str]
    defines: bool = True

    def nearest(self, ranks: int, microbatches: int) -> int:
        """Return the number of microbatches nearest to ``microbatches`` that fulfils it, the smaller of two."""
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
    """Return the versions of its weights that a rank of a synchronous schedule keeps: 1."""
    return 1


def no_pairs(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the rows that run as one with the next: none."""
    return ()


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """A schedule for any number of pipeline ranks, microbatches and chunks.

    Parameters
    ----------
    order
        The actions of a rank, of (rank, ranks, microbatches, chunks).
    source
        Where it was published.
    placement
        Where the stages are.
    chunks
        The fewest and the most stages a rank; None for no limit.
    condition
        What its microbatches fulfil.
    splits_backward
        Whether gradients of inputs and of weights are actions of their own, in places at least.
    asynchronous
        Whether a step begins before the one before it has ended on all ranks, on older weights.
    weight_versions
        How many versions of its weights a rank keeps, of (rank, ranks).
    updates_every_microbatch
        Whether weights are updated after every backward, and not once a step.
    pairs
        The rows of ``order`` that run as one with the row after them, of the same arguments.
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
        """Return the equation for want of which there is no such order, and the nearest size; None where there is."""
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
        """Return the equation that does not hold for these sizes, and the nearest size; None where all hold."""
        undefined = self.undefined(ranks, microbatches, chunks)
        return undefined or self._unfulfilled(self.condition, ranks, microbatches)

    def _unfulfilled(self, condition: Condition, ranks: int, microbatches: int) -> str | None:
        if condition.holds(ranks, microbatches):
            return None
        near = self.condition.nearest(ranks, max(microbatches, 1))
        return f"{self.name}: {condition.equation(ranks, microbatches)} does not hold; nearest: {near}"
