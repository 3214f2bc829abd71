"""The exact searches one after another: the uniform plan first, then the layers of every stage."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, cast

from strategies.cost_model import CostModel
from strategies.evaluation import Evaluation
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.best_first import BestFirst
from strategies.search.certificate import Certificate
from strategies.search.driver import Considered, Proof, Proposals, Upcoming
from strategies.search.inter_stage_milp import InterStageMILP
from strategies.search.per_stage import dividable, meshes
from strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Auto:
    """The best uniform plan by `best_first`, then stages of different layers and recomputation by `inter_stage_milp`.

    What is proven holds for uniform plans, and for all divisions of the layers of usual ones whose passes are not
    written out or split.
    """

    name: ClassVar[str] = "auto"

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans of both searches, and what is proven of all of them."""
        best, uniform = yield from _passed_on(BestFirst().propose(problem, space, costs), lambda _: None)
        among = list(filter(dividable, meshes(problem, space)))
        if not among:
            return uniform
        floor = uniform.lower_bound if uniform is not None else inf

        def of_both(proof: Proof) -> Proof | None:
            return Proof(min(proof.lower_bound, floor)) if uniform is not None or best == inf else None

        _, divided = yield from _passed_on(InterStageMILP().refine(problem, space, costs, among, best), of_both)
        return of_both(divided) if divided is not None else None


def _passed_on(
    proposals: Proposals, shown: Callable[[Proof], Proof | None]
) -> Generator[Plan | Proof | Certificate | Upcoming | Considered, Evaluation, tuple[float, Proof | None]]:
    """Yield what an algorithm yields, its proofs as ``shown``; return the least step time and the last proof."""
    best, answer = inf, cast(Evaluation, None)  # what a generator is first sent
    while True:
        try:
            proposal = proposals.send(answer)
        except StopIteration as end:
            return best, cast("Proof | None", end.value)
        answer = cast(Evaluation, None)
        if isinstance(proposal, Plan):
            answer = yield proposal
            best = min(best, answer.step_time)
        elif not isinstance(proposal, Proof):
            yield proposal
        elif (proof := shown(proposal)) is not None:
            yield proof
