from meshwise.strategies.explanation.alternatives import alternatives, differing, runner_up
from meshwise.strategies.explanation.ranking import fits

from .cases import CRAMPED, RANKED, brute_force

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
