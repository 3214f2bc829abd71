"""A schedule of one size whose orders are written out, action by action."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strategies.schedules.order import INPUT, Order
from strategies.schedules.rule import Placement, ScheduleRule, no_pairs, place

NAME = "custom"
"""What messages call a schedule that has no name of its own."""


@dataclass(frozen=True, slots=True)
class WrittenRule(ScheduleRule):
    """A schedule for one number of pipeline ranks and of microbatches, with its stages where they are.

    Parameters
    ----------
    ranks_of_stages
        The pipeline rank of every stage.
    microbatches
        How many there are.
    """

    ranks_of_stages: tuple[int, ...] = (0,)
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return 1 + max(self.ranks_of_stages)

    def stage_ranks(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage."""
        return self.ranks_of_stages

    def num_stages(self, ranks: int, chunks: int) -> int:
        """Return the stages of all ranks."""
        return len(self.ranks_of_stages)

    def undefined(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Return the equation for want of which there is no such order; None where there is."""
        met = (("pipeline", ranks, self.ranks), ("chunks", chunks, self.chunks[0]))
        for name, value, own in (*met, ("microbatches", microbatches, self.microbatches)):
            if value != own:
                return f"{self.name}: {name}({value}) = {own} does not hold; nearest: {own}"
        return None


def written(
    orders: Sequence[Order], pairs: Sequence[tuple[int, ...]], stage_ranks: tuple[int, ...], microbatches: int
) -> WrittenRule:
    """Return the rule of orders that are written out.

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
