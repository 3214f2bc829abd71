"""Devices of pools for the replicas of stages, against all allocations."""

from itertools import product
from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.stages.device_allocation import DevicePools, Replicas, allocate_devices

from ...examples import LONG


def step_time(pools: DevicePools, replicas: tuple[Replicas, ...], microbatches: int) -> float:
    """Return the time of a step by the formula, with what sending takes between the first pools of stages."""
    places = [[pool for pool, count in enumerate(row) if count] for row in replicas]
    times = [max(pools.times[stage, pool] for pool in row) for stage, row in enumerate(places)]
    sends = [pools.send_times[stage, row[0], places[stage + 1][0]] for stage, row in enumerate(places[:-1])]
    busy = [sum(row) for row in zip(times, [*sends, 0.0], [0.0, *sends], strict=True)]
    sync = max(pools.sync_times[stage, pool] for stage, row in enumerate(places) for pool in row)
    return float(sum(times) + 2 * sum(sends) + (microbatches - 1) * max(busy) + sync)


def every_allocation(pools: DevicePools, data: int) -> list[tuple[Replicas, ...]]:
    """Return every allocation within the devices, with stages in one region each and regions in order."""
    rows = [row for row in product(range(data + 1), repeat=len(pools.counts)) if sum(row) == data]
    regions = {row: {pools.regions[pool] for pool, count in enumerate(row) if count} for row in rows}
    rows = [row for row in rows if len(regions[row]) == 1]
    result = []
    for replicas in product(rows, repeat=len(pools.times)):
        used = (np.array(replicas) * pools.widths).sum(axis=0)
        order = [min(regions[row]) for row in replicas]
        holds = all(np.isfinite(pools.times[stage][np.array(row) > 0]).all() for stage, row in enumerate(replicas))
        if holds and (used <= pools.counts).all() and order == sorted(order):
            result.append(replicas)
    return result


@st.composite
def pool_problems(draw: st.DrawFn) -> DevicePools:
    stages, num_pools = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    regions = draw(st.sampled_from([row for row in product((0, 1), repeat=num_pools) if 0 in row and sum(row) < 3]))
    if regions.count(0) > 2:
        regions = (0, 0, 1)
    figures = st.integers(1, 5).map(float)
    table = st.lists(figures | st.just(inf), min_size=num_pools, max_size=num_pools)
    times = np.array(draw(st.lists(table, min_size=stages, max_size=stages)))
    sync = np.array([draw(figures) for _ in range(num_pools)])
    crossing = np.array([[draw(figures) for _ in range(2)] for _ in range(2)])
    sends = crossing[np.ix_(regions, regions)]
    widths = [draw(st.sampled_from((1, 2))) for _ in range(num_pools)]
    return DevicePools(
        counts=tuple(draw(st.integers(0, 7)) for _ in range(num_pools)),
        regions=regions,
        widths=np.array([widths] * stages),
        times=times,
        send_times=np.repeat(sends[None], stages - 1, axis=0),
        sync_times=np.repeat(sync[None], stages, axis=0),
    )


@settings(max_examples=300 if LONG else 100, deadline=None)
@given(pool_problems(), st.integers(1, 3), st.integers(1, 4))
def test_no_allocation_is_faster(pools: DevicePools, data: int, microbatches: int) -> None:
    times = [step_time(pools, replicas, microbatches) for replicas in every_allocation(pools, data)]
    allocation = allocate_devices(pools, data, microbatches)
    if not times:
        assert allocation is None
    else:
        assert allocation is not None and allocation.time == min(times)
        assert allocation.replicas in every_allocation(pools, data)
        assert step_time(pools, allocation.replicas, microbatches) == allocation.time


def pair_of_regions(send_time: float) -> DevicePools:
    """Return two regions of two devices each, for two stages of 4 s; 1 s to sum the gradients of one stage."""
    sends = np.array([[[0.0, send_time], [send_time, 0.0]]])
    return DevicePools((2, 2), (0, 1), np.ones((2, 2), int), np.full((2, 2), 4.0), sends, np.ones((2, 2)))


def test_a_region_behind_a_slow_link_is_not_used() -> None:
    # a stage on each region: 4 + 4 + 2 * send, 3 further microbatches of 4 + send, and 1 to sum gradients
    near, far = (allocate_devices(pair_of_regions(send), 2, 4) for send in (0.5, 9.0))
    assert near is not None and near.replicas == ((2, 0), (0, 2)) and near.time == 4 + 4 + 1 + 3 * 4.5 + 1
    # with one replica the pipeline has room in one region
    assert far is not None and far.time == 4 + 4 + 18 + 3 * 13 + 1
    inside = allocate_devices(pair_of_regions(9.0), 1, 8)
    assert inside is not None and inside.replicas == ((1, 0), (1, 0)) and inside.time == 4 + 4 + 7 * 4 + 1


def test_devices_that_cannot_hold_a_stage_are_left_out_there() -> None:
    times = np.array([[2.0, inf], [2.0, 3.0]])
    pools = DevicePools((2, 2), (0, 0), np.ones((2, 2), int), times, np.zeros((1, 2, 2)), np.zeros((2, 2)))
    allocation = allocate_devices(pools, 2, 2)
    assert allocation is not None and allocation.replicas == ((2, 0), (0, 2))
    assert allocate_devices(pools, 3, 2) is None
