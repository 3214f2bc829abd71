"""Stages and a strategy for every layer by one integer program on every mesh (UniAP, CVPR 2025)."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.joint.courses import BestPlans, Course
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.joint.layer_strategies import assemble_jointly
from meshwise.strategies.search.proposals import Proof, Proposals
from meshwise.strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class UniAP:
    """Stages of layers that are each data, fully sharded or tensor parallel, by one program a mesh (UniAP, CVPR 2025).

    Numbers of stages, degrees of axes and microbatches are tried one after another, as published; a mesh whose bound is
    not below the best plan is left out. What the program chooses is simulated. The only proof about step times is the
    bound of all plans: no device computes faster than its peak.

    Parameters
    ----------
    seconds
        Time of one program, after which its best choice so far is taken.
    gap
        Fraction by which the time of a program may be above the least.
    """

    name: ClassVar[str] = "uniap"

    seconds: float = 10.0
    gap: float = 0.01

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and 0 <= self.gap < 1):
            raise ValueError(
                f"uniap: seconds is more than 0, and gap at least 0 and less than 1, met {self.seconds} and {self.gap}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plan that the program chooses on every mesh, the most promising mesh first."""
        assemble, best = partial(assemble_jointly, seconds=self.seconds, gap=self.gap), BestPlans()
        search = JointSearch(problem, space, costs, assemble, best)
        yield Proof(search.least_time)
        yield from Course(search.run_meshes(), best, search.keeps_limits).advance()
        return None
