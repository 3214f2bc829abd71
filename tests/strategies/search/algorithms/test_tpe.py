import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms import ALGORITHMS, list_installed
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.algorithms.tpe import TPE, ParameterNames, draw_layout
from meshwise.strategies.search.decisions import DecisionTree
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ..small_problems import FakeCost, small_problem
from .test_genetic import find_gap

optuna = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[4]
PROBLEM = small_problem()
SPACE = Space(recompute=("none",), zero=(0,))


def test_a_trial_walks_to_a_legal_layout_and_parameters_are_conditional() -> None:
    tree, names = DecisionTree(PROBLEM, Space()), ParameterNames()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    every = set(layouts(PROBLEM))
    parameters = []
    for _ in range(60):
        trial = study.ask()
        layout = draw_layout(trial, tree, names)
        assert layout in every
        fields = {name.split()[0] for name in trial.params}
        assert "schedule" not in fields or layout.pipeline > 1  # decided only where there is a choice
        assert "sequence_parallel" not in fields or layout.tensor > 1
        parameters.append(fields)
    assert any("schedule" in fields for fields in parameters)
    # a name has one set of choices: optuna refuses any other
    assert len(set(names.values())) == len(names)


SEARCHED = """
from meshwise.strategies.search.algorithms.tpe import TPE
from meshwise.strategies.search.simulated_search import search
from tests.strategies.search.small_problems import FakeCost, small_problem

for trial in search(TPE(seed=3), small_problem(), costs=FakeCost(capacity=0.6), budget=30).trials:
    print(trial.plan.describe())
"""


def test_the_same_seed_gives_the_same_trials_under_any_hash_seed_long_after_the_start() -> None:
    found = set()
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SEARCHED], env=environment, capture_output=True, check=True)
        assert done.stderr == b""
        found.add(done.stdout)
    (text,) = found
    assert len(text.splitlines()) == 30 > TPE().startup


@pytest.mark.parametrize("seed", range(2))
def test_a_small_space_is_visited_in_full_and_then_it_ends(seed: int) -> None:
    costs = FakeCost(seed=seed, capacity=0.6)
    space = Space(core=True, recompute=("none",), zero=(0,), microbatch=(1, 2))
    result = search(TPE(seed), PROBLEM, space, costs=costs)
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, space)]
    assert {trial.plan for trial in result.trials} == set(filter(costs.fits, plans)) == set(costs.evaluated)
    assert result.considered == len(plans)


def test_it_is_nearer_to_the_optimum_than_random_draws() -> None:
    seeds = range(4)
    assert fmean(find_gap(TPE(seed), seed) for seed in seeds) < 0.7 * fmean(
        find_gap(RandomSearch(seed), seed) for seed in seeds
    )


class Divided(FakeCost):
    """Memory that model parallelism divides; what fits is all as fast, and slower than the 1 s of what does not."""

    def peak_memory(self, plan: Plan) -> float:
        return 1 / (plan.tensor * plan.pipeline)

    def step_time(self, plan: Plan) -> float:
        return 100.0


def test_it_learns_from_what_does_not_fit() -> None:
    costs = Divided(capacity=0.2)
    result = search(TPE(), PROBLEM, costs=costs, budget=30)
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM)]
    share = sum(map(costs.fits, plans)) / len(plans)
    assert share < 0.5
    assert result.evaluations / result.considered > 1.3 * share


def test_it_leaves_optuna_as_it_was_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    search(TPE(), PROBLEM, SPACE, costs=FakeCost(), budget=15)
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert capfd.readouterr() == ("", "")


def test_without_optuna_the_message_names_the_extra(monkeypatch, capsys) -> None:
    from meshwise.scenarios.commands.main import run

    monkeypatch.setattr("meshwise.strategies.search.algorithms.tpe.find_spec", lambda name: None)
    assert run(["search", "local/dp2", "--algorithm", "tpe", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or json.loads(captured.out)
    assert "needs optuna, which is not installed; pip install 'meshwise[tpe]'" in captured.err


def test_without_optuna_a_comparison_of_all_leaves_it_out(monkeypatch) -> None:
    monkeypatch.setattr("meshwise.strategies.search.algorithms.find_spec", lambda name: name != "optuna" or None)
    assert list_installed() == tuple(name for name in ALGORITHMS if name != "tpe")


@pytest.mark.parametrize("wrong", [{"startup": 0}, {"candidates": 0}])
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tpe: .* met"):
        TPE(**wrong)
