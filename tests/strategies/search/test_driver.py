from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.driver import (
    BUDGET,
    FINISHED,
    MAX_REPEATS,
    NEAREST_SECONDS,
    OUT_OF_TIME,
    Progress,
    SearchResult,
)
from meshwise.strategies.search.proposals import OutOfTime, Proof
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import CORE, EVERYTHING, Space, layouts
from meshwise.strategies.search.starts import known_layouts

from ..problems import problem
from .small_problems import FakeCost, small_problem

PROBLEM = small_problem()
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM))
FRUGAL = tuple(plan for plan in PLANS if plan.microbatch == 1 and plan.recompute is Recompute.FULL)
"""The plans among which the one with the least memory is looked for."""


@dataclass(frozen=True)
class Scripted:
    """An algorithm that says what it is told to."""

    name: ClassVar[str] = "scripted"

    script: tuple[Plan | Proof, ...]
    last: Proof | None = None

    def propose(
        self, problem: Problem, space: Space, costs: object
    ) -> Generator[Plan | Proof, Evaluation, Proof | None]:
        for item in self.script:
            answer = yield item
            assert isinstance(item, Proof) or answer.step_time >= 1
        return self.last


@dataclass
class Times(FakeCost):
    """Step times in the order in which plans are evaluated; ``None`` does not fit."""

    times: tuple[float | None, ...] = ()

    def evaluate(self, plan: Plan) -> Evaluation:
        time = self.times[len(self.evaluated)]
        super().evaluate(plan)
        return Evaluation(float("inf") if time is None else time, 1.0, time is not None)


def run(script: tuple[Plan | Proof, ...], times: tuple[float | None, ...], **limits: object) -> SearchResult:
    return search(Scripted(script), PROBLEM, costs=Times(times=times), **limits)  # type: ignore[arg-type]


def test_the_best_is_the_fastest_that_fits_and_the_first_of_equals() -> None:
    result = run(PLANS[:5], (None, 3.0, 2.0, 2.0, 4.0))
    assert result.best is result.trials[2]
    assert [row[::2] for row in result.history] == [(2, 3.0), (3, 2.0)]
    assert (result.algorithm, result.evaluations, result.nearest) == ("scripted", 5, None)
    assert (result.lower_bound, result.gap, result.interrupted) == (None, None, False)


def test_a_repeated_plan_costs_no_evaluation() -> None:
    a, b, c = PLANS[:3]
    result = run((a, a, b, a, b, c), (3.0, 2.0), budget=2)
    assert [trial.plan for trial in result.trials] == [a, b]


def test_a_search_that_only_repeats_itself_ends() -> None:
    proposals = 0

    class Forever(Scripted):
        def propose(self, problem: Problem, space: Space, costs: object) -> Generator[Plan, Evaluation, None]:
            nonlocal proposals
            while True:
                proposals += 1
                yield PLANS[0]

    result = search(Forever(()), PROBLEM, costs=FakeCost())  # type: ignore[arg-type]
    assert (result.evaluations, proposals) == (1, 1 + MAX_REPEATS)


def test_a_new_plan_among_repeats_keeps_a_search_alive() -> None:
    repeats = (PLANS[0],) * (MAX_REPEATS - 1)
    result = run((PLANS[0], *repeats, PLANS[1], *repeats, PLANS[2]), (3.0, 2.0, 4.0))
    assert result.evaluations == 3


def test_what_is_proven_after_the_last_evaluation_still_counts() -> None:
    a, b, c = PLANS[:3]
    result = run((Proof(1.0), a, b, Proof(1.6), c), (3.0, 2.0), budget=2)
    assert (result.evaluations, result.lower_bound) == (2, 1.6)
    assert result.gap == pytest.approx((2.0 - 1.6) / 1.6)


def test_bounds_only_rise_and_a_gap_of_nothing_is_a_proof() -> None:
    result = search(Scripted((Proof(1.5), PLANS[0], Proof(1.0)), last=Proof(2.0)), PROBLEM, costs=Times(times=(2.0,)))
    assert (result.lower_bound, result.gap) == (2.0, 0.0)
    assert run((Proof(1.5), PLANS[0], Proof(1.0)), (2.0,)).lower_bound == 1.5
    assert run((Proof(0.0), PLANS[0]), (2.0,)).gap is None


def ticking() -> Callable[[], float]:
    """Return a clock that advances one second a look."""
    times = iter(range(10**6))
    return lambda: float(next(times))


def test_no_plan_is_evaluated_after_the_time_is_up() -> None:
    result = run(PLANS[:20], tuple(range(2, 22)), seconds=6, clock=ticking())
    assert 1 < result.evaluations < 6
    assert all(trial.elapsed < 6 for trial in result.trials)
    assert run(PLANS[:20], (2.0,), seconds=0.1, clock=ticking()).evaluations == 1  # never nothing at all


def test_a_search_says_how_it_ended() -> None:
    times = tuple(range(2, 22))
    assert run(PLANS[:3], times).end == FINISHED
    assert run(PLANS[:20], times, budget=3).end == BUDGET
    assert run(PLANS[:3], times, budget=3).end == FINISHED  # it had no more to propose
    assert run(PLANS[:20], times, seconds=6, clock=ticking()).end == OUT_OF_TIME


def looking(costs: FakeCost, seconds: float) -> SearchResult:
    """Return what an algorithm finds that looks at plans for ever, and gives up without a proposal."""

    class Looking(Scripted):
        def propose(self, problem: Problem, space: Space, costs: FakeCost) -> Generator[Plan, Evaluation, None]:
            try:
                while True:
                    costs.fits(PLANS[0])
            except OutOfTime:
                return
            yield PLANS[0]

    return search(Looking(()), PROBLEM, costs=costs, seconds=seconds, clock=ticking())  # type: ignore[arg-type]


def test_time_that_runs_out_before_a_plan_was_found_is_no_empty_space() -> None:
    result = looking(FakeCost(capacity=-1.0), 5)
    assert (result.end, result.best) == (OUT_OF_TIME, None)
    assert result.nearest is not None and not result.nearest.evaluation.fits
    assert result.wall_time <= 5 + NEAREST_SECONDS + 6  # the clock goes on by 1 s whenever it is looked at


def test_where_time_runs_out_a_plan_that_fits_is_still_found() -> None:
    result = looking(FakeCost(), 5)
    assert result.end == OUT_OF_TIME
    assert result.best is not None and result.best.evaluation.fits


def test_costs_tell_an_algorithm_that_the_time_is_up() -> None:
    class Endless(Scripted):
        def propose(self, problem: Problem, space: Space, costs: FakeCost) -> Generator[Plan, Evaluation, None]:
            yield PLANS[0]
            while True:
                costs.fits(PLANS[1])

    result = search(Endless(()), PROBLEM, costs=FakeCost(), seconds=9, clock=ticking())  # type: ignore[arg-type]
    assert (result.evaluations, result.considered, result.interrupted) == (1, 2, False)


@pytest.mark.parametrize("limits", [{"budget": 0}, {"budget": -3}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_limits_of_nothing_are_errors(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="met"):
        run(PLANS[:1], (2.0,), **limits)


def test_progress_is_told_after_every_evaluation() -> None:
    seen: list[Progress] = []
    result = run((PLANS[0], Proof(1.0), PLANS[1], PLANS[0], PLANS[2]), (3.0, None, 2.0), progress=seen.append)
    assert [p.evaluations for p in seen] == [1, 2, 3]
    assert [p.best and p.best.evaluation.step_time for p in seen] == [3.0, 3.0, 2.0]
    assert [p.lower_bound for p in seen] == [None, 1.0, 1.0]
    assert [p.elapsed for p in seen] == [trial.elapsed for trial in result.trials]


def test_progress_says_the_gap_and_what_is_left() -> None:
    seen: list[Progress] = []
    script = PLANS[0], Proof(2.0), PLANS[1], PLANS[2]
    run(script, (3.0, 2.5, 2.0), budget=4, clock=ticking(), progress=seen.append)
    assert [p.gap for p in seen] == [None, (2.5 - 2.0) / 2.0, 0.0]
    assert [p.seconds_left for p in seen] == [(4 - n) * p.elapsed / n for n, p in enumerate(seen, 1)]
    seen.clear()
    run(script, (3.0, 2.5, 2.0), seconds=90, clock=ticking(), progress=seen.append)
    assert [p.seconds_left for p in seen] == [90 - p.elapsed for p in seen]
    seen.clear()
    run(script, (3.0, 2.5, 2.0), progress=seen.append)
    assert [p.seconds_left for p in seen] == [None] * 3


@pytest.mark.parametrize("where", ["cost model", "progress"])
def test_an_interruption_keeps_what_was_found(where: str) -> None:
    def interrupt(count: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    if where == "cost model":
        result = search(Scripted(PLANS[:9]), PROBLEM, costs=FakeCost(on_evaluate=interrupt))
    else:
        result = search(
            Scripted(PLANS[:9]), PROBLEM, costs=FakeCost(), progress=lambda progress: interrupt(progress.evaluations)
        )
    assert result.interrupted
    assert result.evaluations == (2 if where == "cost model" else 3)
    assert result.best == min(result.trials, key=lambda trial: trial.evaluation.step_time)


def test_considered_counts_different_plans_however_they_were_looked_at() -> None:
    class Looking(Scripted):
        def propose(self, problem: Problem, space: Space, costs: FakeCost) -> Generator[Plan, Evaluation, None]:
            costs.fits(PLANS[0]), costs.fits(PLANS[0]), costs.plan_bound(PLANS[1]), costs.peak_memory(PLANS[2])
            yield PLANS[0]
            yield PLANS[3]

    result = search(Looking(()), PROBLEM, costs=FakeCost())  # type: ignore[arg-type]
    assert (result.considered, result.evaluations) == (4, 2)


def test_where_nothing_fits_the_nearest_is_the_plan_with_the_least_memory() -> None:
    costs = FakeCost(capacity=-1.0)
    result = search(Scripted(PLANS[:2]), PROBLEM, costs=costs)
    assert result.best is None
    assert result.gap is None
    assert result.nearest is not None
    known = [complete(PROBLEM, layout) for layout in known_layouts(PROBLEM, EVERYTHING)]
    least = min([*known, *FRUGAL], key=costs.peak_memory)
    assert result.nearest.plan == least
    assert result.nearest.evaluation == Evaluation(float("inf"), costs.peak_memory(least), False)


def test_the_nearest_by_simulation_is_among_those_of_the_smallest_microbatch_and_most_recompute() -> None:
    decoder = problem(devices=4, layers=4, batch=8)
    costs, found = SimulatedCost(decoder), [complete(decoder, layout) for layout in layouts(decoder, CORE)]
    frugal = [plan for plan in found if plan.microbatch == 1 and plan.recompute is Recompute.FULL]
    assert len(frugal) < len(found) / 4
    assert min(map(costs.peak_memory, frugal)) == min(map(costs.peak_memory, found))


def test_the_nearest_is_looked_for_only_while_there_is_time() -> None:
    costs = FakeCost(capacity=-1.0)
    result = search(Scripted(()), PROBLEM, costs=costs, seconds=8, clock=ticking())
    assert result.nearest is not None
    assert 1 < result.considered < 8
    known = [complete(PROBLEM, layout) for layout in known_layouts(PROBLEM, EVERYTHING)]
    assert result.nearest.plan == min(dict.fromkeys([*known, *FRUGAL][: result.considered]), key=costs.peak_memory)


@dataclass
class Endless(FakeCost):
    """Simulations of plans of many passes that take until somebody ends them."""

    passes: int = 0

    def evaluate(self, plan: Plan) -> Evaluation:
        while plan.num_microbatches * len(plan.stages) > self.passes:
            check_deadline()
        return super().evaluate(plan)


def test_a_simulation_that_takes_too_long_is_ended_and_the_plan_simulated_soonest_is_the_answer() -> None:
    known = [complete(PROBLEM, layout) for layout in known_layouts(PROBLEM, EVERYTHING)]
    fewest = min(plan.num_microbatches * len(plan.stages) for plan in known)
    longest = max(PLANS, key=lambda plan: plan.num_microbatches * len(plan.stages))
    result = search(Scripted((longest,)), PROBLEM, costs=Endless(passes=fewest), seconds=5, clock=ticking())
    assert result.end == OUT_OF_TIME
    assert result.best is not None and result.trials == (result.best,)
    assert result.best.plan.num_microbatches * len(result.best.plan.stages) == fewest


def test_an_empty_space_is_a_result() -> None:
    result = search(Scripted(()), PROBLEM, Space(tensor=(7,)), costs=FakeCost())
    assert (result.best, result.nearest, result.trials, result.considered) == (None, None, (), 0)


def test_a_plan_that_fits_and_was_only_looked_at_after_the_budget_is_told_as_the_nearest() -> None:
    # the one plan that the budget allows does not fit; of those that are looked at then, one does
    result = run((PLANS[0], PLANS[1]), (None, 7.0), budget=1)
    assert (result.end, result.best, result.evaluations) == (BUDGET, None, 1)
    assert result.nearest is not None and result.nearest.evaluation.fits


def test_an_interrupt_after_the_last_plan_keeps_the_best() -> None:
    class Interrupted(Scripted):
        def propose(self, problem: Problem, space: Space, costs: object) -> Generator[Plan, Evaluation, None]:
            yield PLANS[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwise.strategies.search.driver.scope_of", interrupted)
        result = search(Interrupted(()), PROBLEM, costs=FakeCost())  # type: ignore[arg-type]
    assert result.interrupted and result.scope is None
    assert result.best is not None and result.best.plan == PLANS[0]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
