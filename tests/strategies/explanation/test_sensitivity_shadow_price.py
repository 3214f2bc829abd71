from dataclasses import replace

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.machine_parts import machine_parts
from meshwise.strategies.explanation.ranking import fits, ranking
from meshwise.strategies.explanation.sensitivity import find_next_memory, price_of_memory, prices_of_rates
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ..problems import IDEAL, problem
from .cases import CRAMPED, RANKED, brute_force


def test_one_device_that_only_computes_pays_for_flop_and_bytes_alone() -> None:
    # T = work / rate: 1 % more of FLOP/s and of memory bandwidth save T - T / 1.01 together, but for the few operators
    # that are bound by both alike, which gain from neither alone
    alone = problem(devices=1, launch=0.0)
    plan = complete(alone, Layout(microbatch=4))
    ranked = ranking(SimulatedCost(alone))
    prices = {
        each.resource: each.saved_seconds
        for each in prices_of_rates(ranked, plan, machine_parts(alone.cluster, "fp32"))
    }
    assert set(prices) == {"FLOP/s", "memory bandwidth"}
    time = ranked.step_time(plan)
    assert sum(prices.values()) == pytest.approx(time - time / 1.01, rel=1e-3)
    assert sum(prices.values()) <= time - time / 1.01
    assert min(prices.values()) > 0


def test_the_price_of_a_link_is_what_its_bytes_take() -> None:
    # an infinitely fast machine but for its links without latency: the whole step is theirs
    fast = replace(IDEAL, peak_flops=(("fp32", 1e24),), memory_bandwidth=1e24)
    wired = problem(devices=4, accelerator=fast, bandwidth=1e6)
    plan = complete(wired, Layout(data=4))
    ranked = ranking(SimulatedCost(wired))
    prices = {
        each.resource: each.saved_seconds
        for each in prices_of_rates(ranked, plan, machine_parts(wired.cluster, "fp32"))
    }
    time = ranked.step_time(plan)
    assert prices["links inside a node"] == pytest.approx(time - time / 1.01, rel=1e-3)
    assert prices["FLOP/s"] == pytest.approx(0, abs=1e-9 * time)


def test_memory_is_worth_what_a_better_plan_saves_that_fits_then() -> None:
    best = RANKED.find_fastest(fits)
    assert best is not None
    memory = CRAMPED.cluster.accelerator.memory
    for more in (1.0, 2e5, 1e9):
        faster, _ = brute_force(CRAMPED, memory + more)[0]
        price = price_of_memory(RANKED, best, more)
        assert price.saved_seconds == best.evaluation.step_time - faster
        assert (price.plan is None) == (price.saved_seconds == 0)


def test_the_next_larger_memory_is_the_least_with_which_any_plan_is_faster() -> None:
    best, found = RANKED.find_fastest(fits), None
    assert best is not None
    found = find_next_memory(RANKED, best)
    faster = [each for each in brute_force(CRAMPED, float("inf")) if each[0] < best.evaluation.step_time]
    assert found is not None and faster
    assert found.evaluation.peak_memory == min(memory for _, memory in faster)
