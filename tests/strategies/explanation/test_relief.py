from dataclasses import replace

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.relief import list_reliefs
from meshwise.strategies.explanation.shortfall import find_shortfall
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, StageRecompute

from ..problems import IDEAL, problem
from ..tables.recommender import recommender

LAYOUT = Layout(data=4, microbatch=4)


def cramped(needs: float) -> Problem:
    """Return a problem whose devices have some part of the memory that the layout needs."""
    own = problem(devices=4, layers=6, precision="bf16")
    peak = SimulatedCost(own).peak_memory(complete(own, LAYOUT))
    return problem(devices=4, layers=6, precision="bf16", accelerator=replace(IDEAL, memory=needs * peak))


@pytest.mark.parametrize("part", [0.999, 0.99, 0.97, 0.95])
def test_every_change_fits_when_it_is_simulated_again_and_the_plan_itself_does_not(part: float) -> None:
    own = cramped(part)
    assert not SimulatedCost(own).fits(complete(own, LAYOUT))
    found = list_reliefs(own, [LAYOUT], count=20)
    assert found
    assert list(found) == sorted(found, key=lambda each: (each.changes_machine, each.cost, each.change))
    for each in found:
        if each.changes_machine or "gradients in" in each.change:
            continue
        again = SimulatedCost(own).evaluate(each.plan)
        assert again.fits
        assert (again.step_time, again.peak_memory) == (each.step_time, each.peak_memory)
    assert len(list_reliefs(own, [LAYOUT])) == min(3, len(found))


def test_changes_are_named() -> None:
    names = {each.change for each in list_reliefs(cramped(0.999), [LAYOUT], count=20)}
    assert {"gradients in bf16, less exact in sums", "ZeRO-1", "optimizer offloaded to hosts"} <= names
    assert any(name.startswith("devices with") for name in names)
    assert any("nodes" in name for name in names)


def test_a_plan_that_recomputes_all_is_not_told_to() -> None:
    own = cramped(0.95)
    names = {each.change for each in list_reliefs(own, [replace(LAYOUT, recompute=Recompute.FULL)], count=20)}
    assert not any("recompute" in name for name in names)


def test_no_usual_recomputation_that_fits_is_faster_than_the_one_that_is_told() -> None:
    # a plan that lacks little is not told to recompute everything: a part of its layers is enough
    own = cramped(0.99)
    costs = SimulatedCost(own)
    (told,) = (each for each in list_reliefs(own, [LAYOUT], count=20) if "recompute" in each.change)
    usual: list[StageRecompute] = [*Recompute, *(FirstLayers(Recompute.FULL, layers) for layers in (2, 3, 5))]
    plans = [complete(own, replace(LAYOUT, recompute=recompute)) for recompute in usual]
    times = [costs.evaluate(plan).step_time for plan in plans if costs.fits(plan)]
    assert told.step_time <= min(times) < costs.evaluate(plans[list(Recompute).index(Recompute.FULL)]).step_time


def test_what_lacks_adds_up() -> None:
    own = cramped(0.95)
    found = find_shortfall(own, complete(own, LAYOUT))
    assert found.missing_memory == found.needed_memory - found.usable_memory > 0
    assert sum(size for _, size in found.memory_by_kind) == found.needed_memory
    assert found.needed_memory == SimulatedCost(own).peak_memory(complete(own, LAYOUT))
    assert found.stages == (0,)
    assert "microbatch" in found.activity or found.activity


def test_changes_that_help_only_together_are_tried_together() -> None:
    # memory between what two changes need and what either alone does: neither sharing, recomputing nor microbatches fit
    own = problem(devices=4, layers=6, precision="bf16")
    layout = replace(LAYOUT, zero=0)
    peaks = {
        zero: {
            recompute: SimulatedCost(own).peak_memory(complete(own, replace(layout, zero=zero, recompute=recompute)))
            for recompute in (Recompute.NONE, Recompute.FULL)
        }
        for zero in (0, 3)
    }
    both, shared, recomputed = peaks[3][Recompute.FULL], peaks[3][Recompute.NONE], peaks[0][Recompute.FULL]
    assert both < min(shared, recomputed)
    room = replace(IDEAL, memory=(both + min(shared, recomputed)) / 2)
    tight = problem(devices=4, layers=6, precision="bf16", accelerator=room)
    found = list_reliefs(tight, [layout], count=20)
    (together,) = (each for each in found if each.change.startswith("ZeRO-3, "))
    assert SimulatedCost(tight).evaluate(together.plan).fits
    assert together.plan.zero == 3


def test_tables_that_fit_no_device_are_told_to_be_shared() -> None:
    own = recommender(accelerator=replace(IDEAL, memory=60e6), rows=(3_000_000, 2_000_000), hots=(3, 1))
    names = {each.change for each in list_reliefs(own, [Layout(data=4, microbatch=8)], count=20)}
    assert "embedding tables on hosts" in names
    assert not any("tables" in each.change for each in list_reliefs(cramped(0.95), [LAYOUT], count=20))
