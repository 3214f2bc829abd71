"""The laws that every search among layouts obeys."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from inspect import isgenerator
from itertools import pairwise, product
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.operators.operator_plan import cuts_operators, list_operator_violations
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms import ALGORITHMS, LAYOUT_ALGORITHMS, OPERATOR_ALGORITHMS, STAGE_ALGORITHMS
from meshwise.strategies.search.driver import Progress, SearchResult
from meshwise.strategies.search.fan_out import Evaluator
from meshwise.strategies.search.proposals import SearchAlgorithm
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts
from meshwise.strategies.search.starts import known_layouts

from ...examples import LONG
from ..problems import problem as real_problem
from .small_problems import PROBLEMS, SPACES, FakeCost, small_problem

ROOT = Path(__file__).parents[3]
PROBLEM = small_problem()
EACH = pytest.mark.parametrize("name", LAYOUT_ALGORITHMS)


def make(name: str, seed: int = 0) -> SearchAlgorithm:
    """Return the algorithm, seeded where it draws."""
    algorithm = ALGORITHMS[name]
    return algorithm(**{"seed": seed} if "seed" in {field.name for field in fields(algorithm)} else {})


def found(result: SearchResult) -> list[tuple[object, object]]:
    """Return what does not depend on the clock."""
    return [(trial.plan, trial.evaluation) for trial in result.trials]


def mesh(plan: Plan) -> Plan:
    """Return what is left of a plan whose stages may have any layers and recomputation."""
    return replace(plan, stages=(), recompute=Recompute.NONE)


@EACH
def test_an_algorithm_is_a_frozen_value_with_a_generator(name: str) -> None:
    algorithm = make(name)
    assert algorithm == make(name)
    assert hash(algorithm) == hash(make(name))
    assert algorithm.name == name
    assert isgenerator(algorithm.propose(PROBLEM, Space(), FakeCost()))


@EACH
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_trials(name: str, seed: int) -> None:
    first, second = (search(make(name, seed), PROBLEM, costs=FakeCost(), budget=30) for _ in range(2))
    assert found(first) == found(second)
    assert first.considered == second.considered


SEARCHED = """
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS, OPERATOR_ALGORITHMS
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space
from tests.strategies.problems import problem as real_problem
from tests.strategies.search.small_problems import FakeCost, small_problem

for name, algorithm in OPERATOR_ALGORITHMS.items():
    for trial in search(algorithm(), real_problem(devices=4, layers=2, batch=4), budget=10).trials:
        print("operators", name, trial.plan, trial.evaluation)
problem = small_problem()
for wide in (False, True):
    for name, algorithm in LAYOUT_ALGORITHMS.items():
        for trial in search(algorithm(), problem, Space(wide=wide), costs=FakeCost(), budget=BUDGET).trials:
            print(wide, name, trial.plan, trial.evaluation)
"""


def test_the_same_seed_gives_the_same_trials_under_any_hash_seed() -> None:
    found = set()
    for seed in range(5 if LONG else 2):
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        program = SEARCHED.replace("BUDGET", "30" if LONG else "10")
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    trials = found.pop().decode().splitlines()
    met = {tuple(line.split()[:2]) for line in trials}
    assert met == {*product(("False", "True"), LAYOUT_ALGORITHMS), *product(("operators",), OPERATOR_ALGORITHMS)}


@EACH
@settings(max_examples=15, deadline=None)
@given(
    problem=PROBLEMS,
    space=SPACES,
    seed=st.integers(0, 99),
    capacity=st.sampled_from((0.05, 0.4, 1.0)),
    budget=st.integers(1, 12),
)
def test_laws_of_a_result(name: str, problem: Problem, space: Space, seed: int, capacity: float, budget: int) -> None:
    costs = FakeCost(seed=seed, capacity=capacity)
    result = search(make(name, seed), problem, space, costs=costs, budget=budget)
    plans = {complete(problem, layout) for layout in layouts(problem, space)}
    known = {complete(problem, layout) for layout in known_layouts(problem, space)}
    begins_with_known = name in ("auto", "best_first", "metis", "sailor")  # with what people know
    open_to = plans | known if begins_with_known else plans

    assert result.evaluations == len(result.trials) <= budget
    evaluated = [trial.plan for trial in result.trials]
    assert len(set(evaluated)) == len(evaluated)
    assert result.evaluations <= result.considered
    if name in STAGE_ALGORITHMS:
        assert set(map(mesh, open_to)).issuperset(map(mesh, evaluated))
    else:
        assert result.considered <= len(plans | known)  # where nothing fits known ones are looked at for the nearest
        assert open_to.issuperset(evaluated)

    fitting = [trial for trial in result.trials if trial.evaluation.fits]
    assert result.best == min(fitting, key=lambda trial: trial.evaluation.step_time, default=None)
    if any(map(costs.fits, open_to)):
        assert result.best is not None
        optimum = min((costs.step_time(plan) for plan in plans if costs.fits(plan)), default=inf)
        assert (result.lower_bound or 0.0) <= optimum
        assert result.history[-1][2] == result.best.evaluation.step_time
        assert result.nearest is None
    else:
        assert (result.best is None, result.nearest is None) == (True, not (plans or known))


@EACH
def test_progress_is_monotone(name: str) -> None:
    seen: list[Progress] = []
    costs = FakeCost(tight=0.3)
    result = search(make(name), PROBLEM, costs=costs, budget=40, progress=seen.append, clock=lambda: 0.0)
    assert len(seen) == result.evaluations > 3
    for before, after in pairwise(seen):
        assert after.evaluations == before.evaluations + 1
        assert after.elapsed >= before.elapsed
        assert after.considered >= before.considered
        assert before.best is not None
        assert after.best is not None
        assert after.best.evaluation.step_time <= before.best.evaluation.step_time
        assert (after.lower_bound or 0) >= (before.lower_bound or 0)


@EACH
def test_an_interruption_keeps_the_best_so_far(name: str) -> None:
    def interrupt(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    result = search(make(name), PROBLEM, costs=FakeCost(tight=0.3, on_evaluate=interrupt))
    whole = search(make(name), PROBLEM, costs=FakeCost(tight=0.3), budget=3)
    assert result.interrupted
    assert not whole.interrupted
    assert found(result) == found(whole)
    assert result.best is not None
    assert whole.best is not None
    assert result.best.plan == whole.best.plan


@EACH
def test_an_infeasible_problem_is_a_result(name: str) -> None:
    result = search(make(name), PROBLEM, costs=FakeCost(capacity=-1.0))
    assert (result.best, result.gap, result.history) == (None, None, ())
    assert result.nearest is not None
    assert not result.nearest.evaluation.fits


REAL = real_problem(layers=2, devices=4, batch=8)


class Notebook:
    """A journal in memory, and how many lines of it a killed run would have left."""

    def __init__(self, trials: tuple[Trial, ...] = ()) -> None:
        self.old = {trial.plan: trial for trial in trials}
        self.kept: list[Trial] = []

    def find_trial(self, plan: Plan) -> Trial | None:
        return self.old.get(plan)

    def keep_trial(self, trial: Trial) -> None:
        self.kept.append(trial)


@EACH
@pytest.mark.parametrize("killed_after", [0, 1, 7, 20])
def test_a_resumed_search_is_the_uninterrupted_one(name: str, killed_after: int) -> None:
    costs = FakeCost(tight=0.3)
    whole = search(make(name), PROBLEM, costs=costs, budget=20)
    journal = Notebook(whole.trials[:killed_after])
    costs.evaluated.clear()
    resumed = search(make(name), PROBLEM, costs=Evaluator(costs, journal=journal), budget=20)
    assert found(resumed) == found(whole)
    assert (resumed.considered, resumed.lower_bound, resumed.gap) == (whole.considered, whole.lower_bound, whole.gap)
    assert journal.kept == list(resumed.trials[killed_after:])
    new = [trial.plan for trial in whole.trials[killed_after:]]
    assert [plan for plan in costs.evaluated if plan not in journal.old] == new


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_the_best_is_never_worse_than_the_first_plan(name: str, seed: int) -> None:
    result = search(make(name, seed), PROBLEM, costs=FakeCost(seed=seed), budget=10)
    assert result.best is not None
    assert result.best.evaluation.step_time <= result.trials[0].evaluation.step_time
    times = [step_time for _, _, step_time in result.history]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_plans_are_legal_and_their_evaluations_those_of_a_fresh_simulation(name: str) -> None:
    result = search(make(name), REAL, budget=6)
    assert 0 < result.evaluations <= 6
    for trial in result.trials:
        if cuts_operators(REAL, trial.plan):
            assert not list(list_operator_violations(REAL, trial.plan))
        else:
            assert trial.plan == complete(REAL, recover_layout(REAL, trial.plan))
        timeline = simulate(lower(REAL, trial.plan))
        assert trial.evaluation.step_time == timeline.step_time
        assert trial.evaluation.peak_memory == timeline.peak_memory
        assert trial.evaluation == SimulatedCost(REAL).evaluate(trial.plan)
