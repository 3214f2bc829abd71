"""Algorithms that run in turns on one problem, and the best plans that they have found."""

from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf

from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.proposals import Certificate, ConsideredPlans, Proof, Proposals, Upcoming


@dataclass(slots=True)
class BestPlans:
    """The plans that fit of those that a search has evaluated so far, and the best of them with its time in seconds."""

    time: float = inf
    plan: Plan | None = None
    evaluated: list[tuple[float, Plan]] = field(default_factory=list)

    def note(self, plan: Plan, evaluation: Evaluation) -> None:
        """Remember a plan that fits."""
        if evaluation.fits:
            self.evaluated.append((evaluation.step_time, plan))
            if evaluation.step_time < self.time:
                self.time, self.plan = evaluation.step_time, plan


@dataclass(slots=True)
class Course:
    """An algorithm that runs some proposals at a time, beside others, and the last proof that it made.

    Its proofs and certificates are about a part of what all of them look at, and go no further.
    """

    proposals: Proposals
    best: BestPlans
    answer: Evaluation | None = None
    proof: Proof | None = None
    is_done: bool = False

    def advance(self, count: float = inf) -> Generator[Plan | Upcoming | ConsideredPlans, Evaluation, None]:
        """Yield what the algorithm yields, ``count`` proposals at most, and note every plan."""
        while count > 0 and not self.is_done:
            count -= 1
            try:
                proposal = next(self.proposals) if self.answer is None else self.proposals.send(self.answer)
            except StopIteration as end:
                self.proof, self.is_done = end.value or self.proof, True
                return
            self.answer = None
            if isinstance(proposal, Plan):
                self.answer = yield proposal
                self.best.note(proposal, self.answer)
            elif isinstance(proposal, Proof):
                self.proof = proposal
            elif not isinstance(proposal, Certificate):
                yield proposal
