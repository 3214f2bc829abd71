"""The best setup with its plan: each is searched for a while, the most promising first, until the best is proven.

The figures of a bill rise with the step time. A lower bound of the step time therefore bounds every figure of a setup,
and the best bill so far says from which step time no plan of another setup can be better: its search is cut off there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import inf

from meshwise.scenarios.choices.question import Question, Setup
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.search.driver import FINISHED, Progress, SearchResult
from meshwise.strategies.search.objective import Bill, RunTerms

LEAST_SLICE = 1.0
"""Least seconds of the first search of a setup; every further search of it may take twice the seconds of the last."""


class State(StrEnum):
    """What is known of a setup; all but the best and open ones are proven.

    ``searched`` is a setup whose fastest plan is known and is not the best, where failures leave the bound of its bill
    too low to prove that no plan of it is.
    """

    BEST = "best"
    WORSE = "worse"
    SEARCHED = "searched"
    MISSES_TERMS = "misses the terms"
    NOTHING_FITS = "nothing fits"
    OPEN = "open"


@dataclass(slots=True)
class SetupAnswer:
    """What is known of a setup.

    Parameters
    ----------
    best
        The fastest plan that was found; ``None`` where none was.
    bill
        What the run takes with that plan.
    bound
        Lower bound of the step time of all its plans, in seconds; infinite where nothing fits.
    is_settled
        Whether no plan of it can be better than the best of all.
    """

    setup: Setup
    bound: float
    best: Trial | None = None
    bill: Bill | None = None
    is_settled: bool = False
    seconds: float = 0.0
    state: State = State.OPEN


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer to a question.

    Parameters
    ----------
    best
        The best setup that keeps the terms; ``None`` where none was found.
    answers
        All setups, in the order of nodes and batches.
    lower_bound
        What no plan of any setup that keeps the terms can be below, in the figure of the objective; infinite where
        none can keep them.
    """

    question: Question
    terms: RunTerms
    best: SetupAnswer | None
    answers: tuple[SetupAnswer, ...]
    lower_bound: float
    wall_time: float
    interrupted: bool = False

    @property
    def gap(self) -> float | None:
        """The best figure over its lower bound, minus 1: 0 where it is proven; ``None`` without a best."""
        if self.best is None or self.best.bill is None:
            return None
        value = self.best.bill.find_value(self.question.objective)
        return max(value / self.lower_bound - 1.0, 0.0) if self.lower_bound > 0 else None

    @property
    def nearest(self) -> SetupAnswer | None:
        """The setup whose plan comes nearest to the terms, where none keeps them."""
        answers = [answer for answer in self.answers if answer.bill is not None]
        return min(answers, key=lambda answer: _find_excess(self.terms, answer.bill), default=None)


def _find_excess(terms: RunTerms, bill: Bill | None) -> float:
    """Return by which factor a bill is above its deadline or its budget."""
    assert bill is not None
    return max(bill.seconds / terms.deadline, (bill.cost or 0.0) / terms.budget)


def choose_setup(
    scenario: Scenario,
    question: Question,
    seconds: float | None = 60.0,
    tell: Callable[[Setup, "Bill | None", Progress], None] = lambda setup, bill, progress: None,
    keep: Callable[[SetupAnswer], None] = lambda answer: None,
) -> Choice:
    """Return the best setup of a scenario with its plan.

    Parameters
    ----------
    seconds
        Wall time at most; ``None`` for as long as the proof takes.
    tell
        Called with the setup that is searched, the best bill so far, and the progress of its search.
    keep
        Called with every new best setup.

    Raises
    ------
    ValueError
        Where ``seconds`` is not positive, the scenario pins operators, or the question cannot be asked of it.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds are more than 0, met {seconds}")
    if scenario.search_settings.pin:
        raise ValueError("search.pin: setups are searched without pinned operators, met some; leave search.pin out")
    return _SetupSearch(scenario, question, inf if seconds is None else seconds, tell, keep).run()


@dataclass(slots=True)
class _SetupSearch:
    """The state of a choice."""

    scenario: Scenario
    question: Question
    seconds: float
    tell: Callable[[Setup, Bill | None, Progress], None]
    keep: Callable[[SetupAnswer], None]
    start: float = field(default_factory=time.monotonic)
    terms: RunTerms = field(init=False)
    answers: list[SetupAnswer] = field(init=False)
    best: SetupAnswer | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.terms = self.question.make_terms(self.scenario)
        setups = self.question.list_setups(self.scenario)
        self.answers = [SetupAnswer(setup, least_step_time(setup.scenario.problem)) for setup in setups]

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        return self.seconds - (time.monotonic() - self.start)

    def run(self) -> Choice:
        """Search the setups until all are settled or the time is over."""
        slice_seconds = max(LEAST_SLICE, self.seconds / (4 * len(self.answers))) if self.seconds < inf else inf
        try:
            self._search_all(slice_seconds)
            if self.best is None and not self.interrupted:
                self._find_nearest()
        except KeyboardInterrupt:
            self.interrupted = True
        self._name_states()
        return Choice(
            question=self.question,
            terms=self.terms,
            best=self.best,
            answers=tuple(self.answers),
            lower_bound=self._find_lower_bound(),
            wall_time=time.monotonic() - self.start,
            interrupted=self.interrupted,
        )

    def _search_all(self, slice_seconds: float) -> None:
        """Search setups, each for ``slice_seconds`` at first, until all are settled or the time is over."""
        # of setups with equal slices the one with the least bound is first
        queue = [(slice_seconds, self._bound_value(answer), index) for index, answer in enumerate(self.answers)]
        heapify(queue)
        while queue and not self.interrupted and self.seconds_left > 0:
            slice_seconds, _, index = heappop(queue)
            answer = self.answers[index]
            cutoff = self._find_cutoff(answer)
            if answer.bound >= cutoff:
                answer.is_settled = True
                continue
            self._search(answer, cutoff, min(slice_seconds, max(self.seconds_left, LEAST_SLICE)))
            if not answer.is_settled:
                heappush(queue, (2 * slice_seconds, self._bound_value(answer), index))

    def _find_nearest(self) -> None:
        """Search for the plan that comes nearest to terms that nothing keeps; one setup even if the time is over.

        Setups are searched to the end by rising bound, until no other can come nearer.
        """
        candidates = [answer for answer in self.answers if answer.bound < inf]
        for answer in sorted(candidates, key=self._find_least_excess):
            excesses = [_find_excess(self.terms, other.bill) for other in self.answers if other.bill is not None]
            is_over = self.seconds_left <= 0 and bool(excesses)
            if self.interrupted or is_over or min(excesses, default=inf) <= self._find_least_excess(answer):
                return
            self._search(answer, inf, min(max(self.seconds_left, LEAST_SLICE), NEAREST_SECONDS))

    def _find_least_excess(self, answer: SetupAnswer) -> float:
        """Return by which factor all plans of a setup are above the terms."""
        return answer.bound / self._find_terms_cutoff(answer)

    def _bound_value(self, answer: SetupAnswer) -> float:
        """Return what no plan of a setup can be below, in the figure of the objective."""
        setup = answer.setup
        return self.terms.write_bill(setup.rates, setup.batch, answer.bound).find_value(self.question.objective)

    def _find_cutoff(self, answer: SetupAnswer) -> float:
        """Return the step time from which no plan of a setup keeps the terms or is better than the best."""
        is_rival = self.best is not answer and not self.question.compares
        cutoff = self._find_rival_cutoff(answer) if is_rival else self._find_terms_cutoff(answer)
        return min(cutoff, inf if answer.best is None else answer.best.evaluation.step_time)

    def _find_rival_cutoff(self, answer: SetupAnswer) -> float:
        """Return the step time from which no plan of a setup is better than the best of another."""
        best = None if self.best is None else self.best.bill
        return self.terms.find_cutoff(answer.setup.rates, answer.setup.batch, self.question.objective, best)

    def _find_terms_cutoff(self, answer: SetupAnswer) -> float:
        """Return the step time from which no plan of a setup keeps the terms."""
        return self.terms.find_cutoff(answer.setup.rates, answer.setup.batch, self.question.objective, None)

    def _search(self, answer: SetupAnswer, cutoff: float, seconds: float) -> None:
        """Search one setup for plans faster than ``cutoff``."""
        start, best_bill = time.monotonic(), None if self.best is None else self.best.bill
        settings = replace(
            answer.setup.scenario.search_settings,
            algorithm="best_first",
            options=(("cutoff", cutoff),) if cutoff < inf else (),
            budget=None,
            seconds=None,
        )
        scenario = replace(answer.setup.scenario, search_settings=settings)
        result = scenario.search(
            seconds=seconds if seconds < inf else NO_LIMIT,
            progress=lambda progress: self.tell(answer.setup, best_bill, progress),
        )
        answer.seconds += time.monotonic() - start
        self._learn(answer, result, cutoff)

    def _learn(self, answer: SetupAnswer, result: SearchResult, cutoff: float) -> None:
        """Take over what a search found and proved."""
        self.interrupted = result.interrupted
        best = result.best
        if best is not None and (answer.best is None or best.evaluation.step_time < answer.best.evaluation.step_time):
            answer.best, answer.bill = best, self._write_bill(answer.setup, best)
        if result.nothing_fits:
            answer.bound = inf
        elif result.lower_bound is not None:
            answer.bound = max(answer.bound, result.lower_bound)
        answer.is_settled = result.end == FINISHED and result.lower_bound is not None
        bill = answer.bill
        if bill is None or not self.terms.is_met(bill):
            return
        objective = self.question.objective
        if self.best is None or self.best.bill is None or bill.rank(objective) < self.best.bill.rank(objective):
            self.best = answer
            self.keep(answer)

    def _write_bill(self, setup: Setup, best: Trial) -> Bill:
        """Return what the run takes with a plan, with its failures and checkpoints where the scenario has some."""
        goodput, run, cluster = 1.0, setup.scenario.run, setup.scenario.problem.cluster
        step_time = best.evaluation.step_time
        if run is not None:
            devices = best.plan.placement or range(best.plan.mesh.num_ranks)
            goodput = run.find_goodput(cluster, devices, step_time).mean
        return self.terms.write_bill(setup.rates, setup.batch, step_time, max(goodput, LEAST_GOODPUT))

    def _find_lower_bound(self) -> float:
        """Return what no plan of any setup that keeps the terms can be below."""
        values = []
        for answer in self.answers:
            if answer.bound < self._find_terms_cutoff(answer):
                values.append(self._bound_value(answer))
        return min(values, default=inf)

    def _name_states(self) -> None:
        """Say of every setup what is known of it."""
        for answer in self.answers:
            if answer is self.best:
                answer.state = State.BEST
            elif answer.bound == inf:
                answer.state = State.NOTHING_FITS
            elif answer.bound >= self._find_terms_cutoff(answer):
                answer.state = State.MISSES_TERMS
            elif answer.bound >= self._find_rival_cutoff(answer):
                answer.state = State.WORSE
            else:
                answer.state = State.SEARCHED if answer.is_settled else State.OPEN


NO_LIMIT = 1e9
"""Seconds of a search without a limit: 30 years."""

NEAREST_SECONDS = 10.0
"""Seconds of the search for the plan that comes nearest to terms that nothing keeps."""

LEAST_GOODPUT = 1e-6
"""A run that fails before every checkpoint never ends; so that its bill has numbers, it ends after a million times."""
