"""Pools of devices by kind and region, and what stages, sends and sums of gradients take there, by hand."""

import numpy as np
import pytest

from meshwise.simulator.machine.topology import Dragonfly, FatTree, LeafSpine, Link
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.search.algorithms.device_pools import PoolTimes, list_pools
from meshwise.strategies.search.speed_division import find_position_times

from ...problems import problem
from ..test_speed_division import mixed


@pytest.mark.parametrize(
    ("fabric", "regions"),
    [
        (Dragonfly(1, 2, Link(1e-6, 1e9), Link(1e-3, 1e6)), 2),
        (Dragonfly(1, 1, Link(1e-6, 1e9), Link(1e-3, 1e6)), 4),
        (LeafSpine(2, oversubscription=4.0), 2),
        (LeafSpine(2), 1),
        (FatTree(1, 2, core_oversubscription=2.0), 2),
        (FatTree(1, 2), 1),
    ],
)
def test_regions_are_parts_of_the_fabric_behind_narrow_links(
    fabric: Dragonfly | LeafSpine | FatTree, regions: int
) -> None:
    pools = list_pools(problem(nodes=4, devices=2, fabric=fabric).cluster)
    assert len({pool.region for pool in pools}) == len(pools) == regions


def test_a_fabric_of_many_parts_is_one_region() -> None:
    fabric = LeafSpine(1, oversubscription=4.0)
    assert len(list_pools(problem(nodes=5, devices=2, fabric=fabric).cluster)) == 1


def test_groups_are_inside_nodes() -> None:
    (pool,) = list_pools(problem(nodes=2, devices=3).cluster)
    assert pool.list_groups(2) == [(0, 1), (3, 4)]
    assert pool.list_groups(4) == []


def test_ranks_get_the_devices_of_each_pool_in_order() -> None:
    pool_times = PoolTimes(mixed(devices=4))
    assert pool_times.place(((1, 1), (1, 0)), 2) == (0, 1, 4, 5, 2, 3)
    assert pool_times.place(((2, 0), (0, 2)), 2) == ()  # all devices in order


def test_a_stage_takes_its_share_of_the_layers() -> None:
    of = mixed(devices=2, layers=4)
    whole = find_position_times(of, Layout(data=2, pipeline=2))
    times = PoolTimes(of).list_stage_times(Layout(data=2, pipeline=2, stages=(1, 3)))
    # pools are the positions of ranks in order; the last stage has the blocks beside the layers too
    assert np.allclose(times[0], np.array(whole.layers) / 4)
    assert np.allclose(times[1], np.array(whole.layers) * 3 / 4 + whole.ends)


def test_sends_and_sums_go_at_the_rate_of_links() -> None:
    of = problem(nodes=2, devices=1, nics=1, layers=2, bandwidth=4e9)
    pool_times = PoolTimes(of)
    # NICs of 1 GB/s and 2 us; 32 tokens of 64 elements of 4 bytes
    assert np.allclose(pool_times.list_send_times(Layout(pipeline=2, microbatch=3)), 2e-6 + 3 * 32 * 64 * 4 / 1e9)
    elements = of.graph.num_parameters
    sums = pool_times.list_sync_times(Layout(data=2))
    assert np.allclose(sums, 2 * (2 - 1) / 2 * 4 * elements / 1e9)


@pytest.mark.parametrize(("stages", "pipeline"), [("even", 1), ((2, 2), 2), ((1, 1, 1, 1), 4)])
def test_work_shared_by_speed_takes_less_than_even_stages(stages: str | tuple[int, ...], pipeline: int) -> None:
    pool_times = PoolTimes(mixed(devices=2, layers=4, batch=8, bandwidth=1e15))
    layout = Layout(data=4 // pipeline, pipeline=pipeline, stages=stages)
    # on all devices even stages are as slow as the slow node, and less work there is faster
    assert pool_times.find_shared_time(layout) < pool_times.find_even_time(layout)
