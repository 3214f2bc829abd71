"""Messages by hand: what they put on links, how long they are on their way, and phases of groups side by side."""

import numpy as np
import pytest

from meshwise.simulator.collectives.traffic import (
    Edges,
    Phase,
    Traffic,
    build_phase,
    merge_phases,
    merge_traffic,
    traffic,
    with_launch,
)
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.topology import Link, Switch

from .machines import machine

PORTS = machine(2, 2, network=Switch(Link(0.25, 8.0, launch=1.0)), nic=Link(0.5, 2.0, launch=3.0))
"""Two nodes of two devices: a message inside takes 0.25 s before its bytes move, one between nodes 0.5 s."""


def messages(*rows: tuple[int, int, int, float], groups: int = 1) -> Traffic:
    group, source, target, weight = (np.array(column) for column in zip(*rows, strict=True))
    return traffic(PORTS, groups, [Edges(group, source, target, weight.astype(float))])


def on_links(moved: Traffic, group: int = 0) -> dict[str, float]:
    rows = moved.group == group
    return {interconnect(PORTS).name(link): load for link, load in zip(moved.link[rows], moved.load[rows], strict=True)}


def test_bytes_are_on_both_ports_of_a_message_and_add_up() -> None:
    moved = messages((0, 0, 1, 3.0), (0, 0, 1, 5.0), (1, 1, 0, 2.0), groups=2)
    assert on_links(moved) == {"device 0 out": 8.0, "device 1 in": 8.0}
    assert on_links(moved, 1) == {"device 1 out": 2.0, "device 0 in": 2.0}


def test_the_latency_of_a_group_is_the_mean_over_its_bytes() -> None:
    moved = messages((0, 0, 1, 3.0), (0, 1, 3, 1.0))
    assert moved.latency[0] == pytest.approx((3 * 0.25 + 0.5) / 4)
    assert (moved.weight[0], moved.max_latency[0]) == (4.0, 0.5)


def test_traffics_together_are_all_their_messages() -> None:
    one, other = messages((0, 0, 1, 3.0)), messages((0, 1, 3, 1.0))
    both, expected = merge_traffic(PORTS, one, other), messages((0, 0, 1, 3.0), (0, 1, 3, 1.0))
    assert on_links(both) == on_links(expected)
    assert both.latency.tolist() == expected.latency.tolist() and both.max_latency[0] == 0.5


def test_the_first_phase_waits_for_the_slowest_launch_of_all() -> None:
    inside = build_phase(messages((0, 0, 1, 3.0)), np.array([0.25]), 2.0)
    between = build_phase(messages((0, 1, 3, 1.0)), np.array([0.5]))
    first, second = with_launch(PORTS, inside, between)
    assert first.latency[0] == 0.25 + 3.0 and second.latency[0] == 0.5  # a NIC is launched, though in the second phase
    assert set(first.load.tolist()) == {6.0}


def test_a_group_of_fewer_phases_idles_in_the_last_ones() -> None:
    def only(latency: float) -> Phase:
        return Phase(np.array([latency]), np.array([0]), np.array([7]), np.array([latency]))

    first, second = merge_phases(2, [(np.array([1]), (only(1.0),)), (np.array([0]), (only(2.0), only(4.0)))])
    assert (first.latency.tolist(), second.latency.tolist()) == ([2.0, 1.0], [4.0, 0.0])
    assert (first.group.tolist(), first.load.tolist(), second.group.tolist()) == ([0, 1], [2.0, 1.0], [0])
