"""The way to host memory and back."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings

from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import Link, PcieTree, Torus

from .machines import FAST, SLOW, bandwidth, clusters, machine, node, one

SLOT = Link(8e-6, 25e9)


def host(per_switch: int = 2, memory_bandwidth: float = 400e9, numa_nodes: int = 2) -> Host:
    return Host("host", 1e12, memory_bandwidth, numa_nodes=numa_nodes, pcie=Pcie(SLOT, per_switch))


def to_host(wired: Interconnect, device: int) -> list[str]:
    return [wired.name(link) for link in wired.to_host(np.array([device])).link.tolist()]


def from_host(wired: Interconnect, device: int) -> list[str]:
    return [wired.name(link) for link in wired.from_host(np.array([device])).link.tolist()]


def test_a_copy_crosses_slot_uplink_and_memory() -> None:
    wired = interconnect(machine((node(8, host=host()), 2)))
    # Device 13 is device 5 of node 1: switch 4 + 5 // 2, host 1, NUMA node 5 * 2 // 8.
    assert to_host(wired, 13) == ["pcie 13 out", "pcie switch 6 out", "memory 1.1 in"]
    assert from_host(wired, 13) == ["memory 1.1 out", "pcie switch 6 in", "pcie 13 in"]
    assert bandwidth(wired, "pcie 13 out") == bandwidth(wired, "pcie switch 6 in") == 25e9
    assert bandwidth(wired, "memory 1.1 in") == 400e9 / 2


def test_the_latency_of_the_slot_is_paid_once_and_by_copies_only() -> None:
    wired = interconnect(machine((node(8, host=host()), 2)))
    assert wired.latency[wired.to_host(np.array([3])).link].sum() == SLOT.latency
    assert wired.latency[wired.from_host(np.array([3])).link].sum() == SLOT.latency
    assert wired.latency[wired.routes(np.array([3]), np.array([11])).link].sum() == 5e-6


def test_nics_share_the_slot() -> None:
    wired = interconnect(machine((node(8, host=host()), 2)))
    assert [name for name, _ in one(wired, 3, 12)] == ["pcie 3 out", "nic 3 out", "nic 12 in", "pcie 12 in"]
    assert [name for name, _ in one(wired, 3, 4)] == ["device 3 out", "device 4 in"]


def test_parts_that_limit_nothing_are_no_links() -> None:
    assert to_host(interconnect(machine((node(2, host=host(1, inf)), 1))), 1)[:1] == ["pcie 1 out"]
    free = Host("host", 1e12, inf, pcie=Pcie(Link(0.0, 25e9)))
    assert to_host(interconnect(machine((node(2, host=free), 1))), 1) == ["pcie 1 out"]
    assert to_host(interconnect(machine((node(2, host=Host("host", 1e12, 100e9)), 1))), 1) == ["memory 0.0 in"]
    assert to_host(interconnect(machine((node(2), 1))), 1) == []


def test_memory_without_limit_is_as_wide_as_its_slots() -> None:
    wired = interconnect(machine((node(8, host=host(1, inf)), 1)))
    assert bandwidth(wired, "memory 0.1 out") == 4 * 25e9


def test_hosts_of_a_node_have_their_own_switches_and_memories() -> None:
    # 6 devices on 2 hosts of 3: switches {0, 1}, {2} and {3, 4}, {5}.
    wired = interconnect(machine((node(6, host=host(2, numa_nodes=1), hosts=2), 1)))
    ways = [to_host(wired, device)[1:] for device in range(6)]
    assert ways == [[f"pcie switch {switch} out", f"memory {switch // 2}.0 in"] for switch in (0, 0, 1, 2, 2, 3)]


def test_devices_on_a_torus_have_hosts() -> None:
    wired = interconnect(machine((node(4, host=host(1)), 2), fabric=Torus((4, 2), FAST)))
    assert to_host(wired, 5) == ["pcie 5 out", "memory 1.0 in"]
    assert {wired.kind(link) for link in range(wired.num_links)} == {
        *("pcie out", "pcie in", "memory in", "memory out"),
        *("torus x+", "torus x-", "torus y+", "torus y-"),
    }


def test_a_tree_and_its_host_agree_on_switches() -> None:
    with pytest.raises(ValueError, match=r"same devices_per_switch, met 4 in the tree and 2 in host"):
        Interconnect(machine((node(8, PcieTree(FAST, 4, 1, SLOW), host=host(2)), 1)))


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_copies_follow_the_graph_there_and_back(cluster: Cluster) -> None:
    wired, devices = Interconnect(cluster), np.arange(cluster.num_devices)
    graph, there, back = wired.graph(), wired.to_host(devices), wired.from_host(devices)
    for device in devices.tolist():
        here = {f"device {device}"}
        out, into = there.link[there.pair == device].tolist(), back.link[back.pair == device].tolist()
        for link in out:
            here = {head for tail, head, edge in graph.edges(data="link") if edge == link and tail in here}
        assert len(here) == 1
        for link in into:
            here = {head for tail, head, edge in graph.edges(data="link") if edge == link and tail in here}
        assert f"device {device}" in here
        mirrored = [_mirrored(wired.name(link)) for link in reversed(into)]
        assert [wired.name(link) for link in out] == mirrored
    assert (there.share == 1).all() and (back.share == 1).all()


def _mirrored(name: str) -> str:
    return name[:-2] + "out" if name.endswith("in") else name[:-3] + "in"
