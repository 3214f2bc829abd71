"""Uniform plans, operators and stages in one search: the best of all three, each pruned by the best so far."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint.courses import BestPlans, Course
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.proposals import OutOfTime, Proof, Proposals
from meshwise.strategies.search.space import Space

FIRST_TURN, UNIFORM_TURN, JOINT_TURN = 200, 40, 2
"""Proposals of uniform plans before all others, then of uniform plans and of meshes in turn: each about a second."""


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
        """Yield the plans of the three searches in turns; return the least of their bounds."""
        best = BestPlans()
        joint_search = JointSearch(problem, space, costs, self.spread, best)
        uniform_course, operator_course, joint_course = (
            Course(proposals, best)
            for proposals in (
                BestFirst().propose(problem, space, costs),
                Frontier().propose(problem, space, costs),
                joint_search.run(),
            )
        )
        uniform_course.is_done = bool(space.pin)  # pins decide about single operators
        try:
            yield from uniform_course.advance(FIRST_TURN)
            yield from operator_course.advance()
            while not (uniform_course.is_done and joint_course.is_done):
                yield from joint_course.advance(JOINT_TURN)
                yield from uniform_course.advance(UNIFORM_TURN)
        except OutOfTime:  # the bounds of what was not looked at stand
            pass
        proof = uniform_course.proof
        uniform_bound = inf if space.pin else 0.0 if proof is None else proof.lower_bound
        beyond = f"stages with operators cut apart on {len(joint_search.meshes)} meshes"
        return Proof(min(uniform_bound, joint_search.total_bound), beyond=beyond)
