"""Work shared by speed: among workers, data ranks and stages, on devices of several kinds."""

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.speed_division import (
    balance_samples,
    estimate_step_time,
    find_position_times,
    list_placements,
    share_out,
)

from ..problems import problem


def mixed(**sizes: int) -> Problem:
    """Return a node of fast devices and one of devices that take three times as long for everything."""
    small = problem(nodes=2, **sizes)
    ((node, _),) = small.cluster.nodes
    slow = replace(
        node.accelerator,
        name="slow",
        peak_flops=tuple((dtype, rate / 3) for dtype, rate in node.accelerator.peak_flops),
        memory_bandwidth=node.accelerator.memory_bandwidth / 3,
    )
    nodes = ((node, 1), (replace(node, accelerator=slow), 1))
    return replace(small, cluster=replace(small.cluster, nodes=nodes))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_shares_end_earlier(workers: list[tuple[int, int]], beyond: int) -> None:
    times, loads = ([float(pair[column]) for pair in workers] for column in (0, 1))
    total = len(workers) + beyond
    counts = share_out(times, total, loads)
    every = (row for row in product(range(1, total + 1), repeat=len(workers)) if sum(row) == total)

    def find_end(row: tuple[int, ...]) -> float:
        return max(count * time + load for count, time, load in zip(row, times, loads, strict=True))

    assert sum(counts) == total and min(counts) >= 1
    assert find_end(counts) == min(map(find_end, every))


def test_a_device_that_takes_three_times_as_long_has_a_third_of_the_samples() -> None:
    # two fast and two slow data ranks, 16 sequences: 6 * 1 = 2 * 3
    of = mixed(devices=2, layers=2, batch=16)
    assert balance_samples(of, Layout(data=4, microbatch=4)) == (6, 6, 2, 2)
    assert balance_samples(of, Layout(data=4, microbatch=4, placement=(2, 3, 0, 1))) == (2, 2, 6, 6)
    # with a stage on each node every data rank has a device of each kind
    assert balance_samples(of, Layout(data=2, pipeline=2, microbatch=4)) == 4
    # each data rank has a sequence at least
    assert balance_samples(of, Layout(data=4, microbatch=1)) == 1


def test_a_stage_is_as_slow_as_its_slowest_data_rank() -> None:
    # a stage on a fast and a slow device each: 3 samples on the fast one take as long as 1 on the slow one
    of = mixed(devices=2, layers=4, batch=8)
    placement = (0, 2, 1, 3)
    balanced = find_position_times(of, Layout(data=2, pipeline=2, microbatch=(3, 1), placement=placement))
    even = find_position_times(of, Layout(data=2, pipeline=2, microbatch=2, placement=placement))
    one = find_position_times(of, Layout(data=2, pipeline=2, microbatch=1, placement=placement))
    assert np.allclose(balanced.layers, one.layers, rtol=1e-6)
    assert np.allclose(even.layers, [2 * time for time in one.layers], rtol=1e-2)


def test_the_estimate_is_the_formula_by_hand() -> None:
    # 3 layers on a fast stage and 1 on a slow one take 3 each, and the slow one also has the ends; 4 microbatches
    of = mixed(devices=2, layers=4, batch=8)
    layout = Layout(data=2, pipeline=2, stages=(3, 1))
    fast, slow = find_position_times(of, layout).layers
    end = find_position_times(of, layout).ends[1]
    expected = 3 * fast / 4 + (slow / 4 + end) + 3 * (slow / 4 + end)
    assert np.isclose(estimate_step_time(of, layout, (0, 1)), expected)
    # two tensor ranks share the work of one
    tensor_layout = Layout(tensor=2, pipeline=2, microbatch=2, stages=(3, 1))
    halves = [each / 2 for each in find_position_times(of, tensor_layout).layers]
    half_end = find_position_times(of, tensor_layout).ends[1] / 2
    expected = 3 * halves[0] / 4 + 4 * (halves[1] / 4 + half_end)
    assert np.isclose(estimate_step_time(of, tensor_layout, (0, 1)), expected)


def test_placements_are_the_orders_of_kinds_and_stages_that_are_all_alike() -> None:
    of = mixed(devices=2)
    assert list_placements(of, 1) == [()]
    assert list_placements(of, 2) == [(), (2, 3, 0, 1), (0, 2, 1, 3)]
    assert list_placements(of, 4) == [(), (2, 3, 0, 1)]  # two devices of a kind are not on four stages
    assert list_placements(problem(nodes=2, devices=2), 2) == [()]


def test_data_ranks_that_share_experts_or_states_are_balanced_too() -> None:
    """The data axis is divided by groups of experts and replicas of states: all data ranks count."""
    of = mixed(devices=4, layers=2, batch=16)
    for changes in ({"zero_shards": 2, "zero": 1}, {}):
        layout = Layout(data=8, microbatch=2, **changes)  # type: ignore[arg-type]
        sizes = balance_samples(of, layout)
        assert isinstance(sizes, tuple)
        assert sizes == (3, 3, 3, 3, 1, 1, 1, 1)  # a third of the speed
