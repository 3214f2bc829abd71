"""Uniform plans, operators and stages in one search: the best of all three."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.operators.bucket_elimination import EntangledGraphError
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint.courses import BestPlans, Course
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.joint.stages import assemble_exactly
from meshwise.strategies.search.proposals import OutOfTime, Proof, Proposals
from meshwise.strategies.search.space import Space

KNOWN_TURN, FIRST_TURN, UNIFORM_TURN, JOINT_TURN = 40, 1000, 40, 2
"""Messages of the search for uniform plans before that for operators of one stage, and after it before meshes; then of
the search for uniform plans and of the one for meshes in turn."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Stages and the shardings of their operators, chosen together, after the uniform plans and those of one stage.

    The bound holds for uniform plans of the space, and for all plans that cut operators apart on a mesh of the search
    with one stage a rank, on the schedules that it tries. Meshes are dropped by the best plan of all three searches.

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
        """Yield some uniform plans, those of one stage, then uniform ones and meshes in turns; return the bound."""
        best = BestPlans()
        joint_search = JointSearch(problem, space, costs, partial(assemble_exactly, spread=self.spread), best)
        uniform_course = Course(Auto().propose(problem, space, costs), best, lambda plan: True)
        operator_course, joint_course = (
            Course(proposals, best, joint_search.keeps_limits)
            for proposals in (Frontier().propose(problem, space, costs), joint_search.run())
        )
        uniform_course.is_done = bool(space.pin)  # pins decide about single operators

        def prove() -> Proof:
            bounds = [joint_search.total_bound] if joint_search.meshes else []
            if not space.pin:
                bounds.append(uniform_course.proof.lower_bound if uniform_course.proof is not None else 0.0)
            num_meshes = len(joint_search.meshes)
            beyond = f"stages with operators cut apart on {num_meshes:,} meshes" if num_meshes else ""
            return Proof(min(bounds, default=joint_search.least_time), beyond=beyond)

        try:
            yield from uniform_course.advance(KNOWN_TURN)
            with suppress(EntangledGraphError):  # seconds on most graphs, and far faster where parameters are most
                yield from operator_course.advance()
            yield from uniform_course.advance(FIRST_TURN)
            while not (uniform_course.is_done and joint_course.is_done):
                yield from joint_course.advance(JOINT_TURN)
                yield from uniform_course.advance(UNIFORM_TURN)
                yield prove()
        except OutOfTime:  # the bounds of what was not looked at stand
            pass
        return prove()
