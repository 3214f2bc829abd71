from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import load
from scenarios.prediction_interval import (
    Category,
    category,
    peak_memory_interval,
    step_time_interval,
    with_margin,
)
from scenarios.rows.row import FIRST_THAT_FITS
from simulator.catalog import accelerator, cluster, timed_products
from simulator.kernels.matmul import MatmulModel


@pytest.mark.parametrize("preset", ["dgx-a100-80gb", "dgx-h100", "dgx-b200", "dgx-b300", "dgx-1-v100-32gb"])
def test_timed_accelerators_and_their_relatives(preset: str) -> None:
    machine = cluster(preset, 2)
    assert category(machine, ()) is Category.STATED
    assert category(machine, ("other", f"recompute none, micro_batch 1: {FIRST_THAT_FITS}")) is Category.OPEN


@pytest.mark.parametrize("preset", ["tpu-v4", "tpu-v5e", "atlas-800t-a2", "mi300x-8", "gaudi2-8"])
def test_accelerators_of_data_sheets_are_not_timed_whatever_else_is_known(preset: str) -> None:
    assert category(cluster(preset, 2), (FIRST_THAT_FITS,)) is Category.UNTIMED


def test_one_device_that_is_not_timed_makes_a_machine_so() -> None:
    timed = cluster("dgx-a100-80gb", 1)
    ((node, _),) = timed.nodes
    other = replace(node, accelerator=replace(node.accelerator, name="other", matmul=MatmulModel()))
    mixed = replace(timed, nodes=((node, 1), (other, 1)))
    assert category(mixed, ()) is Category.UNTIMED
    assert MatmulModel() not in timed_products()
    assert accelerator("h200-141gb").matmul in timed_products()


@given(st.floats(1e-6, 1e6), st.sampled_from(Category))
def test_an_interval_reaches_as_far_to_both_sides_in_logarithms(seconds: float, of: Category) -> None:
    low, high = step_time_interval(seconds, of)
    assert low < seconds < high
    assert log(high / seconds) == pytest.approx(log(seconds / low))


def test_the_less_is_known_the_wider_it_is() -> None:
    widths = [step_time_interval(1.0, of)[1] for of in (Category.STATED, Category.OPEN, Category.UNTIMED)]
    assert widths == sorted(widths)
    assert widths[0] > 1 + 0.05  # repeats of a run by two publishers differ by up to 6.5 %
    assert peak_memory_interval(1.0)[1] < 1.01


def test_the_margin_is_of_tensors_and_not_of_what_the_framework_takes() -> None:
    ratio = with_margin(1.0, 0.0)
    assert 1.02 < ratio < 1.2
    assert with_margin(11.0, 1.0) == pytest.approx(1 + 10 * ratio)
    assert with_margin(1.0, 1.0) == 1.0


def test_a_simulation_says_how_sure_it_is() -> None:
    scenario = load("megatron/gpt-1.7b-32-a100")
    result = scenario.simulate()
    assert result.step_time_interval == step_time_interval(result.step_time, Category.STATED)
    assert result.peak_memory_interval == peak_memory_interval(result.peak_memory)
    low, high = result.step_time_interval
    assert scenario.measured is not None and low < scenario.measured.step_time < high
    assert result.to_json()["step_time_interval"] == (low, high)
    assert result.fits and result.fits_with_margin


def test_a_plan_that_fills_the_device_fits_without_margin_only() -> None:
    scenario = load("megatron/gpt-1.7b-32-a100")
    peak = scenario.simulate().peak_memory
    fits = {}
    for room in (0.99, 1.01, 1.2):
        machine = scenario.problem.cluster
        ((node, count),) = machine.nodes
        small = replace(node, accelerator=replace(node.accelerator, memory=room * peak))
        problem = replace(scenario.problem, cluster=replace(machine, nodes=((small, count),)))
        result = replace(scenario, problem=problem).simulate()
        fits[room] = (result.fits, result.fits_with_margin)
    assert fits == {0.99: (False, False), 1.01: (True, False), 1.2: (True, True)}
