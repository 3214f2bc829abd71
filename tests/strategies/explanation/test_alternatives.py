"""Plans beside the fastest: the runner-up, and the one that is best where a step may take longer than predicted."""

from math import inf

import pytest

from meshwise.strategies.explanation.alternatives import alternatives, differing, prospect, prospects, runner_up
from meshwise.strategies.explanation.ranking import fits
from meshwise.strategies.explanation.uncertainty import Uncertainty

from .cases import CRAMPED, RANKED, brute_force

MEMORY = RANKED.problem.cluster.accelerator.memory
# a plan lacks memory where it fills more than 1 / 1.01 of a device, surely where more than 1 / 1.001
DOUBT = Uncertainty(coverage=0.9, step_time=0.5, peak_memory=1e-9, reserved=(1.001, 1.0055, 1.01))


@pytest.mark.parametrize("most", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_the_best_at_a_quantile_is_that_of_all_plans(quantile: float, most: float) -> None:
    every = [prospect(RANKED.problem, trial, DOUBT, quantile, most) for trial in RANKED.ascending(fits)]
    found = list(prospects(RANKED, DOUBT, quantile, most))
    best = min((each.quantile for each in every if each.allowed), default=inf)
    assert min((each.quantile for each in found if each.allowed), default=inf) == best
    assert found == every[: len(found)]


def test_a_plan_that_may_lack_memory_takes_longer_at_a_quantile_and_for_ever_beyond() -> None:
    trial = RANKED.fastest(fits)
    assert trial is not None
    lacks = prospect(RANKED.problem, trial, DOUBT, 0.5, 1.0).out_of_memory
    room = MEMORY / trial.evaluation.peak_memory
    assert lacks == pytest.approx(1 - (room - 1.001) / 0.009, abs=1e-6)
    assert 0.5 < lacks < 1  # the fastest plan fills 99.8 % of a device
    assert prospect(RANKED.problem, trial, DOUBT, 0.9 * (1 - lacks), 1.0).quantile == pytest.approx(
        DOUBT.step_time_quantile(trial.evaluation.step_time, 0.9)
    )
    assert prospect(RANKED.problem, trial, DOUBT, 1.01 * (1 - lacks), 1.0).quantile == inf
    assert not prospect(RANKED.problem, trial, DOUBT, 0.5, 0.9 * lacks).allowed


BEST = RANKED.fastest(fits)
assert BEST is not None
LAYOUT = next(each.layout for each in RANKED.candidates if RANKED.plan(each) == BEST.plan)


def test_the_runner_up_is_the_second_of_brute_force() -> None:
    found = runner_up(RANKED, BEST, LAYOUT)
    first, second = brute_force(CRAMPED, CRAMPED.cluster.accelerator.memory)[:2]
    assert found is not None
    assert found.trial.evaluation.step_time == second[0]
    assert found.margin == second[0] / first[0] - 1
    assert found.decision


def test_every_alternative_differs_in_its_decision_and_is_no_faster() -> None:
    found = list(alternatives(RANKED, BEST, LAYOUT))
    assert {each.decision for each in found} == {"mesh degrees", "microbatch", "ZeRO"}  # no other is open in this space
    of_plan = {RANKED.plan(each): each.layout for each in RANKED.candidates}
    for each in found:
        assert each.decision in differing(LAYOUT, of_plan[each.trial.plan])
        assert each.margin >= 0
        assert each.trial.evaluation.fits
