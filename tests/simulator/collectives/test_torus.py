"""The bucket algorithm keeps all axes of a torus busy, both ways."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, idle_time, phases
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Link, Torus

from .machines import latencies, loads, machine, time

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
RING = Algorithm.RING
WIRE = Link(latency=0.5, bandwidth=2.0, launch=1.0)


def torus(*shape: int, wraparound: bool = True) -> Cluster:
    return machine(int(np.prod(shape)), 1, fabric=Torus(shape, WIRE, wraparound))


def summed(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the bytes of all phases together."""
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}


def test_one_axis_runs_both_ways_round() -> None:
    # 4 devices: 3 steps of 0.5 s, 3/4 * 32 = 24 bytes of which half go each way
    assert loads(torus(4), GATHER, RING, [0, 1, 2, 3], 32.0) == [
        {f"torus {d} x{way}": 12.0 for d in range(4) for way in "+-"}
    ]
    assert time(torus(4), GATHER, RING, [0, 1, 2, 3], 32.0) == 1.0 + 1.5 + 6.0


def test_a_plane_in_two_phases() -> None:
    # 4 x 4, 64 bytes in 4 parts of 16: first 3/4 * 16 = 12 over every wire, then a quarter of it
    first, second = loads(torus(4, 4), SCATTER, RING, [*range(16)], 64.0)
    assert (set(first.values()), len(first)) == ({12.0}, 64)
    assert (set(second.values()), len(second)) == ({3.0}, 64)
    assert latencies(torus(4, 4), SCATTER, RING, [*range(16)]) == [1.0 + 1.5, 1.5]


def test_a_phase_waits_for_its_longest_axis() -> None:
    # 2 x 4: a step of 0.5 s on the one axis, three on the other, in either phase; the launch of 1 s once
    assert latencies(torus(2, 4), SCATTER, RING, [*range(8)]) == [1.0 + 1.5, 1.5]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_cube_is_six_times_as_fast_as_one_wire(size: int) -> None:
    # (n - 1) / n of the bytes leave every device over 6 wires
    devices = size**3
    bytes_over = summed(loads(torus(size, size, size), REDUCE, RING, [*range(devices)], 6.0))
    assert list(bytes_over.values()) == pytest.approx([2 * (devices - 1) / devices] * 6 * devices)


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    group = [*range(24)]
    cluster = torus(2, 3, 4)
    halves = loads(cluster, SCATTER, RING, group, 8.0) + loads(cluster, GATHER, RING, group, 8.0)
    assert loads(cluster, REDUCE, RING, group, 8.0) == halves
    assert loads(cluster, GATHER, RING, group, 8.0) == loads(cluster, SCATTER, RING, group, 8.0)[::-1]


def test_without_wraparound_a_ring_comes_back_over_its_own_line() -> None:
    # both rings cross each wire once each way: 2 * 12 bytes
    bytes_over = loads(torus(4, wraparound=False), GATHER, RING, [0, 1, 2, 3], 32.0)[0]
    assert list(bytes_over.values()) == [24.0] * 6


def test_other_groups_are_one_ring_in_order() -> None:
    # three corners of a square: 2/3 * 6 = 4 bytes, half each way round
    cluster = torus(4, 4)
    assert len(phases(cluster, GATHER, RING, np.array([[0, 1, 5]]))) == 1
    bytes_over = loads(cluster, GATHER, RING, [0, 1, 5], 6.0)[0]
    assert bytes_over["torus 0 y+"] == 2.0  # 0 > 1
    assert bytes_over["torus 1 y-"] == 4.0  # 1 > 0, and 5 > 0 by way of 1
    assert sum(bytes_over.values()) == 2.0 * (2 * (1 + 1 + 2))
    # an all-reduce goes round twice
    assert loads(cluster, REDUCE, RING, [0, 1, 5], 6.0)[0] == {name: 2 * load for name, load in bytes_over.items()}


def test_devices_on_a_torus_have_no_nodes() -> None:
    assert algorithms(torus(4, 4), REDUCE, np.arange(16)) == (RING, Algorithm.PARAMETER_SERVER)
    fours = machine(4, 4, fabric=Torus((4, 2, 2), WIRE))  # a host for every four devices: their wires are the torus's
    assert algorithms(fours, REDUCE, np.arange(16)) == (RING, Algorithm.PARAMETER_SERVER)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    shape = draw(st.sampled_from([(4, 4, 4), (2, 4, 8), (3, 5, 2)]))
    spans = []
    for length in shape:
        start, count = draw(st.integers(0, length - 1)), draw(st.integers(1, length))
        spans.append([(start + step) % length for step in range(count)])
    group = [int(np.ravel_multi_index(place, shape)) for place in product(*spans)]
    return shape, draw(st.permutations(group))


@given(boxes(), st.booleans(), st.sampled_from([REDUCE, GATHER]))
@settings(max_examples=300, deadline=None)
def test_no_box_is_faster_than_its_wires(
    box: tuple[tuple[int, ...], list[int]], wrap: bool, collective: Collective
) -> None:
    """Every device takes in ``(n - 1) / n`` of the bytes over the wires that reach it."""
    shape, group = box
    if len(group) < 2:
        return
    cluster = torus(*shape, wraparound=wrap)
    needed = (2 if collective is REDUCE else 1) * (len(group) - 1) / len(group)
    wires = sum(min(length - 1, 2) for length in shape)
    parts = phases(cluster, collective, RING, np.array([group]))
    assert idle_time(cluster, parts, 0, 1e6) >= needed * 1e6 / WIRE.bandwidth / wires
    moved = sum(float(part.load.sum()) for part in parts)
    assert moved >= needed * len(group) * (1 - 1e-12)
    assert max(int(part.link.max()) for part in parts) < interconnect(cluster).num_links
