from dataclasses import replace
from math import inf

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.lost_devices import replan
from meshwise.strategies.explanation.ranking import fits, ranking
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.search.space import Space

from ..problems import IDEAL, problem

SPACE = Space(schedule=("1f1b",), sequence_parallel=(False,), zero=(0, 1))
OWN = problem(devices=4, layers=6, batch=12, bandwidth=1e8)
RANKED = ranking(SimulatedCost(OWN), SPACE)
BEST = RANKED.find_fastest(fits)
assert BEST is not None
LAYOUT = next(each.layout for each in RANKED.candidates if RANKED.complete_candidate(each) == BEST.plan)


@pytest.mark.parametrize("bandwidth", [1e8, 3e8, 1e9, 2e9, 4e9])
def test_the_best_plan_on_any_part_of_the_devices_that_are_left(bandwidth: float) -> None:
    whole = problem(devices=4, layers=6, batch=8, bandwidth=bandwidth)  # 3 replicas do not divide the batch
    found = replan(whole, SPACE, complete(whole, LAYOUT), LAYOUT, 1, lambda: inf)
    sizes = {devices: replace(whole, cluster=whole.cluster.with_size(1, devices)) for devices in (1, 2, 3)}
    times = {devices: ranking(SimulatedCost(own), SPACE).find_fastest(fits) for devices, own in sizes.items()}
    fastest = min(each.evaluation.step_time for each in times.values() if each)
    assert found.best is not None and found.best.trial.evaluation.step_time == fastest
    assert (found.num_lost, found.num_left, found.is_proven) == (1, 3, True)
    if found.fewest_moves is not None:
        assert found.fewest_moves.trial.evaluation.step_time >= fastest
        assert found.fewest_moves.trial.plan.pipeline == LAYOUT.pipeline


def test_break_even_is_the_extra_migration_over_what_a_step_gains() -> None:
    # 4 replicas become 3, for 3 divides the batch of 12; a slow network makes that no good plan
    wide = Layout(data=4)
    found = replan(OWN, SPACE, complete(OWN, wide), wide, 1, lambda: inf)
    assert found.best is not None and found.fewest_moves is not None and found.break_even is not None
    assert found.fewest_moves.trial.plan.data == 3
    extra = found.best.migration.seconds - found.fewest_moves.migration.seconds
    gain = found.fewest_moves.trial.evaluation.step_time - found.best.trial.evaluation.step_time
    assert found.break_even == pytest.approx(max(extra, 0) / gain)


def test_fewer_ranks_that_lack_memory_have_smaller_microbatches() -> None:
    # four ranks share all states and have room for four samples at once; two keep twice as much of them
    own = problem(devices=4, layers=6, batch=16)
    layout = Layout(data=4, zero=3, microbatch=4)
    costs = SimulatedCost(own)
    memory = costs.peak_memory(complete(own, layout))
    tight = problem(devices=4, layers=6, batch=16, accelerator=replace(IDEAL, memory=memory))
    half = replace(tight, cluster=tight.cluster.with_size(1, 2))
    fewer = [replace(layout, data=2, microbatch=size) for size in (4, 2, 1)]
    fit = [SimulatedCost(half).fits(complete(half, each)) for each in fewer]
    assert not fit[0] and any(fit)
    found = replan(tight, SPACE, complete(tight, layout), layout, 2, lambda: inf)
    assert found.fewest_moves is not None
    assert found.fewest_moves.trial.plan.microbatch == (4, 2, 1)[fit.index(True)]


def test_no_time_is_no_proof() -> None:
    found = replan(OWN, SPACE, BEST.plan, LAYOUT, 1, lambda: 0.0)
    assert (found.best, found.sizes, found.is_proven) == (None, (), False)


@pytest.mark.parametrize("lost", [0, 4, 9])
def test_some_devices_are_left(lost: int) -> None:
    with pytest.raises(ValueError, match=f"lie between 1 and 3, met {lost}; nearest"):
        replan(OWN, SPACE, BEST.plan, LAYOUT, lost, lambda: inf)


def test_of_a_space_that_is_not_ranked_as_a_whole_the_best_plan_is_the_search_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the only plan that people know is the slowest, and none one decision away is looked at."""
    own = problem(devices=4, layers=6, batch=8, bandwidth=4e9)
    parts = {devices: replace(own, cluster=own.cluster.with_size(1, devices)) for devices in (1, 2)}
    times = {devices: list(ranking(SimulatedCost(part), SPACE).list_ascending(fits)) for devices, part in parts.items()}
    fastest = {devices: row[0].evaluation.step_time for devices, row in times.items()}
    assert fastest[2] < fastest[1] and fastest[2] < times[2][-1].evaluation.step_time
    slowest = {devices: recover_layout(part, times[devices][-1].plan) for devices, part in parts.items()}
    monkeypatch.setattr("meshwise.strategies.explanation.ranking.MOST_RANKED", 0)
    monkeypatch.setattr(
        "meshwise.strategies.explanation.ranking.known_layouts",
        lambda problem, space: (*space.starts, slowest[problem.cluster.num_devices]),
    )
    monkeypatch.setattr("meshwise.strategies.explanation.ranking.neighbours", lambda problem, space, layout: ())
    found = replan(own, SPACE, complete(own, LAYOUT), LAYOUT, 2, lambda: inf)
    assert found.best is not None and not found.is_complete
    assert found.best.trial.evaluation.step_time == fastest[2]
