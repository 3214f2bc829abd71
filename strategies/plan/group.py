"""Groups: layouts with the same degrees, ranks, microbatch and schedule.

A group is a table of two kinds of choices: a row says how passes run, a column where states are. The time of the
passes depends on the row, the time after them on the column, and memory on the sum of both, so that the bounds of all
members are outer sums (`meshwise.strategies.bounds.group_bounds`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NOTHING, Offloading
from meshwise.strategies.plan.recomputation import OfStage


class PassChoice(NamedTuple):
    """How passes run: recomputation, tensor communication beside products, and activations kept on the host."""

    recompute: OfStage
    overlap_tensor: bool = False
    activations: tuple[float, ...] = ()


class StateChoice(NamedTuple):
    """Where states are and how gradients are summed; ``offload`` has no activations, which belong to the row."""

    zero: int
    reshard_after_forward: bool = True
    overlap_gradients: bool = True
    gradient_reduction: str = "all_reduce"
    offload: Offloading = NOTHING


@dataclass(frozen=True, eq=False)
class Group:
    """A table of layouts; ``member_mask[row, column]`` says whether the cell is a member.

    Parameters
    ----------
    layout
        The fields that all members share; its other fields mean nothing.
    """

    layout: Layout
    passes: tuple[PassChoice, ...]
    states: tuple[StateChoice, ...]
    legal: NDArray[np.bool_]

    @cached_property
    def count(self) -> int:
        """The number of members."""
        return int(np.count_nonzero(self.legal))

    def choices(self, row: int, column: int) -> dict[str, Any]:
        """Return the fields of a layout that a row and a column choose, with their values."""
        run, state = self.passes[row]._asdict(), self.states[column]._asdict()
        if activations := run.pop("activations"):
            state["offload"] = replace(state["offload"], activations=activations)
        return run | state

    def member(self, row: int, column: int) -> Layout:
        """Return the layout of a row and a column."""
        return replace(self.layout, **self.choices(row, column))

    def __iter__(self) -> Iterator[Layout]:
        # column by column: members with the same states follow one another
        for column, row in np.argwhere(self.legal.T).tolist():
            yield self.member(row, column)
