"""The driver of searches: one loop has the budget, the clock, the memo, the progress and the best plan so far.

It answers the messages of an algorithm (`meshwise.strategies.search.proposals`) by a cost model that it is given.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.deadline import set_check
from meshwise.simulator.notebook import to_html
from meshwise.simulator.program import collect_rarely
from meshwise.strategies.evaluation import CostModel, Evaluation, FloatArray, Resource, Trial
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.fan_out import Evaluator
from meshwise.strategies.search.proposals import (
    NO_CERTIFICATE,
    Certificate,
    ConsideredPlans,
    OutOfTime,
    Proof,
    Proposals,
    SearchAlgorithm,
    Upcoming,
)
from meshwise.strategies.search.space import (
    EVERYTHING,
    Scope,
    Space,
    count_layouts,
    groups,
    keeps_limits,
    layouts,
    limit_space,
    scope_of,
)
from meshwise.strategies.search.starts import known_layouts, sort_known_plans

if TYPE_CHECKING:
    import pandas as pd


TELL_SECONDS = 0.5
"""Seconds between reports of progress while a search evaluates nothing."""
MAX_REPEATS = 1000
"""Proposals in a row that repeat evaluated plans, after which a search ends."""

MAX_NEAREST = 20_000
"""Plans whose memory is computed at most where none fits."""

NEAREST_SECONDS = 1.0
"""Seconds after the end of the time that looking at memory, or a simulation under way, may still take."""

FINISHED, OUT_OF_TIME, BUDGET, INTERRUPTED = "finished", "out of time", "budget", "interrupted"
"""How a search ended: its algorithm had nothing left to propose, or a limit or the user ended it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a search, which callbacks receive after every evaluation.

    ``seconds_left`` is the number of seconds until the time is over or, at the speed so far, the budget is used;
    ``None`` where there is no limit.
    """

    evaluations: int
    considered: int
    elapsed: float
    best: Trial | None
    lower_bound: float | None
    seconds_left: float | None

    @property
    def gap(self) -> float | None:
        """The best step time over the lower bound, minus 1; ``None`` where either is unknown."""
        return _find_gap(self.best, self.lower_bound)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Parameters
    ----------
    best
        The fastest plan that fits; ``None`` where none was found.
    nearest
        Where no plan was found to fit: the plan with the least peak memory of those that there was time to look at.
    trials
        Every evaluated plan once, in order.
    considered
        The number of different plans that were looked at, including those dropped without an evaluation.
    lower_bound
        A lower bound in seconds of the step time of all plans of the space that fit; ``None`` where unknown.
    gap
        ``(best - lower_bound) / lower_bound``, at least 0; at 0 no plan of ``scope`` is faster. ``None`` where no
        bound is known.
    wall_time
        Seconds.
    history
        ``(evaluations, elapsed, step_time)`` of every new best plan.
    end
        `FINISHED`, `OUT_OF_TIME`, `BUDGET` or `INTERRUPTED`.
    nothing_fits
        Whether the algorithm has proven that no plan of the space fits.
    certificate
        The algorithm's certificate of the best plan, if any.
    scope
        The plans that ``lower_bound`` and ``gap`` cover; the best plan may be outside. ``None`` where the algorithm
        chose a sharding for every operator, which the certificate covers, or was interrupted.
    """

    algorithm: str
    best: Trial | None
    nearest: Trial | None
    trials: tuple[Trial, ...]
    evaluations: int
    considered: int
    lower_bound: float | None
    gap: float | None
    wall_time: float
    history: tuple[tuple[int, float, float], ...]
    end: str
    certificate: Certificate | None = None
    scope: Scope | None = None
    nothing_fits: bool = False

    __repr__ = brief_repr("algorithm", "best", "evaluations", "lower_bound", "gap", "wall_time")

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the search."""
        return self.end == INTERRUPTED

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row per trial: the plan in words, step time (s), peak memory (bytes), whether it fits, seconds."""
        import pandas as pd

        rows = [
            {"plan": trial.plan.describe(), **asdict(trial.evaluation), "elapsed": trial.elapsed}
            for trial in self.trials
        ]
        return pd.DataFrame(rows, columns=["plan", "step_time", "peak_memory", "fits", "elapsed"])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the best plan, what is proven of it, and the fastest plans beside it."""
        fastest = sorted((trial for trial in self.trials if trial.evaluation.fits), key=_step_time)[:_SHOWN]
        headline = "none fits" if self.best is None else self.best.plan.describe()
        proven = "no bound" if self.gap is None else f"no plan of the space is more than {self.gap:.1%} faster"
        rows = [("evaluations", f"{self.evaluations:,}"), ("ended", self.end), ("proven", proven)]
        rows += [(trial.plan.describe(), f"{_step_time(trial):.6g} s") for trial in fastest]
        return to_html(f"{self.algorithm}: {headline}", rows)


_SHOWN = 10
"""Plans that a notebook shows of a search."""


def _step_time(trial: Trial) -> float:
    return trial.evaluation.step_time


class SearchResults(tuple[SearchResult, ...]):
    """The results of several searches, in their order; at a prompt one line each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(_format_result, self)) or "no search"


def _format_result(result: SearchResult) -> str:
    step = "nothing found" if result.best is None else f"{result.best.evaluation.step_time:.6g} s"
    gap = "no bound" if result.gap is None else f"gap {result.gap:.1%}"
    return f"{result.algorithm:<22}  {step}, {gap}, {result.evaluations:,} evaluations, {result.end}"


@collect_rarely()
def run_search(
    algorithm: SearchAlgorithm,
    problem: Problem,
    space: Space = EVERYTHING,
    *,
    costs: CostModel | Evaluator,
    budget: int | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> SearchResult:
    """Return the result of ``algorithm`` for ``problem`` in ``space``, by the cost model ``costs``.

    The other parameters are those of `meshwise.strategies.search.simulated_search.search`.
    """
    if budget is not None and budget < 1:
        raise ValueError(f"budget is at least 1 evaluation, met {budget}; nearest: 1")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds are more than 0, met {seconds}")
    evaluator = costs if isinstance(costs, Evaluator) else Evaluator(costs)
    max_plans = getattr(algorithm, "most_plans", None)
    full_space, space = space, space if max_plans is None else limit_space(problem, space, max_plans)
    # only these limits can be broken, by algorithms that choose stages and recomputation by themselves
    is_limited = (space.accepts, space.recompute, space.stages) != (None, None, None)
    is_accepted = partial(_is_accepted, problem, space) if is_limited else None
    state = _SearchState(evaluator, budget, seconds, progress, clock, is_accepted)
    nearest_trial = scope = None
    try:
        state.drive(algorithm.propose(problem, space, state))
        if state.best is None and state.end == OUT_OF_TIME:
            state.fall_back(problem, space)
        # below a cutoff there may be no plan though some fit: then nothing is near to fitting
        if state.best is None and not (getattr(algorithm, "cutoff", None) and state.has_proof):
            nearest_trial = state.find_nearest(problem, space)
            if nearest_trial is not None and state.end == OUT_OF_TIME and state.is_answer(nearest_trial):
                state.record_trial(nearest_trial)
                nearest_trial = None
        if state.best is not None:
            evaluator.confirm_trial(state.best)
        if state.latest_certificate is None:
            scope = scope_of(problem, state.space or space).extend(state.beyond)
    except KeyboardInterrupt:
        state.end = INTERRUPTED
    finally:
        evaluator.cancel()
    return SearchResult(
        algorithm=algorithm.name,
        best=state.best,
        nearest=nearest_trial,
        trials=tuple(state.trials),
        evaluations=len(state.trials),
        considered=state.considered,
        lower_bound=state.lower_bound if state.lower_bound != inf else None,
        gap=_find_gap(state.best, state.lower_bound),
        wall_time=state.elapsed,
        history=tuple(state.history),
        end=state.end,
        certificate=state.certificate,
        scope=scope,
        nothing_fits=state.best is None
        and state.lower_bound == inf
        and space is full_space,  # a proof about the core says nothing of the rest
    )


def _find_gap(best: Trial | None, lower_bound: float | None) -> float | None:
    if best is None or lower_bound is None or not 0 < lower_bound < inf:
        return None
    return max(best.evaluation.step_time - lower_bound, 0.0) / lower_bound


def _list_frugal_layouts(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield the layouts of a space that need little memory.

    Microbatches are of 1 sequence unless the space limits them, and of groups that offer full recompute only those rows
    count. Where the space has no such layouts, all of it.
    """
    frugal_space = space if space.microbatch else space.with_limits(microbatch=(1,))
    for group in groups(problem, frugal_space):
        recomputes_all = np.array([choice.recompute is Recompute.FULL for choice in group.passes])
        mask = group.member_mask & recomputes_all[:, None]
        yield from replace(group, member_mask=mask) if mask.any() else group
    yield from layouts(problem, space) if not count_layouts(problem, frugal_space) else ()


def _is_accepted(problem: Problem, space: Space, plan: Plan) -> bool:
    """Return whether a plan keeps the limits that an algorithm that divides stages by itself may break."""
    return keeps_limits(problem, space, plan) and (
        space.accepts is None or not space.accepts.list_refusals(problem, plan)
    )


class _SearchState:
    """The state of one search, and the cost model that its algorithm sees, which counts plans and watches the time."""

    def __init__(
        self,
        evaluator: Evaluator,
        budget: int | None,
        seconds: float | None,
        progress: Callable[[Progress], None] | None,
        clock: Callable[[], float],
        is_accepted: Callable[[Plan], bool] | None,
    ) -> None:
        self.is_accepted = is_accepted
        self.evaluator, self.costs = evaluator, evaluator.costs
        self.budget, self.seconds = budget, seconds
        self.progress, self.clock, self.start_time = progress, clock, clock()
        self.trials: list[Trial] = []
        self.memo: dict[Plan, Evaluation] = {}
        self.plan_hashes: set[int] = set()  # hashes: thousands of plans need not stay alive to be counted
        self.num_in_groups = 0
        self.history: list[tuple[int, float, float]] = []
        self.best: Trial | None = None
        self.lower_bound: float | None = None
        self.space: Space | None = None
        self.beyond = ""
        self.latest_certificate: Certificate | None = None
        self.certificate: Certificate | None = None
        self.num_repeats = 0
        self.last_told = 0.0
        self.end = FINISHED

    @property
    def considered(self) -> int:
        """The number of different plans that were looked at, one by one or in groups."""
        return max(len(self.plan_hashes), self.num_in_groups)

    @property
    def has_proof(self) -> bool:
        """Whether a finished search has proven a finite bound."""
        return self.end == FINISHED and self.lower_bound is not None and self.lower_bound < inf

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.start_time

    def drive(self, proposals: Proposals) -> None:
        """Answer every proposal until the algorithm, the budget or the time ends."""
        answer: Evaluation | None = None
        # long computations of an algorithm look at the time too, and its generator is closed however the loop ends
        with set_check(self.check_time), closing(proposals):
            while True:
                try:
                    proposal = next(proposals) if answer is None else proposals.send(answer)
                except StopIteration as end:
                    return self._learn_proof(end.value)
                except OutOfTime:
                    return
                answer = None
                if isinstance(proposal, Proof):
                    self._learn_proof(proposal)
                elif isinstance(proposal, Certificate):
                    self.latest_certificate = None if proposal == NO_CERTIFICATE else proposal
                elif isinstance(proposal, Upcoming):
                    self._begin_evaluations(proposal.plans)
                elif isinstance(proposal, ConsideredPlans):
                    self.num_in_groups = proposal.plans
                elif self._is_spent(proposal):
                    return
                else:
                    try:
                        answer = self.evaluate(proposal)
                    except OutOfTime:
                        return

    def _learn_proof(self, proof: Proof | None) -> None:
        if proof is not None:
            if proof.space != self.space:  # the search moved to another space, as nothing fitted in the one before
                self.space, self.lower_bound = proof.space, None
            self.lower_bound, self.beyond = max(proof.lower_bound, self.lower_bound or 0.0), proof.beyond

    @property
    def _is_late(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds

    def _begin_evaluations(self, plans: Sequence[Plan]) -> None:
        """Let an executor evaluate plans that are not known, as many as the budget allows."""
        new_plans = [plan for plan in plans if plan not in self.memo and self.evaluator.find_trial(plan) is None]
        num_free = None if self.budget is None else max(0, self.budget - len(self.trials) - self.evaluator.pending)
        self.evaluator.begin(new_plans[:num_free])

    def _is_spent(self, plan: Plan) -> bool:
        """Return whether the search ends before ``plan``: its time or budget is used, or plans only repeat."""
        # plans of an earlier run are answered even when time is up, so that a resumed search takes the same course
        if self.trials and self._is_late and self.evaluator.find_trial(plan) is None:
            self.end = OUT_OF_TIME
            return True
        if plan in self.memo:
            self.num_repeats += 1
            return self.num_repeats >= MAX_REPEATS
        self.num_repeats = 0
        if self.budget is None or len(self.trials) < self.budget:
            return False
        self.end = BUDGET
        return True

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return the evaluation of ``plan``, from the memo where it is known."""
        if plan not in self.memo:
            self.plan_hashes.add(hash(plan))
            known_trial = self.evaluator.find_trial(plan)
            self.record_trial(self._simulate_plan(plan) if known_trial is None else self._recall_trial(known_trial))
        return self.memo[plan]

    def _simulate_plan(self, plan: Plan) -> Trial:
        if self.is_accepted is None or self.is_accepted(plan):
            with set_check(self._check_simulation):
                evaluation = self.evaluator.evaluate(plan)
        else:  # an algorithm that chooses the layers of stages may leave the space
            evaluation = Evaluation(inf, self.costs.peak_memory(plan), fits=False)
        trial = Trial(plan, evaluation, self.elapsed)
        self.evaluator.keep_trial(trial)
        return trial

    def _check_simulation(self) -> None:
        """Raise `OutOfTime` where the time has been over for a moment, since a simulation may take long."""
        if self.seconds is not None and self.elapsed >= self.seconds + NEAREST_SECONDS:
            self.end = OUT_OF_TIME
            raise OutOfTime

    def _recall_trial(self, known_trial: Trial) -> Trial:
        """Return a trial of an earlier run, and set the clock to its time."""
        elapsed = max(known_trial.elapsed, self.trials[-1].elapsed if self.trials else 0.0)
        self.start_time = self.clock() - elapsed
        return replace(known_trial, elapsed=elapsed)

    def record_trial(self, trial: Trial) -> None:
        """Add a trial, and make it the best where it is."""
        evaluation = trial.evaluation
        self.memo[trial.plan] = evaluation
        self.trials.append(trial)
        if evaluation.fits and (self.best is None or evaluation.step_time < self.best.evaluation.step_time):
            self.best, self.certificate = trial, self.latest_certificate
            self.history.append((len(self.trials), trial.elapsed, evaluation.step_time))
        self._tell_progress(trial.elapsed)

    def _tell_progress(self, elapsed: float) -> None:
        self.last_told = elapsed
        if self.progress is not None:
            counts = len(self.trials), self.considered
            self.progress(Progress(*counts, elapsed, self.best, self.lower_bound, self._estimate_seconds_left(elapsed)))

    def _estimate_seconds_left(self, elapsed: float) -> float | None:
        seconds_left = [] if self.seconds is None else [max(0.0, self.seconds - elapsed)]
        if self.budget is not None and self.trials:
            seconds_left.append((self.budget - len(self.trials)) * elapsed / len(self.trials))
        return min(seconds_left, default=None)

    def _look_at(self, plan: Plan | None = None) -> None:
        elapsed = self.elapsed
        if self.seconds is not None and elapsed >= self.seconds:
            self.end = OUT_OF_TIME
            raise OutOfTime
        if plan is not None:
            self.plan_hashes.add(hash(plan))
        if elapsed - self.last_told > TELL_SECONDS:
            self._tell_progress(elapsed)

    def check_time(self) -> None:
        """Raise `OutOfTime` where the time of the search is over."""
        self._look_at()

    # the questions of a `CostModel`, each of which looks at the time and counts the plans that it is about

    def peak_memory(self, plan: Plan) -> float:
        self._look_at(plan)
        return self.costs.peak_memory(plan)

    def fits(self, plan: Plan) -> bool:
        self._look_at(plan)
        return self.costs.fits(plan) and (self.is_accepted is None or self.is_accepted(plan))

    def plan_bound(self, plan: Plan) -> float:
        self._look_at(plan)
        return self.costs.plan_bound(plan)

    def family_bound(self, family: Layout) -> float:
        self._look_at()
        return self.costs.family_bound(family)

    def busy_bound(self, family: Layout) -> float:
        self._look_at()
        return self.costs.busy_bound(family)

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        self._look_at()
        return self.costs.group_bounds(group, limit)

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        self._look_at(plan)
        return self.costs.resource_times(plan)

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        for plan in plans:
            self._look_at(plan)
        return self.costs.longest_paths(plans)

    def is_answer(self, trial: Trial) -> bool:
        """Return whether a trial fits and is accepted, so that it is better than no answer."""
        return trial.evaluation.fits and (self.is_accepted is None or self.is_accepted(trial.plan))

    def fall_back(self, problem: Problem, space: Space) -> None:
        """Evaluate the known plan that fits and is simulated soonest, where the time was too short for any other."""
        self.latest_certificate = None  # certificates are about plans of the algorithm, and this plan is not
        for plan, _ in sort_known_plans(problem, space):
            if self.costs.fits(plan) and (self.is_accepted is None or self.is_accepted(plan)):
                self.record_trial(Trial(plan, self.costs.evaluate(plan), self.elapsed))
                return

    def find_nearest(self, problem: Problem, space: Space) -> Trial | None:
        """Return the plan with the least peak memory of those that there is time to look at.

        At the end of the time a moment more is taken, so that there is an answer.
        """
        least_plan: tuple[float, Plan] | None = None
        end_time = inf if self.seconds is None else max(self.seconds, self.elapsed + NEAREST_SECONDS)
        candidates = chain(known_layouts(problem, space), _list_frugal_layouts(problem, self.space or space))
        for layout in islice(candidates, MAX_NEAREST):
            plan = complete(problem, layout)
            self.plan_hashes.add(hash(plan))
            memory = self.costs.peak_memory(plan)
            if least_plan is None or memory < least_plan[0]:
                least_plan = memory, plan
            if self.elapsed >= end_time:
                break
        return None if least_plan is None else Trial(least_plan[1], self.costs.evaluate(least_plan[1]), self.elapsed)
