import pytest

from strategies.explanation.machine_part import machine_parts
from strategies.explanation.ranking import fits
from strategies.explanation.sensitivity import NEARER, memory_sensitivity, sensitivity

from .cases import CRAMPED, RANKED, brute_force, on

MEMORY = CRAMPED.cluster.accelerator.memory
PARTS = machine_parts(CRAMPED.cluster, "fp32")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_plan_is_the_best_inside_its_region_and_not_outside(part) -> None:
    best = RANKED.fastest(fits)
    assert best is not None
    found = sensitivity(RANKED, best.plan, part)
    for outcome in found.outcomes:
        fastest = brute_force(on(part.scaled(outcome.factor)), MEMORY)[0][0]
        assert outcome.best is not None and outcome.best.evaluation.step_time == fastest
        assert outcome.stays == (outcome.step_time <= fastest * (1 + 1e-9))
        assert outcome.loses == pytest.approx(max(outcome.step_time / fastest - 1, 0), abs=1e-9)
    for edge, further, ended in zip(found.region, (1 - 2 * NEARER, 1 + 2 * NEARER), found.reached, strict=True):
        machine = RANKED.on(part.scaled(edge), edge)
        inside = machine.fastest(fits)
        assert inside is not None and machine.step_time(best.plan) <= inside.evaluation.step_time * (1 + 1e-9)
        if not ended:
            machine = RANKED.on(part.scaled(edge * further), edge * further)
            outside = machine.fastest(fits)
            assert outside is not None and machine.step_time(best.plan) > outside.evaluation.step_time


def test_the_region_of_memory_is_from_what_a_plan_needs_to_what_a_faster_one_needs() -> None:
    best = RANKED.fastest(fits)
    assert best is not None
    found = memory_sensitivity(RANKED, best, "")
    faster = [memory for time, memory in brute_force(CRAMPED, float("inf")) if time < best.evaluation.step_time]
    assert found.region == (best.evaluation.peak_memory / MEMORY, min(faster) / MEMORY)
    less, more = found.outcomes
    assert less.step_time is None and less.loses is None and not less.stays
    assert more.best is not None and more.best.evaluation.step_time == brute_force(CRAMPED, MEMORY * 1.2)[0][0]
