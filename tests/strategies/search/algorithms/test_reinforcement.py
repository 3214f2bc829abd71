import json
from collections import Counter
from statistics import mean

import pytest
import torch

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search.algorithms import ALGORITHMS, list_installed
from meshwise.strategies.search.algorithms.policy import Policy, draw, read_operators
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.algorithms.reinforcement import Reinforcement
from meshwise.strategies.search.decisions import Branch, DecisionTree
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ...problems import problem
from ..small_problems import FakeCost, small_problem
from .test_mcts import Unbounded, needed

PROBLEM = small_problem()
SPACE = Space(recompute=("none",), zero=(0,))  # type: ignore[arg-type]


def policy(seed: int = 0, learning_rate: float = 0.01) -> Policy:
    return Policy(PROBLEM, torch.Generator().manual_seed(seed), learning_rate)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_makes_the_better_of_two_plans_more_likely(seed: int) -> None:
    tree = DecisionTree(
        PROBLEM,
        Space(
            data=(2,),
            tensor=(2,),
            microbatch=(1,),
            schedule=("1f1b",),
            zero=(0,),
            sequence_parallel=(False,),
            recompute=("none", "full"),
        ),
    )  # type: ignore[arg-type]
    row = tree.list_branches(tree.root)
    assert [branch.values[0] for branch in row] == ["none", "full"]
    learner = policy(seed)
    before = torch.zeros(1, len(learner.find_features(row[0])))

    def chances() -> torch.Tensor:
        return learner.logits(learner.embed(), before, [row]).softmax(1)[0]

    old = chances().detach()
    learner.learn(-(1.0 * chances()[0].log() - 1.0 * chances()[1].log()))  # advantages 1 and -1
    assert chances()[0] > old[0]
    assert float(chances().detach().sum()) == pytest.approx(1)


def test_what_is_illegal_or_was_visited_is_never_drawn() -> None:
    tree, learner = DecisionTree(PROBLEM, SPACE), policy()
    every = list(layouts(PROBLEM, SPACE))
    closed = set(every[::2])
    for end in draw(learner, tree, 400).ends:
        assert end.layout in every
    for layout in closed:
        tree.close_layout(layout)
    drawn = Counter(end.layout for end in draw(learner, tree, 600).ends)
    assert set(drawn) <= set(every) - closed
    assert len(drawn) > len(every) / 6


def test_probabilities_of_walks_are_those_of_their_decisions() -> None:
    tree = DecisionTree(PROBLEM, Space(data=(2,), tensor=(2,), microbatch=(1,), sequence_parallel=(False,), zero=(0,)))
    walks = draw(policy(), tree, 4000)
    likely = {
        end.layout: float(each) for end, each in zip(walks.ends, walks.log_probability.detach().exp(), strict=True)
    }
    drawn = Counter(end.layout for end in walks.ends)
    assert sum(likely.values()) == pytest.approx(1, abs=1e-4)  # all of them were drawn
    assert all(drawn[each] / 4000 == pytest.approx(likely[each], abs=0.04) for each in likely)


@pytest.mark.parametrize("seed", range(2))
def test_a_small_space_is_visited_in_full_and_then_it_ends(seed: int) -> None:
    costs = Unbounded(seed=seed, capacity=0.6)
    result = search(Reinforcement(seed), PROBLEM, SPACE, costs=costs)
    plans = [complete(PROBLEM, layout) for layout in layouts(PROBLEM, SPACE)]
    assert {trial.plan for trial in result.trials} == set(filter(costs.fits, plans))
    assert result.gap == 0


def test_it_needs_fewer_evaluations_than_random_draws() -> None:
    seeds = range(2)
    ours, random = (mean(needed(kind(seed), seed) for seed in seeds) for kind in (Reinforcement, RandomSearch))
    assert ours < random / 3


def test_it_leaves_torch_as_it_was() -> None:
    torch.manual_seed(3)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    search(Reinforcement(), PROBLEM, SPACE, costs=FakeCost(), budget=10)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_operators_are_joined_by_what_flows() -> None:
    graph = problem(devices=2, layers=2, batch=2).graph
    rows, edges = read_operators(graph)
    assert len(rows) == sum(len(block.operators) for block in graph.blocks)
    assert len({len(row) for row in rows}) == 1
    assert edges
    assert all(producer < consumer < len(rows) for producer, consumer in edges)
    blocks = [index for index, block in enumerate(graph.blocks) for _ in block.operators]
    assert any(blocks[producer] != blocks[consumer] for producer, consumer in edges)


def test_features_tell_values_and_sizes_apart() -> None:
    learner, after = policy(), DecisionTree(PROBLEM, SPACE).root
    two, four = (learner.find_features(Branch(("tensor",), (degree,), after)) for degree in (2, 4))
    assert not torch.equal(two, four)
    assert float(two[-1]) < float(four[-1])  # log10(3) and log10(5)
    assert not torch.equal(two, learner.find_features(Branch(("pipeline",), (2,), after)))


def test_without_torch_the_message_names_the_extra(monkeypatch, capsys) -> None:
    from meshwise.scenarios.commands.main import run

    monkeypatch.setattr("meshwise.strategies.search.algorithms.reinforcement.find_spec", lambda name: None)
    assert run(["search", "local/dp2", "--algorithm", "reinforcement", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or json.loads(captured.out)
    assert "needs torch, which is not installed; pip install 'meshwise[exec]'" in captured.err


def test_without_torch_a_comparison_of_all_leaves_it_out(monkeypatch) -> None:
    packages: set[str] = {"torch", "optuna"}
    monkeypatch.setattr("meshwise.strategies.search.algorithms.find_spec", lambda name: name in packages or None)
    assert list_installed() == tuple(ALGORITHMS)
    packages.remove("torch")
    assert list_installed() == tuple(name for name in ALGORITHMS if name != "reinforcement")


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"evaluations": 33}, {"learning_rate": 0.0}, {"entropy": -1.0}, {"memory": 1.0}, {"risk": 0.0}],
)
def test_hyper_parameters_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"reinforcement: .* met"):
        Reinforcement(**wrong)  # type: ignore[arg-type]
