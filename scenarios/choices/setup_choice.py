"""The best setup with its plan: each is searched for a while, the most promising first, until the best is proven.

The figures of a bill rise with the step time. A lower bound of the step time therefore bounds every figure of a setup,
and the best bill so far says from which step time no plan of another setup can be better: its search is cut off there.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import inf

from meshwise.scenarios.choices.question import LEAST_GOODPUT, Question, Setup
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.driver import FINISHED, Progress, SearchResult
from meshwise.strategies.search.objective import Bill, Machines, Objective, RunTerms

LEAST_SLICE = 1.0
"""Least seconds of the first search of a setup; every further search of it may take twice the seconds of the last."""


class State(StrEnum):
    """What is known of a setup; all but the best and open ones are proven.

    ``searched`` is a setup whose fastest plan is known and is not the best, where failures leave the bound of its bill
    too low to prove that no plan of it is. ``no plan allowed`` is one of which the limits of the space leave no plan.
    """

    BEST = "best"
    WORSE = "worse"
    SEARCHED = "searched"
    MISSES_TERMS = "misses the terms"
    NOTHING_FITS = "nothing fits"
    NO_PLAN = "no plan allowed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class SetupAnswer:
    """What is known of a setup.

    Parameters
    ----------
    bound
        Lower bound of the step time of all its plans, in seconds; infinite where nothing fits.
    best
        The fastest plan that was found; ``None`` where none was.
    bills
        What the run takes with that plan, by the offers of the setup; empty without a plan.
    bill
        The best of them, or where none keeps the terms the one that comes nearest.
    trials
        Evaluated plans that fit of which no other is faster with as little memory, the fastest first. They are some of
        the plans: nothing is proven of them but of the first.
    nearest
        Where nothing fits, the plan that needs the least memory; ``None`` where the space has no plan at all.
    is_settled
        Whether no plan of it can be better than the best of all.
    seconds
        Wall time of its searches.
    """

    setup: Setup
    bound: float
    best: Trial | None = None
    bills: tuple[Bill, ...] = ()
    bill: Bill | None = None
    trials: tuple[Trial, ...] = ()
    nearest: Trial | None = None
    is_settled: bool = False
    seconds: float = 0.0
    state: State = State.OPEN

    __repr__ = brief_repr("setup", "state")

    @property
    def plan(self) -> Plan:
        """The fastest plan that was found."""
        return self._require_best().plan

    @property
    def evaluation(self) -> Evaluation:
        """Step time and memory of that plan."""
        return self._require_best().evaluation

    def _require_best(self) -> Trial:
        if self.best is None:
            raise ValueError(f"no plan was found on {self.setup.nodes} nodes: {self.state}")
        return self.best

    @property
    def is_proven(self) -> bool:
        """Whether no plan of the setup is faster than the one that was found."""
        return self.best is not None and self.best.evaluation.step_time <= self.bound * (1 + _ROUNDING)


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

    __repr__ = brief_repr("question", "best", "gap")

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
        return min(answers, key=lambda answer: _find_excess(self.terms, answer), default=None)

    def list_least_bills(self, answer: SetupAnswer) -> tuple[Bill, ...]:
        """Return what no plan of a setup is below, by the offers of the setup; empty where nothing fits."""
        return _list_least_bills(self.terms, answer)

    def list_possible_bills(self, answer: SetupAnswer) -> tuple[Bill, ...]:
        """Return those of them that a plan may come near to, and keep the terms."""
        return _list_possible_bills(self.terms, self.question.objective, answer)


def _find_excess(terms: RunTerms, answer: SetupAnswer) -> float:
    """Return by which factor the bill of a setup is above its deadline or its budget; infinite without a plan."""
    return inf if answer.bill is None else terms.find_excess(answer.bill)


def _list_least_bills(terms: RunTerms, answer: SetupAnswer) -> tuple[Bill, ...]:
    if answer.bound == inf:
        return ()
    return tuple(terms.write_bill(rates, answer.setup.batch, answer.bound) for rates in answer.setup.offers)


def _list_possible_bills(terms: RunTerms, objective: Objective, answer: SetupAnswer) -> tuple[Bill, ...]:
    # a search that was cut off there proves that no plan is below the cutoff: its bound is the cutoff itself
    bills = zip(answer.setup.offers, _list_least_bills(terms, answer), strict=False)
    batch = answer.setup.batch
    return tuple(bill for rates, bill in bills if answer.bound < terms.find_cutoff(rates, batch, objective, None))


def write_bills(question: Question, terms: RunTerms, setup: Setup, plan: Plan, step_time: float) -> tuple[Bill, ...]:
    """Return what the run takes with a plan, by the offers of a setup.

    Failures and checkpoints count where the scenario has some, and reclaims on spot machines.
    """
    scenario, bills = setup.scenario, []
    devices = plan.placement or range(plan.mesh.num_ranks)
    for rates in setup.offers:
        goodput = 1.0
        if rates.machines is Machines.SPOT:
            assert question.reclaims is not None, "spot machines have a rate of reclaims"
            goodput = question.reclaims.find_goodput(scenario, devices, step_time)
        elif scenario.run is not None:
            goodput = scenario.run.find_goodput(scenario.problem.cluster, devices, step_time).mean
        bills.append(terms.write_bill(rates, setup.batch, step_time, max(goodput, LEAST_GOODPUT)))
    return tuple(bills)


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
    """The state of a choice: what is known of every setup, and which is the best so far, by its index."""

    scenario: Scenario
    question: Question
    seconds: float
    tell: Callable[[Setup, Bill | None, Progress], None]
    keep: Callable[[SetupAnswer], None]
    start: float = field(default_factory=time.monotonic)
    terms: RunTerms = field(init=False)
    answers: list[SetupAnswer] = field(init=False)
    best_index: int | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.terms = self.question.make_terms(self.scenario)
        setups = self.question.list_setups(self.scenario)
        self.answers = [SetupAnswer(setup, least_step_time(setup.scenario.problem)) for setup in setups]

    @property
    def best(self) -> SetupAnswer | None:
        """The best setup so far."""
        return None if self.best_index is None else self.answers[self.best_index]

    @property
    def best_bill(self) -> Bill | None:
        """The bill of the best setup so far."""
        return None if self.best is None else self.best.bill

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
        self.answers = [replace(answer, state=self._find_state(index)) for index, answer in enumerate(self.answers)]
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
            cutoff = self._find_cutoff(index)
            if self.answers[index].bound >= cutoff:
                self.answers[index] = replace(self.answers[index], is_settled=True)
                continue
            self._search(index, cutoff, min(slice_seconds, max(self.seconds_left, LEAST_SLICE)))
            if not self.answers[index].is_settled:
                heappush(queue, (2 * slice_seconds, self._bound_value(self.answers[index]), index))

    def _find_nearest(self) -> None:
        """Search for the plan that comes nearest to terms that nothing keeps; one setup even if the time is over.

        Setups are searched to the end by rising bound, until no other can come nearer.
        """
        candidates = [index for index, answer in enumerate(self.answers) if answer.bound < inf]
        for index in sorted(candidates, key=self._find_least_excess):
            least_excess = min(_find_excess(self.terms, answer) for answer in self.answers)
            is_over = self.seconds_left <= 0 and least_excess < inf
            if self.interrupted or is_over or least_excess <= self._find_least_excess(index):
                return
            self._search(index, inf, min(max(self.seconds_left, LEAST_SLICE), NEAREST_SECONDS))

    def _find_least_excess(self, index: int) -> float:
        """Return by which factor all plans of a setup are above the terms."""
        return self.answers[index].bound / self._find_terms_cutoff(index)

    def _bound_value(self, answer: SetupAnswer) -> float:
        """Return what no plan of a setup can be below, in the figure of the objective."""
        bills = _list_least_bills(self.terms, answer)
        return min((bill.find_value(self.question.objective) for bill in bills), default=inf)

    def _find_cutoff(self, index: int) -> float:
        """Return the step time from which no plan of a setup keeps the terms or is better than the best."""
        is_rival = self.best_index != index and not self.question.compares
        cutoff = self._find_rival_cutoff(index) if is_rival else self._find_terms_cutoff(index)
        best = self.answers[index].best
        return min(cutoff, inf if best is None else best.evaluation.step_time)

    def _find_rival_cutoff(self, index: int) -> float:
        """Return the step time from which no plan of a setup is better than the best of another."""
        return self._find_offers_cutoff(index, self.best_bill)

    def _find_terms_cutoff(self, index: int) -> float:
        """Return the step time from which no plan of a setup keeps the terms."""
        return self._find_offers_cutoff(index, None)

    def _find_offers_cutoff(self, index: int, best: Bill | None) -> float:
        setup = self.answers[index].setup
        return max(self.terms.find_cutoff(rates, setup.batch, self.question.objective, best) for rates in setup.offers)

    def _search(self, index: int, cutoff: float, seconds: float) -> None:
        """Search one setup for plans faster than ``cutoff``."""
        start, setup, best_bill = time.monotonic(), self.answers[index].setup, self.best_bill
        settings = replace(
            setup.scenario.search_settings,
            algorithm="best_first",
            options=(("cutoff", cutoff),) if cutoff < inf else (),
            budget=None,
            seconds=None,
        )
        result = replace(setup.scenario, search_settings=settings).search_plan(
            seconds=seconds if seconds < inf else NO_LIMIT,
            progress=lambda progress: self.tell(setup, best_bill, progress),
        )
        answer = self._learn(self.answers[index], result)
        self.answers[index] = replace(answer, seconds=answer.seconds + time.monotonic() - start)
        self.interrupted = result.interrupted
        self._compare_best(index)

    def _learn(self, answer: SetupAnswer, result: SearchResult) -> SetupAnswer:
        """Return an answer with what a search found and proved."""
        best = result.best
        if best is not None and (answer.best is None or best.evaluation.step_time < answer.best.evaluation.step_time):
            bills = write_bills(self.question, self.terms, answer.setup, best.plan, best.evaluation.step_time)
            bill = self.terms.choose_bill(bills, self.question.objective)
            answer = replace(answer, best=best, bills=bills, bill=bill)
        bound = answer.bound if result.lower_bound is None else max(answer.bound, result.lower_bound)
        return replace(
            answer,
            bound=inf if result.nothing_fits else bound,
            trials=tuple(list_front_trials((*answer.trials, *result.trials))),
            nearest=result.nearest if answer.best is None else None,
            is_settled=result.end == FINISHED and result.lower_bound is not None,
        )

    def _compare_best(self, index: int) -> None:
        """Take a setup for the best where its bill keeps the terms and is better than that of the best so far."""
        bill, best_bill, objective = self.answers[index].bill, self.best_bill, self.question.objective
        if bill is None or not self.terms.is_met(bill):
            return
        if best_bill is None or index == self.best_index or bill.rank(objective) < best_bill.rank(objective):
            self.best_index = index
            self.keep(self.answers[index])

    def _find_lower_bound(self) -> float:
        """Return what no plan of any setup that keeps the terms can be below."""
        values, objective = [], self.question.objective
        for answer in self.answers:
            values += [bill.find_value(objective) for bill in _list_possible_bills(self.terms, objective, answer)]
        return min(values, default=inf)

    def _find_state(self, index: int) -> State:
        """Return what is known of a setup."""
        answer = self.answers[index]
        if index == self.best_index:
            return State.BEST
        if answer.bound == inf:
            return State.NO_PLAN if answer.nearest is None else State.NOTHING_FITS
        if answer.bound >= self._find_terms_cutoff(index):
            return State.MISSES_TERMS
        if answer.bound >= self._find_rival_cutoff(index):
            return State.WORSE
        # a search to its end leaves a bound below its best plan where a faster one was judged to lack memory
        return State.SEARCHED if answer.is_settled and (answer.best is None or answer.is_proven) else State.OPEN


def list_front_trials(trials: Iterable[Trial]) -> Iterator[Trial]:
    """Yield the trials that fit of which no other is as fast and needs as little memory, the fastest first."""
    least_memory = inf
    fitting = [trial for trial in trials if trial.evaluation.fits]
    for trial in sorted(fitting, key=lambda trial: (trial.evaluation.step_time, trial.evaluation.peak_memory)):
        if trial.evaluation.peak_memory < least_memory:
            least_memory = trial.evaluation.peak_memory
            yield trial


NO_LIMIT = 1e9
"""Seconds of a search without a limit: 30 years."""

NEAREST_SECONDS = 10.0
"""Seconds of the search for the plan that comes nearest to terms that nothing keeps."""

_ROUNDING = 1e-9
"""Bounds and step times of the same plan are sums in different orders."""
