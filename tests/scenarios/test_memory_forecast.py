"""Memory where devices have different amounts of it: each rank is judged by its own device."""

from dataclasses import replace

import pytest

from meshwise.scenarios.fitting import describe_peak
from meshwise.scenarios.loader import load
from meshwise.scenarios.memory_forecast import forecast_plan, list_device_peaks, list_position_memory
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

H100_FIRST = tuple(range(16))
A100_FIRST = (*range(8, 16), *range(8))


def shrink_a100(device: Accelerator) -> Accelerator:
    return replace(device, memory=device.memory / 2) if "A100" in device.name else device


@pytest.fixture(scope="module")
def mixed() -> Problem:
    """Return 8 H100 of 79 GiB and 8 A100 of half as much."""
    problem = load("gallery/techniques/mixed-devices").problem
    return replace(problem, cluster=problem.cluster.with_accelerators(shrink_a100))


def build_plan(problem: Problem, placement: tuple[int, ...]) -> Plan:
    """Return 28 layers on the devices that ``placement`` has first, and 12 on the others."""
    layout = Layout(data=4, tensor=2, pipeline=2, stages=(28, 12), zero=1, placement=placement)
    return complete(problem, layout)


def test_a_full_stage_fits_on_the_larger_devices_alone(mixed: Problem) -> None:
    large, small = (forecast_plan(mixed, build_plan(mixed, placement)) for placement in (H100_FIRST, A100_FIRST))
    assert large.fits and large.out_of_memory < 0.05
    assert not small.fits and small.out_of_memory > 0.95


def test_the_least_memory_of_each_position(mixed: Problem) -> None:
    h100, a100 = (device.memory for device in mixed.cluster.accelerators)
    assert a100 < h100
    assert list_position_memory(mixed, build_plan(mixed, H100_FIRST), 1).tolist() == [h100, a100]
    assert list_position_memory(mixed, build_plan(mixed, A100_FIRST), 1).tolist() == [a100, h100]
    whole = complete(mixed, Layout(data=16, zero=3))  # one position has both
    assert list_position_memory(mixed, whole, 1).tolist() == [a100]


def test_only_data_ranks_of_a_size_count(mixed: Problem) -> None:
    h100, a100 = (device.memory for device in mixed.cluster.accelerators)
    plan = complete(mixed, Layout(data=2, tensor=8, microbatch=(3, 1), zero=1))
    assert [list_position_memory(mixed, plan, size).tolist() for size in (3, 1)] == [[h100], [a100]]


def test_peaks_of_devices_are_those_of_the_simulation(mixed: Problem) -> None:
    plan = build_plan(mixed, H100_FIRST)
    peaks = list_device_peaks(mixed, plan)
    assert max(peaks.values()) == SimulatedCost(mixed).evaluate(plan).peak_memory
    h100, a100 = mixed.cluster.accelerators
    assert peaks[a100] < peaks[h100]
    words = describe_peak(mixed, plan, max(peaks.values()))
    assert f"on {h100.name} (" in words and f"on {a100.name} (" in words
