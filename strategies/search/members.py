"""The members of a group by their bounds, and what is asked of them first."""

from math import inf

import numpy as np

from simulator.program import IntArray
from strategies.group import Group
from strategies.group_bounds import FloatArray
from strategies.layout import Layout
from strategies.schedule import rule_of
from strategies.schedules.rule import no_pairs


class GroupMembers:
    """The members of a group that may fit, the cheapest bound first.

    Parameters
    ----------
    bounds
        Of all rows and columns of the group, in seconds; infinite where there is no member that may fit.
    """

    def __init__(self, group: Group, bounds: FloatArray) -> None:
        self.group, self.at = group, 0
        cells: IntArray = np.flatnonzero(bounds < inf)
        seconds = bounds.ravel()[cells]
        order = np.argsort(seconds, kind="stable")
        self.cells, self.seconds = cells[order], seconds[order]

    @property
    def bound(self) -> float:
        """Seconds that the cheapest member left takes at least; infinite where none is left."""
        return float(self.seconds[self.at]) if self.at < len(self.cells) else inf

    def next(self) -> Layout:
        """Return the cheapest member left."""
        row, column = divmod(int(self.cells[self.at]), len(self.group.states))
        self.at += 1
        return self.group.member(row, column)


def memory_depends_on_timing(layout: Layout) -> bool:
    """Return whether peak memory depends on when passes run; then it costs more to compute than the longest path."""
    return rule_of(layout.schedule).pairs is not no_pairs or layout.offload.in_passes
