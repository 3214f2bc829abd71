"""Wide spaces: who lists them says so, who does not draws from all of them alike."""

from collections import Counter
from itertools import islice
from random import Random

import pytest

from meshwise.strategies.search import space as spaces
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS
from meshwise.strategies.search.algorithms.random import draw_layouts, permute_range
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
LISTING = (
    "breadth_first",
    "beam",
    "mcmc",
    "simulated_annealing",
    "mcts",
    "reinforcement",
    "tpe",
    "expert",
    "bottleneck",
)


@pytest.mark.parametrize("name", LISTING)
def test_a_space_too_large_to_list_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = sum(1 for _ in layouts(PROBLEM))
    algorithm = LAYOUT_ALGORITHMS[name]()  # its module is imported while the limit is its own
    monkeypatch.setattr(spaces, "MOST_LISTED", number - 1)
    with pytest.raises(ValueError, match=rf"at most {number - 1:,}, met {number:,}; nearest: limits, or best_first"):
        search(algorithm, PROBLEM, costs=FakeCost())


@pytest.mark.parametrize("name", ["best_first", "genetic", "random", "exhaustive"])
def test_others_need_no_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "MOST_LISTED", 0)
    assert search(LAYOUT_ALGORITHMS[name](), PROBLEM, costs=FakeCost(), budget=3).evaluations


def test_every_layout_is_drawn_once() -> None:
    for space in (Space(), Space(wide=True, microbatch=(1,), zero=(0, 1))):
        found = list(draw_layouts(PROBLEM, space, Random(3)))
        assert len(found) == len(set(found))
        assert set(found) == set(layouts(PROBLEM, space))


def test_a_permutation_is_uniform() -> None:
    # 24 orders of 4, 6,000 draws: 250 each, with a deviation of sqrt(6000 * 1/24 * 23/24) = 15.5
    seen = Counter(tuple(permute_range(4, Random(seed))) for seed in range(6000))
    assert len(seen) == 24
    assert all(abs(count - 250) < 5 * 15.5 for count in seen.values())


def test_few_of_a_huge_range_cost_little() -> None:
    assert len(set(islice(permute_range(10**12, Random(0)), 1000))) == 1000
