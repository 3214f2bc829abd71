"""Uniform plans, operators and stages in one search: the best of all three, each pruned by the best so far."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint_search import BestPlans, JointSearch
from meshwise.strategies.search.proposals import OutOfTime, Proof, Proposals
from meshwise.strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Joint:
    """Stages and the shardings of their operators, chosen together, after the uniform plans and those of one stage.

    The bound holds for uniform plans of the space, and for all plans whose stages run 1F1B on a mesh of the search.

    Parameters
    ----------
    spread
        Part of its share of the work that a stage may have more or less than an even share; a stage of one block may
        have any.
    """

    name: ClassVar[str] = "joint"

    spread: float = 0.6

    def __post_init__(self) -> None:
        if not self.spread > 0:
            raise ValueError(f"joint: spread is more than 0, met {self.spread}")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of the three searches; return the least of their bounds."""
        best, bounds = BestPlans(), [inf]
        joint_search = JointSearch(problem, space, costs, self.spread, best)
        try:
            if not space.pin:  # pins decide about single operators
                proof = yield from best.follow(BestFirst().propose(problem, space, costs))
                bounds.append(proof.lower_bound if proof is not None else 0.0)
            yield from best.follow(Frontier().propose(problem, space, costs))
            yield from best.follow(joint_search.run())
        except OutOfTime:  # the bounds of what was not looked at stand
            pass
        return Proof(min(*bounds, joint_search.total_bound))
