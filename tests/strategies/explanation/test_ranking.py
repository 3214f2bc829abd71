from dataclasses import replace
from math import inf

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation import ranking as module
from meshwise.strategies.explanation.machine_parts import machine_parts, with_memory
from meshwise.strategies.explanation.ranking import fits, ranking
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.space import Space, neighbours
from meshwise.strategies.search.starts import known_layouts

from .cases import CRAMPED, FAST, RANKED, RANKED_FAST, SPACE, brute_force

MEMORY = CRAMPED.cluster.accelerator.memory


def test_plans_come_in_the_order_of_their_step_times() -> None:
    found = [
        trial.evaluation.step_time for trial in ranking(SimulatedCost(CRAMPED), SPACE).list_ascending(lambda _: True)
    ]
    assert found == [time for time, _ in brute_force(CRAMPED, float("inf"))]
    assert len(found) == len(RANKED.candidates)


def test_the_fastest_that_fits_is_that_of_brute_force_and_few_are_simulated() -> None:
    fresh = ranking(SimulatedCost(CRAMPED), SPACE)
    best = fresh.find_fastest(fits)
    assert best is not None
    assert (best.evaluation.step_time, best.evaluation.peak_memory) == brute_force(CRAMPED, MEMORY)[0]
    assert fresh.num_simulated < len(fresh.candidates) / 4
    assert fresh.find_fastest(fits, time_limit=best.evaluation.step_time) is None


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.2, 2.0])
@pytest.mark.parametrize("part", [part.name for part in machine_parts(FAST.cluster, "fp32")])
def test_bounds_are_inherited_by_other_machines(part: str, factor: float) -> None:
    assert list(RANKED_FAST.list_ascending(lambda _: True))  # all that is known of this machine is inherited
    scaled = {each.name: each.scale_cluster for each in machine_parts(FAST.cluster, "fp32")}[part](factor)
    found = RANKED_FAST.with_costs(SimulatedCost(replace(FAST, cluster=scaled)), factor).find_fastest(fits)
    assert found is not None
    assert found.evaluation.step_time == brute_force(replace(FAST, cluster=scaled), inf)[0][0]


def test_questions_may_be_asked_while_another_is_answered() -> None:
    shared = ranking(SimulatedCost(CRAMPED), SPACE)
    first = shared.list_ascending(lambda _: True)
    begun = [next(first)]
    whole = [trial.evaluation.step_time for trial in shared.list_ascending(lambda _: True)]
    assert [trial.evaluation.step_time for trial in (*begun, *first)] == whole == sorted(whole)


def test_of_a_large_space_no_plan_one_decision_from_the_best_is_faster(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_RANKED", 0)
    ranked, costs = ranking(SimulatedCost(FAST), SPACE), SimulatedCost(FAST)
    best = ranked.find_fastest_candidate(fits)
    assert best is not None and not ranked.is_complete
    assert ranked.ranked_plans.plans == len({each.layout for each in ranked.candidates}) < ranked.ranked_plans.space
    assert ranked.ranked_plans.space == len(RANKED_FAST.candidates)
    near = [*known_layouts(FAST, SPACE), *neighbours(FAST, SPACE, best.layout)]
    assert set(near) <= {each.layout for each in ranked.candidates}
    times = [costs.evaluate(complete(FAST, layout)).step_time for layout in near]
    assert costs.evaluate(ranked.complete_candidate(best)).step_time <= min(times)


def test_the_clock_is_asked_before_every_plan_that_is_looked_at() -> None:
    asked = 0

    def left() -> float:
        nonlocal asked
        asked += 1
        return 1.0 if asked <= 20 else 0.0

    with pytest.raises(OutOfTime):
        ranking(SimulatedCost(CRAMPED), SPACE, seconds=left)
    asked = -len(RANKED.candidates)
    ranked = ranking(SimulatedCost(CRAMPED), SPACE, seconds=left)
    with pytest.raises(OutOfTime):
        list(ranked.list_ascending(lambda _: True))
    assert ranked.num_simulated < 20


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_memory_that_a_simulation_tells_is_asked_only_of_plans_whose_path_is_below_the_best(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes of two microbatches take turns, what a rank holds hangs on their times."""
    space = Space(schedule=("dualpipev", "gpipe"), zero=(0, 1), recompute=(Recompute.NONE,))
    cramped = replace(CRAMPED, cluster=with_memory(CRAMPED.cluster, lambda memory: memory * factor))
    ranked, costs = ranking(SimulatedCost(cramped), space), SimulatedCost(cramped)
    asked, peak = list[Plan](), ranked.costs.peak_memory
    monkeypatch.setattr(ranked.costs, "peak_memory", lambda plan: asked.append(plan) or peak(plan))
    best, slow = ranked.find_fastest(fits), brute_force(cramped, MEMORY * factor, space)
    assert (best and (best.evaluation.step_time, best.evaluation.peak_memory)) == (slow[0] if slow else None)
    simulated = {each.plan for each in ranked.candidates if each.needs_simulation}
    asked = [plan for plan in asked if plan in simulated]
    assert len(simulated) == 14
    assert max(costs.longest_paths(asked), default=0.0) <= (best.evaluation.step_time if best else inf)
    assert len(asked) == {0.8: 14, 1.0: 13, 1.2: 0}[factor]
