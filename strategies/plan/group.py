"""Layouts that share degrees, ranks, microbatch and schedule, and differ in what passes keep and where states are.

A group is a table of two kinds of choices: how passes run, one a row, and where states are, one a column. What passes
take hangs on the row, what follows them on the column, and memory on the sum of both, so that bounds of all members
are outer sums (`meshwise.strategies.bounds.group_bounds`).
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
    """How passes run: what they compute again, what runs beside products, what activations go to the host."""

    recompute: OfStage
    overlap_tensor: bool = False
    activations: tuple[float, ...] = ()


class StateChoice(NamedTuple):
    """Where states are, and how gradients are summed; ``offload`` is without activations."""

    zero: int
    reshard_after_forward: bool = True
    overlap_gradients: bool = True
    gradient_reduction: str = "all_reduce"
    offload: Offloading = NOTHING


@dataclass(frozen=True, eq=False)
class Group:
    """The members of a table: ``legal[row, column]`` says which there are.

    Parameters
    ----------
    layout
        What all members share; its other fields mean nothing.
    """

    layout: Layout
    passes: tuple[PassChoice, ...]
    states: tuple[StateChoice, ...]
    legal: NDArray[np.bool_]

    @cached_property
    def count(self) -> int:
        """How many members there are."""
        return int(np.count_nonzero(self.legal))

    def choices(self, row: int, column: int) -> dict[str, Any]:
        """Return the fields that a row and a column choose, with their values."""
        run, state = self.passes[row]._asdict(), self.states[column]._asdict()
        if activations := run.pop("activations"):
            state["offload"] = replace(state["offload"], activations=activations)
        return run | state

    def member(self, row: int, column: int) -> Layout:
        """Return the layout of a row and a column."""
        return replace(self.layout, **self.choices(row, column))

    def __iter__(self) -> Iterator[Layout]:
        for column, row in np.argwhere(self.legal.T).tolist():
            yield self.member(row, column)
