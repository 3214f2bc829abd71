"""Routes inside a node, by hand."""

import numpy as np
import pytest

from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import Link, Mesh, PcieTree, Ring, Switch

from .machines import CUBE_MESH, FAST, SLOW, bandwidth, machine, node, one


def latency(wired: Interconnect, source: int, target: int) -> float:
    return float(wired.latency[wired.routes(np.array([source]), np.array([target])).link].sum())


def test_a_switch_has_a_port_out_and_a_port_in() -> None:
    wired = interconnect(machine((node(8), 2)))
    assert one(wired, 9, 15) == [("device 9 out", 1.0), ("device 15 in", 1.0)]
    assert latency(wired, 9, 15) == FAST.latency


def test_a_full_mesh_has_a_link_between_every_two() -> None:
    wired = interconnect(machine((node(4, Mesh(FAST)), 2)))
    assert one(wired, 6, 5) == [("node 1 link 2>1", 1.0)]
    assert sum(wired.kind(link) == "node link" for link in range(wired.num_links)) == 2 * 4 * 3


def test_the_cube_mesh_has_six_links_a_device_and_two_ways_across() -> None:
    wired = interconnect(machine((node(8, CUBE_MESH), 2)))
    for device in range(8):
        assert sum(count for a, b, count in CUBE_MESH.pairs if device in (a, b)) == 6
    assert one(wired, 8, 11) == [("node 1 link 0>3", 1.0)]
    assert bandwidth(wired, "node 1 link 0>3") == bandwidth(wired, "node 1 link 3>0") == 2 * 25e9
    # 0 and 5 are not wired: by 1 and by 4, the neighbours of both.
    halves = [f"node 0 link {ends}" for ends in ("0>1", "0>4", "1>5", "4>5")]
    assert sorted(one(wired, 0, 5)) == [(name, 0.5) for name in halves]


def test_pairs_named_twice_add_up() -> None:
    wired = interconnect(machine((node(2, Mesh(FAST, ((0, 1, 1), (1, 0, 2)))), 1)))
    assert bandwidth(wired, "node 0 link 0>1") == bandwidth(wired, "node 0 link 1>0") == 3 * 300e9


def test_a_ring_goes_the_short_way_and_both_ways_to_the_opposite() -> None:
    wired = interconnect(machine((node(6, Ring(FAST)), 1)))
    assert one(wired, 5, 1) == [("node 0 link 5>0", 1.0), ("node 0 link 0>1", 1.0)]
    assert one(wired, 1, 5) == [("node 0 link 1>0", 1.0), ("node 0 link 0>5", 1.0)]
    ways = ("1>2", "2>3", "3>4", "1>0", "0>5", "5>4")
    assert one(wired, 1, 4) == [(f"node 0 link {ends}", 0.5) for ends in ways]
    assert latency(wired, 5, 1) == 2 * FAST.latency


def test_a_ring_of_two_is_one_wire_each_way() -> None:
    wired = interconnect(machine((node(2, Ring(FAST)), 1)))
    assert [wired.name(link) for link in range(wired.num_links) if wired.kind(link) == "node link"] == [
        "node 0 link 0>1",
        "node 0 link 1>0",
    ]
    assert one(wired, 1, 0) == [("node 0 link 1>0", 1.0)]


def test_a_pcie_tree_climbs_as_far_as_it_must() -> None:
    wired = interconnect(machine((node(8, PcieTree(FAST, 2, 2, SLOW)), 2)))
    switch = ["device 8 out", "device 9 in"]
    socket = ["device 8 out", "pcie switch 4 out", "pcie switch 5 in", "device 10 in"]
    far = ["device 8 out", "pcie switch 4 out", "node 1 socket 0>1", "pcie switch 7 in", "device 15 in"]
    for target, names in ((9, switch), (10, socket), (15, far)):
        assert one(wired, 8, target) == [(name, 1.0) for name in names]
    assert latency(wired, 8, 10) == FAST.latency
    assert latency(wired, 8, 15) == pytest.approx(FAST.latency + SLOW.latency)


def test_devices_of_a_pcie_tree_send_over_their_slots() -> None:
    host = Host("host", 1e12, 400e9, pcie=Pcie(Link(8e-6, 25e9), 2))
    wired = interconnect(machine((node(4, PcieTree(FAST, 2, 2, SLOW), host=host), 1)))
    names = ["pcie 0 out", "device 0 out", "pcie switch 0 out", "pcie switch 1 in", "device 3 in", "pcie 3 in"]
    assert one(wired, 0, 3) == [(name, 1.0) for name in names]
    assert latency(wired, 0, 3) == FAST.latency


def test_a_mesh_joins_the_devices_of_its_node() -> None:
    with pytest.raises(ValueError, match="below 2, met \\(0, 2\\)"):
        Interconnect(machine((node(2, Mesh(FAST, ((0, 2, 1),))), 1)))
    with pytest.raises(ValueError, match="no way from 0 to 2"):
        Interconnect(machine((node(4, Mesh(FAST, ((0, 1, 1), (2, 3, 1)))), 1)))


@pytest.mark.parametrize("network", [Switch, Mesh, Ring])
def test_every_link_of_a_node_has_the_launch_of_its_kind(network: type[Switch | Mesh | Ring]) -> None:
    wired = interconnect(machine((node(3, network(Link(1e-6, 1e9, launch=14e-6))), 1)))
    inside = [link for link in range(wired.num_links) if not wired.kind(link).startswith("nic")]
    assert set(wired.launch[inside]) == {14e-6}
