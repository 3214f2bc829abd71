"""What is known of a layout without an evaluation."""

from math import inf
from typing import NamedTuple

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.layout import Layout
from strategies.problem import Problem


class Outlook(NamedTuple):
    """What is known of a layout without an evaluation.

    Parameters
    ----------
    bound
        Seconds that its step takes at least; infinite where it does not fit.
    shortfall
        The part of the memory it needs that the smallest device does not have: 0 where it fits, and below 1.
    """

    bound: float
    shortfall: float

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return self.bound < inf


class Outlooks(dict[Layout, Outlook]):
    """The outlook of every layout of a problem, each asked for once."""

    def __init__(self, problem: Problem, costs: CostModel) -> None:
        super().__init__()
        self.problem, self.costs = problem, costs
        self.capacity = min(problem.usable(each) for each in problem.cluster.accelerators)

    def __missing__(self, layout: Layout) -> Outlook:
        plan = complete(self.problem, layout)
        if self.costs.fits(plan):
            self[layout] = Outlook(self.costs.bound(plan), 0.0)
        else:
            self[layout] = Outlook(inf, max(0.0, 1 - self.capacity / self.costs.peak_memory(plan)))
        return self[layout]
