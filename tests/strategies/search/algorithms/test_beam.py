import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search.algorithms.beam import Beam
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts, neighbours

from ..small_problems import FakeCost, small_problem

PROBLEM = small_problem()
CORE = Space(core=True)
LAYOUTS = {complete(PROBLEM, layout): layout for layout in layouts(PROBLEM, CORE)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [1, 3])
def test_no_rewrite_of_a_plan_in_the_last_beam_belongs_there(width: int, seed: int) -> None:
    costs = FakeCost(seed=seed, capacity=0.7)
    result = search(Beam(width), PROBLEM, CORE, costs=costs)
    times = {trial.plan: trial.evaluation.step_time for trial in result.trials}
    beam = sorted(times, key=times.__getitem__)[:width]
    for plan in beam:
        for layout in neighbours(PROBLEM, CORE, LAYOUTS[plan]):
            rewrite = complete(PROBLEM, layout)
            assert not costs.fits(rewrite) or rewrite in times or costs.plan_bound(rewrite) >= times[beam[-1]]


def test_every_plan_but_the_first_is_a_rewrite_of_an_earlier_one() -> None:
    trials = [LAYOUTS[trial.plan] for trial in search(Beam(3), PROBLEM, CORE, costs=FakeCost(seed=1)).trials]
    assert len(trials) > 3
    for number, layout in enumerate(trials[1:], start=1):
        assert any(layout in neighbours(PROBLEM, CORE, earlier) for earlier in trials[:number])


def test_a_beam_as_wide_as_the_space_finds_the_optimum_of_what_rewrites_reach() -> None:
    for seed in range(5):
        costs = FakeCost(seed=seed)
        result = search(Beam(width=len(LAYOUTS)), PROBLEM, CORE, costs=costs)
        assert {trial.plan for trial in result.trials} == set(LAYOUTS)
        assert result.best is not None
        assert result.best.evaluation.step_time == min(map(costs.step_time, LAYOUTS))


def test_a_beam_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="beam: width is at least 1, met 0"):
        Beam(width=0)
