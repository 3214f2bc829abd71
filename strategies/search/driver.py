"""The driver of searches, and what algorithms say to it.

The one loop that runs every search: budget, clock, memo, progress and best so far live here.

An algorithm is a frozen dataclass with one generator. It writes ``evaluation = yield plan`` to
learn about a plan, and may yield or return a `Proof` to say what it knows about all of them, or yield a
`Certificate` of the plans that it yields next. It may yield `Upcoming` plans, so that an executor evaluates several
at once; trials and answers are the same without one.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.deadline import watched_by
from meshwise.simulator.notebook import to_html
from meshwise.strategies.bounds.group_bounds import FloatArray
from meshwise.strategies.cost_model import CostModel, SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Resource, Trial
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.descent import known_layouts, soonest_known
from meshwise.strategies.search.fan_out import FanOut
from meshwise.strategies.search.scope import Scope, scope_of
from meshwise.strategies.search.space import EVERYTHING, Space, count, groups, keeps_limits, layouts, within

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of the sum of costs behind the plans that are yielded after it.

    It is of one mesh and one size of microbatches, and says nothing of simulated times.

    Parameters
    ----------
    gap
        Fraction by which the sum may be above the least within the same bytes: 0 is proven the least, ``None`` where
        nothing is known.
    memory_price
        Seconds of a step that one byte more on every device saves, over the next bytes; ``None`` where it is not known.
    among
        Of which choices the least is meant, where these are not all.
    """

    gap: float | None
    memory_price: float | None
    among: str = ""


TELL_SECONDS = 0.5
"""How often a search that only looks at plans says how far it is."""
MAX_REPEATS = 1000
"""Proposals in a row that repeat known plans, after which a search has run dry."""

MAX_NEAREST = 20_000
"""Plans whose memory is looked at where none fits."""

NEAREST_SECONDS = 1.0
"""How long at most after the time is up."""

FINISHED, OUT_OF_TIME, BUDGET, INTERRUPTED = "finished", "out of time", "budget", "interrupted"
"""How a search ends: its algorithm has nothing left to propose, or a limit or the user ended it."""


class OutOfTime(Exception):
    """Raised by the costs that an algorithm sees when the search has used its seconds.

    An algorithm that has evaluated nothing yet may catch it and yield the one plan it would try.
    """


@dataclass(frozen=True, slots=True)
class Proof:
    """The claim that no plan that fits takes less than ``lower_bound`` seconds: of ``space``, by default the whole.

    An infinite bound is the claim that none fits.
    """

    lower_bound: float
    space: Space | None = None


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Plans that will be proposed, in this order as far as the budget goes: they may be evaluated at once."""

    plans: tuple[Plan, ...]

    __repr__ = brief()


@dataclass(frozen=True, slots=True)
class Considered:
    """The number of plans covered so far, one by one or in groups that a bound drops."""

    plans: int


Proposals = Generator[Plan | Proof | Certificate | Upcoming | Considered, Evaluation, Proof | None]
"""What an algorithm is while it runs; one that only yields plans is one too."""


class SearchAlgorithm(Protocol):
    """A way to look for the best plan; its fields are its hyper-parameters."""

    name: ClassVar[str]

    # Those that list all plans have a ``most_plans: ClassVar[int]``: of a larger space they are given the core.

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield plans to evaluate, and proofs; return the last proof, or ``None``."""
        ...


class Journal(Protocol):
    """The trials of earlier runs of a search, and where those of this one are kept."""

    def known(self, plan: Plan) -> Trial | None:
        """Return the trial of ``plan`` in an earlier run; ``None`` where it was not evaluated."""
        ...

    def keep(self, trial: Trial) -> None:
        """Keep a trial of this run, so that no end of the process can lose it."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: what callbacks receive after every evaluation.

    ``left`` is how many seconds are left until the time or, at the pace so far, the budget is used;
    ``None`` where there is no limit.
    """

    evaluations: int
    considered: int
    elapsed: float
    best: Trial | None
    lower_bound: float | None
    left: float | None

    @property
    def gap(self) -> float | None:
        """The best step time over the lower bound, minus 1; ``None`` where one of them is not known."""
        return _gap(self.best, self.lower_bound)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Parameters
    ----------
    best
        The fastest plan that fits; ``None`` where none was found.
    nearest
        Where none was found: the plan with the least peak memory among those that there was time to look at.
    trials
        Every plan that was evaluated, once, in order.
    considered
        Different plans that were looked at, those dropped without an evaluation included.
    lower_bound
        Seconds below which no plan of the space that fits can come; ``None`` where none is known.
    gap
        ``(best - lower_bound) / lower_bound``, at least 0: then no plan of ``scope`` is faster. ``None`` where no bound
        is known.
    wall_time
        Seconds.
    history
        ``(evaluations, elapsed, step_time)`` whenever the best became better.
    end
        `FINISHED`, `OUT_OF_TIME`, `BUDGET` or `INTERRUPTED`.
    nothing_fits
        Whether the algorithm has proven of all plans of the space that none fits.
    certificate
        What the algorithm said of the best plan, if it did.
    scope
        The plans among which it looked, of which ``lower_bound`` and ``gap`` are: the best may be none of them.
        ``None`` where it chose a sharding for every operator, of which the certificate tells, or was interrupted.
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

    __repr__ = brief("algorithm", "best", "evaluations", "lower_bound", "gap", "wall_time")

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return self.end == INTERRUPTED

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a trial: the plan in words, seconds a step, peak bytes, whether it fits, seconds so far."""
        import pandas as pd

        rows = [
            {
                "plan": trial.plan.describe(),
                "step_time": trial.evaluation.step_time,
                "peak_memory": trial.evaluation.peak_memory,
                "fits": trial.evaluation.fits,
                "elapsed": trial.elapsed,
            }
            for trial in self.trials
        ]
        return pd.DataFrame(rows, columns=["plan", "step_time", "peak_memory", "fits", "elapsed"])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the best plan, what is proven of it, and the fastest plans beside it."""
        fastest = sorted((trial for trial in self.trials if trial.evaluation.fits), key=_step_time)[:_SHOWN]
        found = "none fits" if self.best is None else self.best.plan.describe()
        proven = "no bound" if self.gap is None else f"no plan of the space is more than {self.gap:.1%} faster"
        rows = [("evaluations", f"{self.evaluations:,}"), ("ended", self.end), ("proven", proven)]
        rows += [(trial.plan.describe(), f"{_step_time(trial):.6g} s") for trial in fastest]
        return to_html(f"{self.algorithm}: {found}", rows)


_SHOWN = 10
"""Plans that a notebook shows of a search."""


def _step_time(trial: Trial) -> float:
    return trial.evaluation.step_time


class SearchResults(tuple[SearchResult, ...]):
    """What several searches found, in their order; at a prompt a line each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(_in_one_line, self)) or "no search"


def _in_one_line(result: SearchResult) -> str:
    step = "nothing found" if result.best is None else f"{result.best.evaluation.step_time:.6g} s"
    gap = "no bound" if result.gap is None else f"gap {result.gap:.1%}"
    return f"{result.algorithm:<22}  {step}, {gap}, {result.evaluations:,} evaluations, {result.end}"


def search(
    algorithm: SearchAlgorithm,
    problem: Problem,
    space: Space = EVERYTHING,
    *,
    costs: CostModel | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = perf_counter,
    executor: Executor | None = None,
    journal: Journal | None = None,
) -> SearchResult:
    """Return what ``algorithm`` finds for ``problem`` in ``space``.

    Parameters
    ----------
    costs
        How plans are judged; by default the simulator.
    budget
        Evaluations, of different plans: a repeated plan costs none.
    seconds
        Time after which nothing is looked at any more. What is simulated then is given up a moment later; where no plan
        was evaluated, the known plan that is simulated soonest is, so that there is a result.
    progress
        Called after every evaluation, and now and then while plans are only looked at.
    clock
        Where the seconds come from.
    executor
        Evaluates plans that an algorithm knows ahead, of processes of this machine or of a cluster. Trials and
        history are the same for any number of workers, but for the seconds in them. It is left open.
    journal
        Answers what an earlier run of the same search has evaluated, and keeps what this one does. The search does
        what it would have done uninterrupted; its clock goes on from that of the earlier run.

    Raises
    ------
    ValueError
        Where ``budget`` is less than 1, ``seconds`` is not positive, or ``journal`` says of the best plan what the
        costs do not. That nothing fits is a result.
    """
    if budget is not None and budget < 1:
        raise ValueError(f"budget is at least 1 evaluation, met {budget}; nearest: 1")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds are more than 0, met {seconds}")
    costs = SimulatedCost(problem) if costs is None else costs
    most = getattr(algorithm, "most_plans", None)
    whole, space = space, space if most is None else within(problem, space, most)
    fan_out = FanOut(costs, executor)
    limited = (space.accepts, space.recompute, space.stages) != (None, None, None)
    accepted = partial(_accepted, problem, space) if limited else None
    run = _Run(costs, fan_out, journal, budget, seconds, progress, clock, accepted)
    nearest = scope = None
    try:
        run.drive(algorithm.propose(problem, space, run))
        if run.best is None and run.end == OUT_OF_TIME:
            run.fall_back(problem, space)
        if run.best is None:
            nearest = run.nearest(problem, space)
            if nearest is not None and run.end == OUT_OF_TIME and run.is_answer(nearest):
                run.record(nearest)
                nearest = None
        if journal is not None and run.best is not None:
            _confirm(run.best, journal, costs)
        scope = scope_of(problem, run.space or space) if run.said is None else None
    except KeyboardInterrupt:
        run.end = INTERRUPTED
    finally:
        fan_out.cancel()
    return SearchResult(
        algorithm=algorithm.name,
        best=run.best,
        nearest=nearest,
        trials=tuple(run.trials),
        evaluations=len(run.trials),
        considered=run.considered,
        lower_bound=run.lower_bound if run.lower_bound != inf else None,
        gap=_gap(run.best, run.lower_bound),
        wall_time=run.elapsed,
        history=tuple(run.history),
        end=run.end,
        certificate=run.certificate,
        scope=scope,
        nothing_fits=run.lower_bound == inf and space is whole,
    )


def _gap(best: Trial | None, lower_bound: float | None) -> float | None:
    if best is None or lower_bound is None or lower_bound <= 0:
        return None
    return max(best.evaluation.step_time - lower_bound, 0.0) / lower_bound


def _that_keep_least(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield layouts of a space: of the smallest microbatch, and of most recompute where it has that; else all."""
    frugal = space if space.microbatch else space.with_limits(microbatch=(1,))
    for group in groups(problem, frugal):
        fullest = np.array([choice.recompute is Recompute.FULL for choice in group.passes])
        legal = group.legal & fullest[:, None]
        yield from replace(group, legal=legal) if legal.any() else group
    yield from layouts(problem, space) if not count(problem, frugal) else ()


def _accepted(problem: Problem, space: Space, plan: Plan) -> bool:
    """Return whether a plan keeps the limits that an algorithm which divides stages itself may leave."""
    return keeps_limits(problem, space, plan) and (space.accepts is None or not space.accepts.refusals(problem, plan))


def _confirm(best: Trial, journal: Journal, costs: CostModel) -> None:
    """Raise ``ValueError`` where the best plan has another evaluation than the journal says."""
    if journal.known(best.plan) is None:
        return
    fresh = costs.evaluate(best.plan)
    if fresh != best.evaluation:
        raise ValueError(
            f"the journal says of the best plan what its simulation says, {fresh.step_time} s and "
            f"{fresh.peak_memory} bytes; met {best.evaluation.step_time} s and {best.evaluation.peak_memory} bytes"
        )


class _Run:
    """The state of one search, and the cost model that its algorithm sees: one that counts."""

    def __init__(
        self,
        costs: CostModel,
        fan_out: FanOut,
        journal: Journal | None,
        budget: int | None,
        seconds: float | None,
        progress: Callable[[Progress], None] | None,
        clock: Callable[[], float],
        accepted: Callable[[Plan], bool] | None,
    ) -> None:
        self.accepted = accepted
        self.costs, self.fan_out, self.journal = costs, fan_out, journal
        self.budget, self.seconds = budget, seconds
        self.progress, self.clock, self.start = progress, clock, clock()
        self.trials: list[Trial] = []
        self.memo: dict[Plan, Evaluation] = {}
        self.seen: set[int] = set()  # hashes: thousands of plans need not stay alive to be counted
        self.in_groups = 0
        self.history: list[tuple[int, float, float]] = []
        self.best: Trial | None = None
        self.lower_bound: float | None = None
        self.space: Space | None = None
        self.said: Certificate | None = None
        self.certificate: Certificate | None = None
        self.repeats = 0
        self.told = 0.0
        self.end = FINISHED

    @property
    def considered(self) -> int:
        """Different plans that were looked at, by themselves or in groups."""
        return max(len(self.seen), self.in_groups)

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.start

    def drive(self, proposals: Proposals) -> None:
        """Answer every proposal until the algorithm, the budget or the time is at its end."""
        answer: Evaluation | None = None
        with watched_by(self.check_time), closing(proposals):
            while True:
                try:
                    proposal = next(proposals) if answer is None else proposals.send(answer)
                except StopIteration as end:
                    return self._learn(end.value)
                except OutOfTime:
                    return
                answer = None
                if isinstance(proposal, Proof):
                    self._learn(proposal)
                elif isinstance(proposal, Certificate):
                    self.said = proposal
                elif isinstance(proposal, Upcoming):
                    self._begin(proposal.plans)
                elif isinstance(proposal, Considered):
                    self.in_groups = proposal.plans
                elif self._spent(proposal):
                    return
                else:
                    try:
                        answer = self.evaluate(proposal)
                    except OutOfTime:
                        return

    def _learn(self, proof: Proof | None) -> None:
        if proof is not None:
            if proof.space != self.space:  # nothing fits in the one before
                self.space, self.lower_bound = proof.space, None
            self.lower_bound = max(proof.lower_bound, self.lower_bound or 0.0)

    @property
    def _late(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds

    def _known(self, plan: Plan) -> Trial | None:
        return None if self.journal is None else self.journal.known(plan)

    def _begin(self, plans: Sequence[Plan]) -> None:
        """Let an executor evaluate plans that are not known, as many as the budget allows."""
        new = [plan for plan in plans if plan not in self.memo and self._known(plan) is None]
        room = None if self.budget is None else max(0, self.budget - len(self.trials) - self.fan_out.pending)
        self.fan_out.begin(new[:room])

    def _spent(self, plan: Plan) -> bool:
        if self.trials and self._late and self._known(plan) is None:
            self.end = OUT_OF_TIME
            return True
        if plan in self.memo:
            self.repeats += 1
            return self.repeats >= MAX_REPEATS
        self.repeats = 0
        if self.budget is None or len(self.trials) < self.budget:
            return False
        self.end = BUDGET
        return True

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return the evaluation of ``plan``, from the memo where it is known."""
        if plan not in self.memo:
            self.seen.add(hash(plan))
            known = self._known(plan)
            self.record(self._simulate(plan) if known is None else self._recall(known))
        return self.memo[plan]

    def _simulate(self, plan: Plan) -> Trial:
        if self.accepted is None or self.accepted(plan):
            with watched_by(self._check_simulation):
                evaluation = self.fan_out.evaluate(plan)
        else:  # of an algorithm that leaves the space, as those do that choose the layers of stages
            evaluation = Evaluation(inf, self.costs.peak_memory(plan), fits=False)
        trial = Trial(plan, evaluation, self.elapsed)
        if self.journal is not None:
            self.journal.keep(trial)
        return trial

    def _check_simulation(self) -> None:
        """Raise `OutOfTime` where the time has been over for a moment: what is simulated may take long."""
        if self.seconds is not None and self.elapsed >= self.seconds + NEAREST_SECONDS:
            self.end = OUT_OF_TIME
            raise OutOfTime

    def _recall(self, known: Trial) -> Trial:
        """Return a trial of an earlier run, and set the clock to what it was then."""
        elapsed = max(known.elapsed, self.trials[-1].elapsed if self.trials else 0.0)
        self.start = self.clock() - elapsed
        return replace(known, elapsed=elapsed)

    def record(self, trial: Trial) -> None:
        """Take in a trial, the best so far or not."""
        evaluation = trial.evaluation
        self.memo[trial.plan] = evaluation
        self.trials.append(trial)
        if evaluation.fits and (self.best is None or evaluation.step_time < self.best.evaluation.step_time):
            self.best, self.certificate = trial, self.said
            self.history.append((len(self.trials), trial.elapsed, evaluation.step_time))
        self._tell(trial.elapsed)

    def _tell(self, elapsed: float) -> None:
        self.told = elapsed
        if self.progress is not None:
            counts = len(self.trials), self.considered
            self.progress(Progress(*counts, elapsed, self.best, self.lower_bound, self._left(elapsed)))

    def _left(self, elapsed: float) -> float | None:
        left = [] if self.seconds is None else [max(0.0, self.seconds - elapsed)]
        if self.budget is not None and self.trials:
            left.append((self.budget - len(self.trials)) * elapsed / len(self.trials))
        return min(left, default=None)

    def _look(self, plan: Plan | None = None) -> None:
        elapsed = self.elapsed
        if self.seconds is not None and elapsed >= self.seconds:
            self.end = OUT_OF_TIME
            raise OutOfTime
        if plan is not None:
            self.seen.add(hash(plan))
        if elapsed - self.told > TELL_SECONDS:
            self._tell(elapsed)

    def check_time(self) -> None:
        """Raise `OutOfTime` where the time is over."""
        self._look()

    def peak_memory(self, plan: Plan) -> float:
        """Return the bytes of the fullest device."""
        self._look(plan)
        return self.costs.peak_memory(plan)

    def fits(self, plan: Plan) -> bool:
        """Return whether the plan fits in memory, and is accepted."""
        self._look(plan)
        return self.costs.fits(plan) and (self.accepted is None or self.accepted(plan))

    def bound(self, plan: Plan) -> float:
        """Return seconds that the plan's step takes at least."""
        self._look(plan)
        return self.costs.bound(plan)

    def floor(self, family: Layout) -> float:
        """Return seconds that no step of a family is below."""
        self._look()
        return self.costs.floor(family)

    def reach(self, family: Layout) -> float:
        """Return seconds that no step of a family is below whose schedule runs one pass at a time."""
        self._look()
        return self.costs.reach(family)

    def table(self, group: Group, limit: float = inf) -> FloatArray:
        """Return bounds of the members of a group."""
        self._look()
        return self.costs.table(group, limit)

    def spent(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes."""
        self._look(plan)
        return self.costs.spent(plan)

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return for every plan the seconds of its longest path."""
        for plan in plans:
            self._look(plan)
        return self.costs.longest_paths(plans)

    def is_answer(self, nearest: Trial) -> bool:
        """Return whether the plan that needs the least memory fits, and is accepted: then it is better than none."""
        return nearest.evaluation.fits and (self.accepted is None or self.accepted(nearest.plan))

    def fall_back(self, problem: Problem, space: Space) -> None:
        """Take in the known plan that fits and is simulated soonest, where the time was too short for any other."""
        self.said = None  # of plans that an algorithm makes, and this is none
        for plan, _ in soonest_known(problem, space):
            if self.costs.fits(plan) and (self.accepted is None or self.accepted(plan)):
                self.record(Trial(plan, self.costs.evaluate(plan), self.elapsed))
                return

    def nearest(self, problem: Problem, space: Space) -> Trial | None:
        """Return the plan with the least peak memory of those that there is time to look at, and a moment more."""
        least: tuple[float, Plan] | None = None
        end = inf if self.seconds is None else max(self.seconds, self.elapsed + NEAREST_SECONDS)
        among = chain(known_layouts(problem, space), _that_keep_least(problem, self.space or space))
        for layout in islice(among, MAX_NEAREST):
            plan = complete(problem, layout)
            self.seen.add(hash(plan))
            memory = self.costs.peak_memory(plan)
            if least is None or memory < least[0]:
                least = memory, plan
            if self.elapsed >= end:
                break
        return None if least is None else Trial(least[1], self.costs.evaluate(least[1]), self.elapsed)


MOST_AHEAD = 1024
"""Plans that are told of before they are wanted."""


def ahead(plans: Iterator[Plan]) -> Generator[Plan | Upcoming, Evaluation, float]:
    """Yield every plan, and before it those that come after it; return the least step time, infinite without plans.

    No more are told of than were evaluated, so that the first result does not wait and a search that ends early has
    looked at few in vain.
    """
    best, evaluated = inf, 0
    waiting: deque[Plan] = deque()
    while True:
        more = tuple(islice(plans, max(1, min(evaluated, MOST_AHEAD)) - len(waiting)))
        if more:
            yield Upcoming(more)
        waiting.extend(more)
        if not waiting:
            return best
        best = min(best, (yield waiting.popleft()).step_time)
        evaluated += 1
