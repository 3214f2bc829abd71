"""Routes between nodes, by hand."""

import numpy as np
import pytest

from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.topology import Dragonfly, FatTree, LeafSpine, Link

from .machines import FAST, NIC, SLOW, bandwidth, machine, node, one


def names(wired: Interconnect, source: int, target: int) -> list[str]:
    assert all(share == 1 for _, share in one(wired, source, target))
    return [name for name, _ in one(wired, source, target)]


def latency(wired: Interconnect, source: int, target: int) -> float:
    return float(wired.latency[wired.routes(np.array([source]), np.array([target])).link].sum())


def test_nodes_of_a_crossbar_meet_nics_only() -> None:
    wired = interconnect(machine((node(8, nics=4), 2)))
    assert names(wired, 3, 15) == ["nic 1 out", "nic 7 in"]
    assert latency(wired, 3, 15) == NIC.latency


def test_uplinks_of_a_leaf_are_its_nics_over_the_oversubscription() -> None:
    wired = interconnect(machine((node(8), 9), fabric=LeafSpine(4, oversubscription=2.0, hop=1e-6)))
    assert bandwidth(wired, "leaf 0 up") == bandwidth(wired, "leaf 1 down") == 4 * 8 * 50e9 / 2
    assert bandwidth(wired, "leaf 2 up") == 1 * 8 * 50e9 / 2
    assert names(wired, 0, 24) == ["nic 0 out", "nic 24 in"]
    assert names(wired, 0, 35) == ["nic 0 out", "leaf 0 up", "leaf 1 down", "nic 35 in"]
    assert latency(wired, 0, 35) == pytest.approx(NIC.latency + 1e-6)


def test_neighbours_on_a_rail_need_no_spine() -> None:
    wired = interconnect(machine((node(8), 8), fabric=LeafSpine(4, oversubscription=2.0, rail_optimized=True)))
    # Nodes 0 to 3 are unit 0; device 29 is device 5 of node 3, device 37 is device 5 of node 4.
    assert names(wired, 5, 29) == ["nic 5 out", "nic 29 in"]
    assert names(wired, 4, 29) == ["nic 4 out", "rail 0.4 up", "rail 0.5 down", "nic 29 in"]
    assert names(wired, 5, 37) == ["nic 5 out", "rail 0.5 up", "rail 1.5 down", "nic 37 in"]
    assert bandwidth(wired, "rail 1.5 up") == 4 * 50e9 / 2


def test_rails_of_nodes_with_fewer_nics_end() -> None:
    wired = interconnect(machine((node(4, nics=4), 1), (node(4, nics=2), 3), fabric=LeafSpine(2, rail_optimized=True)))
    rails = [wired.name(link) for link in range(wired.num_links) if wired.kind(link) == "rail up"]
    assert rails == [f"rail {name} up" for name in ("0.0", "0.1", "0.2", "0.3", "1.0", "1.1")]
    assert [bandwidth(wired, name) for name in rails] == [100e9, 100e9, 50e9, 50e9, 100e9, 100e9]


def test_pods_of_a_fat_tree_are_leaves_over_the_core() -> None:
    fabric = FatTree(2, 2, oversubscription=2.0, core_oversubscription=4.0, hop=1e-6)
    wired = interconnect(machine((node(8), 12), fabric=fabric))
    assert bandwidth(wired, "leaf 5 up") == 2 * 8 * 50e9 / 2
    assert bandwidth(wired, "pod 2 down") == 2 * bandwidth(wired, "leaf 5 up") / 4
    assert names(wired, 0, 8) == ["nic 0 out", "nic 8 in"]
    assert names(wired, 0, 16) == ["nic 0 out", "leaf 0 up", "leaf 1 down", "nic 16 in"]
    up_and_down = ["leaf 0 up", "pod 0 up", "pod 2 down", "leaf 5 down"]
    assert names(wired, 0, 88) == ["nic 0 out", *up_and_down, "nic 88 in"]
    assert latency(wired, 0, 88) == pytest.approx(NIC.latency + 2e-6)


def test_gateways_of_a_dragonfly() -> None:
    # Routers {0, 1}, {2, 3}, {4, 5}; the gateway of group g to group h is its router h % 2.
    wired = interconnect(machine((node(1), 12), fabric=Dragonfly(2, 2, FAST, SLOW)))
    assert names(wired, 0, 1) == ["nic 0 out", "nic 1 in"]
    assert names(wired, 0, 2) == ["nic 0 out", "router 0>1", "nic 2 in"]
    assert names(wired, 2, 4) == ["nic 2 out", "group 0>1", "nic 4 in"]
    assert names(wired, 0, 11) == ["nic 0 out", "group 0>2", "router 4>5", "nic 11 in"]
    assert names(wired, 4, 11) == ["nic 4 out", "group 1>2", "nic 11 in"]
    assert names(wired, 6, 8) == ["nic 6 out", "router 3>2", "group 1>2", "router 5>4", "nic 8 in"]
    assert latency(wired, 6, 8) == pytest.approx(NIC.latency + 2 * FAST.latency + SLOW.latency)
    assert bandwidth(wired, "router 3>2") == FAST.bandwidth and bandwidth(wired, "group 1>2") == SLOW.bandwidth


def test_a_dragonfly_of_one_group_is_as_large_as_it_needs() -> None:
    wired = interconnect(machine((node(1), 3), fabric=Dragonfly(1, 1000, FAST, SLOW)))
    assert sum(wired.kind(link) == "router" for link in range(wired.num_links)) == 3 * 2


def test_nics_are_those_of_each_kind_of_node() -> None:
    slow = Link(9e-6, 10e9, launch=20e-6)
    wired = interconnect(machine((node(2), 1), (node(4, nics=2, nic=slow), 1)))
    assert names(wired, 5, 1) == ["nic 3 out", "nic 1 in"]
    assert latency(wired, 5, 1) == 9e-6 and latency(wired, 1, 5) == NIC.latency
    assert bandwidth(wired, "nic 3 out") == 10e9 and bandwidth(wired, "nic 1 in") == 50e9
    assert wired.launch[wired.link("nic 2 in")] == 20e-6
