"""The messages between the driver of searches and an algorithm.

An algorithm is a frozen dataclass with one generator. It writes ``evaluation = yield plan`` to learn about a plan, and
may yield or return a `Proof` about all plans, or yield a `Certificate` of the plans that it yields next. It may yield
`Upcoming` plans, so that an executor evaluates several at once; trials and answers are the same without an executor.
"""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import ClassVar, Protocol

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Certificate:
    """What an algorithm has proven about the sum of costs of the plans that it yields next.

    It holds for one mesh and one size of microbatches, and says nothing about simulated times.

    Parameters
    ----------
    gap
        Fraction by which the sum may be above the least sum within the same bytes: 0 where it is proven to be the
        least, ``None`` where nothing is known.
    memory_price
        Seconds of a step that one more byte on every device saves, over the next bytes; ``None`` where unknown.
    among
        The choices among which the sum is compared, in words; empty for all choices.
    subject
        Which costs are summed, in words.
    """

    gap: float | None
    memory_price: float | None
    among: str = ""
    subject: str = "sum of operators' costs"


NO_CERTIFICATE = Certificate(None, None, subject="")
"""Yielded where an algorithm that had a certificate has none of the plans that follow."""


class OutOfTime(Exception):
    """Raised by the cost model that an algorithm sees when the time of the search is over.

    An algorithm that has evaluated nothing yet may catch it and yield its most promising plan.
    """


@dataclass(frozen=True, slots=True)
class Proof:
    """The claim that no plan of ``space`` that fits takes less than ``lower_bound`` seconds.

    ``space`` is by default the space of the search. An infinite bound is the claim that no plan fits. ``beyond`` are
    plans outside of any space that the claim is about too, in words; empty for none.
    """

    lower_bound: float
    space: Space | None = None
    beyond: str = ""


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Plans that will be proposed in this order, as far as the budget goes; an executor may evaluate them at once."""

    plans: tuple[Plan, ...]

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class ConsideredPlans:
    """The number of plans covered so far, one by one or in groups that a bound drops."""

    plans: int


Proposals = Generator[Plan | Proof | Certificate | Upcoming | ConsideredPlans, Evaluation, Proof | None]
"""The generator of a running algorithm; a generator of plans alone is one too."""


class SearchAlgorithm(Protocol):
    """A search algorithm; its fields are its hyper-parameters."""

    name: ClassVar[str]

    # An algorithm that lists all plans has ``most_plans: ClassVar[int]``; of a larger space it is given the core.

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield plans to evaluate, and proofs; return the last proof, or ``None``."""


MAX_AHEAD = 1024
"""Plans that are announced before they are proposed, at most."""


def propose_ahead(plans: Iterator[Plan]) -> Generator[Plan | Upcoming, Evaluation, float]:
    """Yield every plan, and announce the plans after it; return the least step time, infinite without plans.

    No more plans are announced than were evaluated, so that the first result comes at once and few evaluations are in
    vain where a search ends early.
    """
    best_time, num_evaluated = inf, 0
    queue: deque[Plan] = deque()
    while True:
        new_plans = tuple(islice(plans, max(1, min(num_evaluated, MAX_AHEAD)) - len(queue)))
        if new_plans:
            yield Upcoming(new_plans)
        queue.extend(new_plans)
        if not queue:
            return best_time
        best_time = min(best_time, (yield queue.popleft()).step_time)
        num_evaluated += 1
