"""Intervals of predictions: half-widths by hand, machines that were not timed, and the margin of memory."""

import json
from dataclasses import replace
from importlib.resources import files
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import load
from meshwise.scenarios.fitting import describe_room, explain_shortfall
from meshwise.scenarios.intervals import (
    FIGURES,
    FIRST_THAT_FITS,
    RISK,
    Category,
    build_uncertainty,
    describe_peak_runs,
    find_category,
    memory_margin,
    peak_memory_interval,
    step_time_interval,
    with_margin,
)
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.simulator.catalog import accelerator, cluster, list_timed_products
from meshwise.simulator.machine.kernels import MatmulModel
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout


@pytest.mark.parametrize("preset", ["dgx-a100-80gb", "dgx-h100", "dgx-b200", "dgx-b300", "dgx-1-v100-32gb"])
def test_timed_accelerators_and_their_relatives(preset: str) -> None:
    machine = cluster(preset, 2)
    assert find_category(machine, ()) is Category.STATED
    assert find_category(machine, ("other", f"recompute none, micro_batch 1: {FIRST_THAT_FITS}")) is Category.OPEN


@pytest.mark.parametrize("preset", ["tpu-v4", "tpu-v5e", "atlas-800t-a2", "mi300x-8", "gaudi2-8"])
def test_accelerators_of_data_sheets_are_not_timed_whatever_else_is_known(preset: str) -> None:
    assert find_category(cluster(preset, 2), (FIRST_THAT_FITS,)) is Category.UNTIMED


def test_one_device_that_is_not_timed_makes_a_machine_so() -> None:
    timed = cluster("dgx-a100-80gb", 1)
    ((node, _),) = timed.nodes
    other = replace(node, accelerator=replace(node.accelerator, name="other", matmul=MatmulModel()))
    mixed = replace(timed, nodes=((node, 1), (other, 1)))
    assert find_category(mixed, ()) is Category.UNTIMED
    assert MatmulModel() not in list_timed_products()
    assert accelerator("h200-141gb").matmul in list_timed_products()


@given(st.floats(1e-6, 1e6), st.sampled_from(Category))
def test_an_interval_contains_its_prediction_and_scales_with_it(seconds: float, of: Category) -> None:
    low, high = step_time_interval(seconds, of)
    assert low < seconds < high
    assert (low / seconds, high / seconds) == pytest.approx(step_time_interval(1.0, of))


def test_the_less_is_known_the_wider_it_is() -> None:
    (low, high), (lower, higher) = (step_time_interval(1.0, of) for of in (Category.STATED, Category.UNREAD))
    assert lower < low < 1 - 0.05  # repeats of a run by two publishers differ by up to 6.5 %
    assert 1 + 0.05 < high < higher
    assert step_time_interval(1.0, Category.UNKNOWN) == (lower, higher)


def test_ends_hold_for_publishers_that_are_left_out() -> None:
    figures = json.loads(files("meshwise.scenarios").joinpath(FIGURES).read_text("utf-8"))
    for ends in (figures["step_time_ends"]["known"], figures["peak_memory_ends"]["all"]):
        assert ends["low"] < 0 < ends["high"]
        assert sum(ends["publishers"].values()) / len(ends["publishers"]) >= figures["coverage"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("risk", [0.01, 0.05, 0.3])
def test_a_peak_has_room_with_the_margin_just_where_it_lacks_memory_with_less_than_the_risk(
    risk: float, caching: bool
) -> None:
    doubt, margin = build_uncertainty(Category.STATED, is_caching=caching), memory_margin(risk, is_caching=caching)
    for reserved in (0.0, 7.0):
        at_limit = reserved + (100.0 - reserved) / margin
        assert doubt.estimate_memory_risk(0.9999 * at_limit, 100.0, reserved) <= risk
        assert doubt.estimate_memory_risk(1.0001 * at_limit, 100.0, reserved) > risk - 0.01


def test_an_allocator_that_keeps_blocks_needs_more_than_one_that_plans() -> None:
    # measured: 1.0404 at the median and 1.0928 at most, so 1.0404 + 0.9 * 0.0524 = 1.0876 in 95 of 100 runs
    assert memory_margin(0.05, is_caching=True) == pytest.approx(1.0876, abs=0.002)
    assert 1.0 < memory_margin(0.05, is_caching=False) < 1.005
    assert memory_margin(0.01, is_caching=True) > memory_margin(0.05, is_caching=True)


def test_the_interval_of_peaks_is_told_of_the_runs_that_it_is_fitted_to() -> None:
    figures = json.loads(files("meshwise.scenarios").joinpath(FIGURES).read_text("utf-8"))["peak_memory_ends"]["all"]
    told = load("local/dp2").simulate().to_json()["peak_memory_interval_runs"]
    assert told == describe_peak_runs()
    assert told == f"{figures['rows']} runs of {len(figures['publishers'])} publishers"


def test_a_simulation_says_how_sure_it_is() -> None:
    scenario = load("megatron/gpt-1.7b-32-a100")
    result = scenario.simulate()
    assert result.step_time_interval == step_time_interval(result.step_time, Category.STATED)
    assert result.peak_memory_interval == peak_memory_interval(result.peak_memory)
    low, high = result.step_time_interval
    assert scenario.measured is not None and low < scenario.measured.step_time < high
    assert result.to_json()["step_time_interval"] == (low, high)
    assert result.fits and result.out_of_memory == 0
    assert result.peak_memory < result.peak_device < result.memory_capacity


def test_a_plan_that_fills_the_device_fits_for_the_brave_only() -> None:
    scenario = load("megatron/gpt-1.7b-32-a100")
    peak = scenario.simulate().peak_memory
    fits = {}
    for room in (0.99, 1.01, 1.2):
        machine = scenario.problem.cluster
        ((node, count),) = machine.nodes
        small = replace(node, accelerator=replace(node.accelerator, memory=room * peak))
        problem = replace(scenario.problem, cluster=replace(machine, nodes=((small, count),)))
        result = replace(scenario, problem=problem).simulate()
        brave = replace(scenario, problem=replace(problem, memory_margin=1.0)).simulate()
        fits[room] = (brave.fits, result.fits, result.out_of_memory > 0.05)
    assert fits == {0.99: (False, False, True), 1.01: (True, False, True), 1.2: (True, True, False)}


def test_search_and_simulate_say_the_same_probability() -> None:
    """Both replay the step: with the whole device it fits, with 0.7 of it not even the tensors do."""
    scenario = load("llama3-70b-64-h100")
    machine = scenario.problem.cluster
    node, count = machine.nodes[0]
    for room, fits in ((1.0, True), (0.7, False)):
        small = replace(node, accelerator=replace(node.accelerator, memory=room * node.accelerator.memory))
        problem = replace(scenario.problem, cluster=replace(machine, nodes=((small, count),)))
        result = replace(scenario, problem=problem).simulate()
        forecast = forecast_plan(problem, result.plan)
        assert result.out_of_memory == forecast.out_of_memory
        assert result.fits == forecast.fits == fits
        assert result.fits == (result.out_of_memory <= RISK)
        assert forecast.allocated <= result.peak_reserved <= result.peak_device


def test_pages_of_the_allocator_leave_the_room_that_blocks_take() -> None:
    # of 100 the blocks of one allocator leave 100 / 1.0876 = 92 to tensors, the pages of the other all but 0.5 %
    scenario = load("megatron/gpt-1.7b-32-a100")
    paged = replace(scenario.problem.training, expandable_segments=True)
    problem = with_margin(replace(scenario.problem, training=paged))
    assert 1.0 < problem.memory_margin < 1.005 < 1.08 < scenario.problem.memory_margin
    layout, said = Layout(data=32, microbatch=4), {}
    peak = SimulatedCost(problem).peak_memory(complete(problem, layout))
    for room in (0.97, 1.03):
        tight = problem.cluster.with_accelerators(lambda each, room=room: replace(each, memory=room * peak))
        tried = replace(scenario.problem, cluster=tight)
        said[room] = "with training.expandable_segments: true it fits" in explain_shortfall(tried, [layout])["reason"]
    assert said == {0.97: False, 1.03: True}


def test_what_a_refusal_says_of_the_room_is_what_is_usable_of_what_is_reported() -> None:
    problem = load("llama3-70b-64-h100").problem
    device = problem.cluster.accelerator
    words = describe_room(problem.usable_memory(device), device.memory)
    assert words == "usable are 72.8 GiB of the 79.1 GiB that the framework reports (risk 5 %)"
    assert describe_room(device.memory, device.memory) == "a device has 79.1 GiB"
    assert problem.needed_memory(device, problem.usable_memory(device)) == pytest.approx(device.memory)


def test_peaks_of_frameworks_that_are_not_known_are_further_off() -> None:
    # a peak is off by exp(half width) at most in 95 of 100 runs, and an allocator keeps some more
    known, unknown = (memory_margin(RISK, is_caching=True, is_known=known) for known in (True, False))
    assert unknown > known > 1
    width = build_uncertainty(Category.STATED, is_known=False).peak_memory_width
    assert memory_margin(RISK, is_caching=False, is_known=False) == pytest.approx(exp(width), rel=5e-3)
