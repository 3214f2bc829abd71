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
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.recomputation import StageRecompute


class PassChoice(NamedTuple):
    """How passes run: recomputation, tensor communication beside products, and activations kept on the host."""

    recompute: StageRecompute
    overlap_tensor: bool = False
    activations: tuple[float, ...] = ()


class StateChoice(NamedTuple):
    """Where states are and how gradients are summed; ``offload`` has no activations, which belong to the row."""

    zero: int
    reshard_after_forward: bool = True
    overlap_gradients: bool = True
    gradient_reduction: str = "all_reduce"
    offload: Offloading = NO_OFFLOADING


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
    member_mask: NDArray[np.bool_]

    @cached_property
    def num_members(self) -> int:
        """The number of members."""
        return int(np.count_nonzero(self.member_mask))

    def choose_fields(self, row: int, column: int) -> dict[str, Any]:
        """Return the fields of a layout that a row and a column choose, with their values."""
        pass_fields, state_fields = self.passes[row]._asdict(), self.states[column]._asdict()
        if activations := pass_fields.pop("activations"):
            state_fields["offload"] = replace(state_fields["offload"], activations=activations)
        return pass_fields | state_fields

    def build_layout(self, row: int, column: int) -> Layout:
        """Return the layout of a row and a column."""
        return replace(self.layout, **self.choose_fields(row, column))

    def __iter__(self) -> Iterator[Layout]:
        # column by column: members with the same states follow one another
        for column, row in np.argwhere(self.member_mask.T).tolist():
            yield self.build_layout(row, column)
