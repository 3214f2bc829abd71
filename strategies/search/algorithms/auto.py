"""The exact searches one after another: the uniform plan first, then the layers of every stage."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.best_first import Run
from meshwise.strategies.search.algorithms.stages import InterStageMILP
from meshwise.strategies.search.driver import Certificate, Considered, OutOfTime, Proof, Proposals, Upcoming
from meshwise.strategies.search.space import Space, neighbours
from meshwise.strategies.search.stage_search import dividable

MOST_MESHES = 8
"""Meshes near the best uniform plan whose stages are divided anew, those of the least bounds."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The best uniform plan by `best_first`, then stages of different layers and recomputation by `inter_stage_milp`.

    What is proven holds for the space, whose plans are uniform: stages differ in their layers only as its ``stages``
    say, and all recompute alike. Stages are divided anew on the mesh of the best one and on those one decision away,
    unless the space limits stages or recomputation.
    """

    name: ClassVar[str] = "auto"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of both searches; return what is proven of uniform ones."""
        run = Run(problem, costs)
        uniform = yield from run.search(space)
        free = space.stages is None and (space.recompute is None or Recompute.NONE in space.recompute)
        if free and run.layout is not None:
            try:
                meshes = nearby_meshes(problem, space, costs, run.layout)
                yield from _unproven(InterStageMILP().refine(problem, space, costs, meshes, run.best))
            except OutOfTime:
                pass
        return uniform


def nearby_meshes(problem: Problem, space: Space, costs: CostModel, layout: Layout) -> list[Layout]:
    """Return the layouts that stand for all divisions of a plan's mesh, and of the most promising of its neighbours."""
    candidates = dict.fromkeys(_without_recompute(layout, *neighbours(problem, space, layout)))
    bounds = {mesh: costs.bound(complete(problem, mesh)) for mesh in candidates}
    return sorted(candidates, key=bounds.__getitem__)[:MOST_MESHES]


def _without_recompute(*layouts: Layout) -> Iterator[Layout]:
    """Yield the layouts whose stages may be divided anew, recomputing nothing."""
    for layout in layouts:
        if dividable(layout):
            yield replace(layout, recompute=Recompute.NONE)


def _unproven(proposals: Proposals) -> Generator[Plan | Certificate | Upcoming | Considered, Evaluation, None]:
    """Yield what an algorithm yields but its proofs."""
    answer = cast(Evaluation, None)  # what a generator is first sent
    while True:
        try:
            proposal = proposals.send(answer)
        except StopIteration:
            return
        answer = cast(Evaluation, None)
        if isinstance(proposal, Plan):
            answer = yield proposal
        elif not isinstance(proposal, Proof):
            yield proposal
