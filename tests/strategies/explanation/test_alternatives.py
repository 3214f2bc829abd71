"""Plans beside the fastest: the runner-up, and the one that is best where a step may take longer than predicted."""

from math import inf

import pytest

from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.alternatives import (
    build_prospect,
    find_runner_up,
    list_alternatives,
    list_differences,
    list_prospects,
)
from meshwise.strategies.explanation.ranking import fits
from meshwise.strategies.explanation.uncertainty import Uncertainty

from .cases import CRAMPED, RANKED, brute_force

MEMORY = RANKED.problem.cluster.accelerator.memory
# a plan lacks memory where it fills more than 1 / 1.01 of a device, surely where more than 1 / 1.001
DOUBT = Uncertainty(coverage=0.9, step_time_width=0.5, peak_memory_width=1e-9, reserved_ratios=(1.001, 1.0055, 1.01))


def estimate_risk(trial: Trial) -> float:
    return DOUBT.estimate_cluster_risk(RANKED.problem.cluster, trial.evaluation.peak_memory)


@pytest.mark.parametrize("most", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_the_best_at_a_quantile_is_that_of_all_plans(quantile: float, most: float) -> None:
    every = [build_prospect(trial, estimate_risk, DOUBT, quantile, most) for trial in RANKED.list_ascending(fits)]
    found = list(list_prospects(RANKED, estimate_risk, DOUBT, quantile, most))
    best = min((each.quantile for each in every if each.is_allowed), default=inf)
    assert min((each.quantile for each in found if each.is_allowed), default=inf) == best
    assert found == every[: len(found)]


def test_a_plan_that_may_lack_memory_takes_longer_at_a_quantile_and_for_ever_beyond() -> None:
    trial = RANKED.find_fastest(fits)
    assert trial is not None
    lacks = build_prospect(trial, estimate_risk, DOUBT, 0.5, 1.0).out_of_memory
    room = MEMORY / trial.evaluation.peak_memory
    assert lacks == pytest.approx(1 - (room - 1.001) / 0.009, abs=1e-6)
    assert 0.5 < lacks < 1  # the fastest plan fills 99.8 % of a device
    assert build_prospect(trial, estimate_risk, DOUBT, 0.9 * (1 - lacks), 1.0).quantile == pytest.approx(
        DOUBT.step_time_quantile(trial.evaluation.step_time, 0.9)
    )
    assert build_prospect(trial, estimate_risk, DOUBT, 1.01 * (1 - lacks), 1.0).quantile == inf
    assert not build_prospect(trial, estimate_risk, DOUBT, 0.5, 0.9 * lacks).is_allowed


BEST = RANKED.find_fastest(fits)
assert BEST is not None
LAYOUT = next(each.layout for each in RANKED.candidates if RANKED.complete_candidate(each) == BEST.plan)


def test_the_runner_up_is_the_second_of_brute_force() -> None:
    found = find_runner_up(RANKED, BEST, LAYOUT)
    first, second = brute_force(CRAMPED, CRAMPED.cluster.accelerator.memory)[:2]
    assert found is not None
    assert found.trial.evaluation.step_time == second[0]
    assert found.margin == second[0] / first[0] - 1
    assert found.topic


def test_every_alternative_differs_in_its_decision_and_is_no_faster() -> None:
    found = list(list_alternatives(RANKED, BEST, LAYOUT))
    assert {each.topic for each in found} == {"mesh degrees", "microbatch", "ZeRO"}  # no other is open in this space
    of_plan = {RANKED.complete_candidate(each): each.layout for each in RANKED.candidates}
    for each in found:
        assert each.topic in list_differences(LAYOUT, of_plan[each.trial.plan])
        assert each.margin >= 0
        assert each.trial.evaluation.fits
