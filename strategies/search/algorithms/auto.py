"""The exact searches one after another: the uniform plan first, then the layers of every stage."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.best_first import BestFirstSearch
from meshwise.strategies.search.algorithms.stages import InterStageMILP
from meshwise.strategies.search.proposals import (
    NO_CERTIFICATE,
    Certificate,
    ConsideredPlans,
    OutOfTime,
    Proof,
    Proposals,
    Upcoming,
)
from meshwise.strategies.search.space import Space, neighbours
from meshwise.strategies.search.stage_search import is_dividable
from meshwise.strategies.search.table_search import has_bags, propose_tables
from meshwise.strategies.tables.placement import MAX_NODES

TABLE_GAP = 1e-3
"""Fraction by which the placement of a recommender's tables may load the slowest device more than the least."""

MOST_MESHES = 8
"""Meshes near the best uniform plan, those with the lowest bounds, whose stages are divided anew."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The best uniform plan by `best_first`, then stages of different layers and recomputation by `inter_stage_milp`.

    The proof holds for the plans of the space, which are uniform: all stages recompute alike, and their layers differ
    only as ``stages`` of the space says. Stages are divided anew on the mesh of the best uniform plan and on meshes
    one decision away, unless the space limits stages or recomputation. Of a recommender the placements of its tables
    come first (`tables`); where one of them fits, nothing is proven of simulated times.
    """

    name: ClassVar[str] = "auto"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of both searches; return the proof about uniform plans."""
        if has_bags(problem):
            has_fit = yield from propose_tables(problem, space, costs, gap=TABLE_GAP, max_nodes=MAX_NODES)
            yield NO_CERTIFICATE
            if has_fit:  # a proof about plans whose tables are not shared says nothing of the best
                yield from _skip_proofs(self._propose_uniform(problem, space, costs))
                return None
        return (yield from self._propose_uniform(problem, space, costs))

    def _propose_uniform(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield uniform plans and divisions of stages; return the proof about uniform plans."""
        uniform_search = BestFirstSearch(problem, costs)
        proof = yield from uniform_search.search(space)
        divides_stages = space.stages is None and (space.recompute is None or Recompute.NONE in space.recompute)
        if divides_stages and uniform_search.incumbent.layout is not None:
            try:
                meshes = list_nearby_meshes(problem, space, costs, uniform_search.incumbent.layout)
                yield from _skip_proofs(
                    InterStageMILP().refine(problem, space, costs, meshes, uniform_search.incumbent.time)
                )
            except OutOfTime:  # the proof of the first search stands
                pass
        return proof


def list_nearby_meshes(problem: Problem, space: Space, costs: CostModel, layout: Layout) -> list[Layout]:
    """Return layouts that stand for all divisions of a plan's mesh and of its neighbours', the most promising ones."""
    layouts = layout, *neighbours(problem, space, layout)
    candidates = dict.fromkeys(replace(mesh, recompute=Recompute.NONE) for mesh in layouts if is_dividable(mesh))
    bounds = {mesh: costs.plan_bound(complete(problem, mesh)) for mesh in candidates}
    return sorted(candidates, key=bounds.__getitem__)[:MOST_MESHES]


def _skip_proofs(proposals: Proposals) -> Generator[Plan | Certificate | Upcoming | ConsideredPlans, Evaluation, None]:
    """Yield what an algorithm yields except its proofs, which are about other plans than those of the space."""
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
