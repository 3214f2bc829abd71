from dataclasses import replace
from math import inf

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.machine_parts import MachinePart, machine_parts, with_host_memory, with_memory
from meshwise.strategies.explanation.ranking import Ranking, fits, ranking
from meshwise.strategies.explanation.sensitivity import (
    EDGE_TOLERANCE,
    REGION_FACTOR,
    fits_with,
    memory_sensitivity,
    sensitivity,
)
from meshwise.strategies.search.choices import list_offloadings

from .cases import CRAMPED, FAST, RANKED, RANKED_FAST, SPACE, brute_force

MEMORY = CRAMPED.cluster.accelerator.memory


def _rank_on(part: MachinePart, factor: float) -> Ranking:
    return RANKED_FAST.with_costs(SimulatedCost(replace(FAST, cluster=part.scale_cluster(factor))), factor)


@pytest.mark.parametrize("part", machine_parts(FAST.cluster, "fp32"), ids=lambda part: part.name)
def test_a_plan_is_the_best_inside_its_region_and_not_outside(part) -> None:
    best = RANKED_FAST.find_fastest(fits)
    assert best is not None
    found = sensitivity(RANKED_FAST, best.plan, part)
    assert [outcome.factor for outcome in found.outcomes] == [0.8, 1.2]  # a fifth slower, and faster
    for outcome in found.outcomes:
        fastest = brute_force(replace(FAST, cluster=part.scale_cluster(outcome.factor)), inf)[0][0]
        assert outcome.best is not None and outcome.best.evaluation.step_time == fastest
        assert outcome.stays == (outcome.step_time <= fastest * (1 + 2e-6))
        assert outcome.loses == pytest.approx(max(outcome.step_time / fastest - 1, 0), abs=2e-6)
    for edge, further, end, ended in zip(
        found.region, (1 - 2 * EDGE_TOLERANCE, 1 + 2 * EDGE_TOLERANCE), (1 / 1.5, 1.5), found.is_open_ended, strict=True
    ):
        assert (edge == end) == ended
        machine = _rank_on(part, edge)
        inside = machine.find_fastest(fits)
        assert inside is not None and machine.step_time(best.plan) <= inside.evaluation.step_time * (1 + 2e-6)
        if not ended:
            machine = _rank_on(part, edge * further)
            outside = machine.find_fastest(fits)
            assert outside is not None and machine.step_time(best.plan) > outside.evaluation.step_time


def test_somewhere_another_plan_wins() -> None:
    best = RANKED_FAST.find_fastest(fits)
    assert best is not None
    parts = {part.name: part for part in machine_parts(FAST.cluster, "fp32")}
    found = sensitivity(RANKED_FAST, best.plan, parts["FLOP/s"])
    assert not all(found.is_open_ended)
    assert 1 / REGION_FACTOR <= found.region[0] <= 1 <= found.region[1] <= REGION_FACTOR


def test_the_region_of_memory_is_from_what_a_plan_needs_to_what_a_faster_one_needs() -> None:
    best = RANKED.find_fastest(fits)
    assert best is not None
    found = memory_sensitivity(RANKED, best, "")
    faster = [memory for time, memory in brute_force(CRAMPED, float("inf")) if time < best.evaluation.step_time]
    assert found.region == (best.evaluation.peak_memory / MEMORY, min(faster) / MEMORY)
    assert found.is_open_ended == (False, False)
    less, more = found.outcomes
    assert (less.factor, more.factor) == (0.8, 1.2)
    assert more.step_time == best.evaluation.step_time
    assert less.step_time is None and less.loses is None and not less.stays
    assert more.best is not None and more.best.evaluation.step_time == brute_force(CRAMPED, MEMORY * 1.2)[0][0]


def test_more_memory_is_looked_for_up_to_half_more_where_no_plan_is_faster() -> None:
    best = RANKED_FAST.find_fastest(fits)  # which all plans do
    assert best is not None
    found = memory_sensitivity(RANKED_FAST, best, "")
    assert found.region == (best.evaluation.peak_memory / FAST.cluster.accelerator.memory, 1.5)
    assert found.is_open_ended == (False, True)
    assert [(outcome.factor, outcome.stays) for outcome in found.outcomes] == [(0.8, True), (1.2, True)]


@pytest.mark.parametrize("factor", [0.8, 0.999])
def test_with_other_memory(factor: float) -> None:
    found = RANKED.find_fastest(fits_with(CRAMPED, lambda memory: memory * factor))
    slow = brute_force(CRAMPED, MEMORY * factor)
    assert (found and found.evaluation.step_time) == (slow[0][0] if slow else None)


@pytest.mark.parametrize("host_memory", [1e3, 1e12])
def test_more_memory_of_devices_helps_no_plan_that_its_hosts_have_no_room_for(host_memory: float) -> None:
    cluster = with_host_memory(CRAMPED.cluster, lambda memory: host_memory)
    own = replace(CRAMPED, cluster=cluster)
    space = replace(SPACE, offload=list_offloadings())
    ranked = ranking(SimulatedCost(own), space)
    allowed = fits_with(own, lambda memory: memory * 2)
    larger = SimulatedCost(replace(own, cluster=with_memory(cluster, lambda memory: memory * 2)))
    found = [allowed(candidate) for candidate in ranked.candidates]
    assert found == [larger.fits(candidate.plan) for candidate in ranked.candidates]
    offloaded = [fits for candidate, fits in zip(ranked.candidates, found, strict=True) if candidate.layout.offload]
    assert offloaded and any(offloaded) is (host_memory > 1e6) and any(found)
