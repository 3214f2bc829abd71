"""Algorithms that run in turns on one problem, and the best plans that they have found."""

from collections.abc import Callable, Generator
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
    step_times: dict[Plan, float] = field(default_factory=dict)

    def note(self, plan: Plan, evaluation: Evaluation) -> None:
        """Remember a plan that fits."""
        if evaluation.fits:
            self.step_times[plan] = evaluation.step_time
            if evaluation.step_time < self.time:
                self.time, self.plan = evaluation.step_time, plan


@dataclass(slots=True)
class Course:
    """An algorithm that runs some proposals at a time, beside others, and the last proof that it made.

    Its proofs and certificates are about a part of what all of them look at, and go no further. Plans that
    ``keeps_limits`` refuses are not evaluated.
    """

    proposals: Proposals
    best: BestPlans
    keeps_limits: Callable[[Plan], bool]
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
            if isinstance(proposal, Plan) and not self.keeps_limits(proposal):
                self.answer = Evaluation(inf, inf, fits=False)  # as if it did not fit
            elif isinstance(proposal, Plan):
                self.answer = yield proposal
                self.best.note(proposal, self.answer)
            elif isinstance(proposal, Proof):
                self.proof = proposal
            elif not isinstance(proposal, Certificate):
                yield proposal
