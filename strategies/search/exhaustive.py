"""The reference: every plan of the space, none left out by a bound."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.problem import Problem
from strategies.search.ahead import ahead
from strategies.search.driver import Proof, Proposals
from strategies.search.space import Space, layouts


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Evaluation of every plan that fits: what other searches are checked against."""

    name: ClassVar[str] = "exhaustive"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit in the order of the space; at the end the best of them is proven."""
        plans = (complete(problem, layout) for layout in layouts(problem, space))
        best = yield from ahead(plan for plan in plans if costs.fits(plan))
        return Proof(best)
