"""Switches that reduce: in a node and in the fabric, what every port sends and receives."""

import numpy as np
import pytest

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, phases
from meshwise.simulator.machine.topology import FatTree, LeafSpine, Switch

from .machines import PORT, ends, latencies, loads, machine, time

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


LEVELS, SWITCHED = Algorithm.HIERARCHICAL, Algorithm.IN_SWITCH


NVLS = Switch(PORT, reduces=True)


def test_a_switch_that_reduces() -> None:
    # 4 ranks, 32 bytes: all send and receive 32 * (1 + 1/4) = 40 bytes, there and back twice
    cluster, group = machine(network=NVLS), [0, 1, 2, 3]
    assert loads(cluster, REDUCE, SWITCHED, group, 32.0) == [ends(group, "device", 40.0, 40.0)]
    assert time(cluster, REDUCE, SWITCHED, group, 32.0) == 2 * 0.25 + 5.0
    # a part is a quarter: 32 sent and 8 received, and the mirror image
    assert loads(cluster, SCATTER, SWITCHED, group, 32.0) == [ends(group, "device", 32.0, 8.0)]
    assert loads(cluster, GATHER, SWITCHED, group, 32.0) == [ends(group, "device", 8.0, 32.0)]
    assert latencies(cluster, GATHER, SWITCHED, group) == [0.25]


@pytest.mark.parametrize("network", [NVLS, Switch(PORT)])
def test_a_fabric_that_reduces(network: Switch) -> None:
    # 2 leaves of 2 nodes of 2 ranks, 16 bytes: every NIC sends and receives 16/2 = 8 bytes once, and
    # so does each rank's tree over the cables between leaf and spine: 2 * 8 up and down
    cluster = machine(4, 2, network=network, fabric=LeafSpine(2, hop=0.125, reduces=True))
    group = [*range(8)]
    scatter, between, gather = loads(cluster, REDUCE, SWITCHED, group, 16.0)
    assert {name: load for name, load in between.items() if "nic" in name} == ends(group, "nic", 8.0, 8.0)
    assert [load for name, load in between.items() if "nic" not in name] == [16.0] * 4
    assert latencies(cluster, REDUCE, SWITCHED, group)[1] == 0.5 + 0.125
    sent, received = (16.0, 8.0) if network.reduces else (8.0, 8.0)
    assert scatter == ends(group, "device", sent, received)
    assert gather == ends(group, "device", received, sent)


def test_the_fabric_adds_in_the_order_of_its_leaves() -> None:
    """Ranks in any order put the same on a tree of switches; a ring would cross the core at every hop."""
    cluster = machine(8, 1, fabric=FatTree(2, 2, reduces=True))
    in_order = loads(cluster, REDUCE, SWITCHED, [*range(8)], 8.0)
    assert loads(cluster, REDUCE, SWITCHED, [0, 4, 2, 6, 1, 5, 3, 7], 8.0) == in_order
    assert {load for part in in_order for load in part.values()} == {8.0}


@pytest.mark.parametrize("other", [[0, 1, 2, 3], [2, 6, 10, 14]])  # in one node, and one rank a node
def test_groups_of_both_kinds_at_once(other: list[int]) -> None:
    cluster = machine(4, 4, network=NVLS, fabric=LeafSpine(2, reduces=True))
    both = phases(cluster, REDUCE, SWITCHED, np.array([other, [0, 1, 4, 5]]))
    for index, group in enumerate([other, [0, 1, 4, 5]]):
        alone = phases(cluster, REDUCE, SWITCHED, np.array([group]))
        for phase, part in zip(both, alone, strict=False):
            assert phase.latency[index] == part.latency[0]
            assert phase.load[phase.group == index].tolist() == part.load.tolist()
    assert [part.latency[0] for part in both[1:]] == [0.0, 0.0]


def test_the_fabric_reduces_for_groups_of_as_many_ranks_on_every_node() -> None:
    cluster = machine(4, 4, network=NVLS, fabric=LeafSpine(2, reduces=True))
    assert SWITCHED in algorithms(cluster, REDUCE, np.array([0, 1, 4, 5]))
    assert SWITCHED in algorithms(cluster, REDUCE, np.array([0, 4]))
    assert SWITCHED not in algorithms(cluster, REDUCE, np.array([0, 1, 4]))
