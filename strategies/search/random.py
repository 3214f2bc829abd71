"""Plans drawn at random: what every other search has to beat.

References
----------
.. [1] Bergstra, Bengio, "Random search for hyper-parameter optimization", JMLR 13, 2012.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.problem import Problem
from strategies.search.ahead import ahead
from strategies.search.driver import Proposals
from strategies.search.space import Space, layouts


@dataclass(frozen=True, slots=True)
class RandomSearch:
    """Uniform draws from the plans that fit, none twice (Bergstra and Bengio, JMLR 2012)."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit in a random order; it proves nothing."""
        drawn = list(layouts(problem, space))
        Random(self.seed).shuffle(drawn)
        plans = (complete(problem, layout) for layout in drawn)
        yield from ahead(plan for plan in plans if costs.fits(plan))
        return None
