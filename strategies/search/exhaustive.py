"""The proven optimum: every plan of the space, best bound first."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.layout import Layout
from strategies.problem import Problem
from strategies.search.driver import OutOfTime, Proof, Proposals
from strategies.search.space import Space, layouts


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Best-first search over the whole space.

    Plans that do not fit are dropped, the rest are evaluated by rising lower bound until the
    next bound reaches the best step time: then no plan left can be faster. No plan is evaluated
    whose bound is above the optimum. Where a budget ends it early, the lower bound is the
    smaller of the best step time and the next plan's bound. Where the time is up before every
    plan has a bound, or at Ctrl-C, the best bound so far is evaluated and nothing is proven.
    """

    name: ClassVar[str] = "exhaustive"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield plans by rising bound, each after a proof of how fast any plan can be; return the last proof."""
        bounded: list[tuple[float, Layout]] = []
        try:
            for bound_and_layout in _bounds(problem, space, costs):
                bounded.append(bound_and_layout)
        except (OutOfTime, KeyboardInterrupt) as stop:  # what was seen so far proves nothing, but holds a plan
            if bounded:
                yield complete(problem, min(bounded, key=_bound)[1])
            if isinstance(stop, KeyboardInterrupt):
                raise
            return None
        best = inf
        for bound, layout in sorted(bounded, key=_bound):
            yield Proof(min(bound, best))
            if bound >= best:
                break
            evaluation = yield complete(problem, layout)
            if evaluation.fits:
                best = min(best, evaluation.step_time)
        return Proof(best) if best < inf else None


_bound = itemgetter(0)


def _bounds(problem: Problem, space: Space, costs: CostModel) -> Iterator[tuple[float, Layout]]:
    """Yield the layouts that fit, each with the seconds that it takes at least."""
    for layout in layouts(problem, space):
        plan = complete(problem, layout)  # completed again when it is proposed: few are, and plans are large
        if costs.fits(plan):
            yield costs.bound(plan), layout
