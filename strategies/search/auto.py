"""The exact searches one after another: the uniform plan first, then the layers of every stage."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from strategies.cost_model import CostModel
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.best_first import BestFirst
from strategies.search.driver import Proof, Proposals
from strategies.search.inter_stage_milp import InterStageMILP
from strategies.search.per_stage import meshes
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Auto:
    """The best uniform plan by `best_first`, then stages of different layers and recomputation by `inter_stage_milp`.

    What is proven holds for the space of the second, of which the first one's is a part.
    """

    name: ClassVar[str] = "auto"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of both searches, and what is proven of all divisions."""
        best = inf
        uniform = BestFirst().propose(problem, space, costs)
        proposal = next(uniform, None)
        while proposal is not None:
            if not isinstance(proposal, Plan):
                if not isinstance(proposal, Proof):  # which holds for uniform plans alone
                    yield proposal
                proposal = next(uniform, None)
                continue
            evaluation = yield proposal
            best = min(best, evaluation.step_time)
            try:
                proposal = uniform.send(evaluation)
            except StopIteration:
                break
        return (yield from InterStageMILP().refine(problem, space, costs, meshes(problem, space), best))
