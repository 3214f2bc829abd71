"""Groups: layouts with the same degrees, ranks, microbatch and schedule.

A group is a table of two kinds of choices: a row says how passes run, a column where states are. The time of the
passes depends on the row, the time after them on the column, and memory on the sum of both, so that the bounds of all
members are outer sums (`meshwise.strategies.bounds.group_bounds`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.plan.layout import Layout, Level, StepDecisions, names_at
from meshwise.strategies.plan.offloading import Offloading

PASS_DECISIONS = names_at(Level.PASS)
"""The decisions of a row; activations on the host are decided there too."""

STATE_DECISIONS = names_at(Level.STATE)
"""The decisions of a column; its offloading has no activations, which belong to the row."""


@dataclass(frozen=True, slots=True)
class FamilyKind:
    """A family that stands for all that agree with it in some properties: these alone are compared and hashed."""

    family: Layout = field(compare=False)
    properties: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """A table of layouts; ``member_mask[row, column]`` says whether the cell is a member.

    Parameters
    ----------
    layout
        The fields that all members share; its other fields mean nothing.
    passes
        How passes run, by row: `PASS_DECISIONS`, and the activations of ``offload``.
    states
        Where states are and how gradients are summed, by column: `STATE_DECISIONS`, without activations.
    """

    layout: Layout
    passes: tuple[StepDecisions, ...]
    states: tuple[StepDecisions, ...]
    member_mask: NDArray[np.bool_]

    @cached_property
    def num_members(self) -> int:
        """The number of members."""
        return int(np.count_nonzero(self.member_mask))

    def choose_fields(self, row: int, column: int) -> dict[str, Any]:
        """Return the fields of a layout that a row and a column choose, with their values."""
        passes, states = self.passes[row], self.states[column]
        fields = {name: getattr(passes, name) for name in PASS_DECISIONS}
        fields |= {name: getattr(states, name) for name in STATE_DECISIONS}
        if activations := passes.offload.activations:
            fields["offload"] = replace(states.offload, activations=activations)
        return fields

    def build_layout(self, row: int, column: int) -> Layout:
        """Return the layout of a row and a column."""
        return replace(self.layout, **self.choose_fields(row, column))

    def __iter__(self) -> Iterator[Layout]:
        # column by column: members with the same states follow one another
        for column, row in np.argwhere(self.member_mask.T).tolist():
            yield self.build_layout(row, column)


def select_passes(layout: StepDecisions) -> StepDecisions:
    """Return the row of a layout: how its passes run."""
    values = {name: getattr(layout, name) for name in PASS_DECISIONS}
    return StepDecisions(**values, offload=Offloading(activations=layout.offload.activations))


def select_states(layout: StepDecisions) -> StepDecisions:
    """Return the column of a layout: where its states are."""
    values = {name: getattr(layout, name) for name in STATE_DECISIONS}
    return StepDecisions(**values | {"offload": replace(layout.offload, activations=())})
