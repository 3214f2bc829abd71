"""Collectives in levels: inside nodes and between equal ranks, and in switches that reduce."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, phases
from meshwise.simulator.machine.topology import FatTree, LeafSpine, Link, Mesh, Switch

from .machines import MANY, PORT, latencies, loads, machine, time

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
LEVELS, SWITCHED = Algorithm.HIERARCHICAL, Algorithm.IN_SWITCH
NVLS = Switch(PORT, reduces=True)


def ends(group: list[int], part: str, sent: float, received: float) -> dict[str, float]:
    """Return the same bytes over both ways of every port or NIC."""
    return {f"{part} {d} {way}": load for d in group for way, load in (("out", sent), ("in", received))}


def test_two_nodes_of_two_ranks_in_levels() -> None:
    # 16 bytes: inside 1/2 * 16 = 8 in 1 step, between 2 * 1/2 * 16/2 = 8 over every NIC in 2 steps, inside again
    group = [0, 1, 4, 5]
    inside, between = ends(group, "device", 8.0, 8.0), ends(group, "nic", 8.0, 8.0)
    assert loads(machine(), REDUCE, LEVELS, group, 16.0) == [inside, between, inside]
    assert latencies(machine(), REDUCE, LEVELS, group) == [0.25, 1.0, 0.25]
    assert time(machine(), REDUCE, LEVELS, group, 16.0) == 0.25 + 1.0 + 1.0 + 4.0 + 0.25 + 1.0


@pytest.mark.parametrize("group", [[0, 1, 4, 5], [*range(12)], [0, 2, 4, 6, 8, 10]])
def test_an_all_reduce_in_levels_is_both_halves(group: list[int]) -> None:
    cluster = machine(network=Switch(Link(0.25, 8.0, launch=1.0)))
    half = loads(cluster, SCATTER, LEVELS, group, 12.0)
    assert loads(cluster, GATHER, LEVELS, group, 12.0) == half[::-1]
    [inside, between, again] = loads(cluster, REDUCE, LEVELS, group, 12.0)
    assert inside == again == half[0]
    assert between == pytest.approx({name: 2 * load for name, load in half[1].items()})


@given(st.integers(2, 4), st.integers(2, 4), st.sampled_from([REDUCE, GATHER, SCATTER]))
@MANY
def test_levels_move_no_more_over_nics_than_they_must(nodes: int, ranks: int, collective: Collective) -> None:
    """Each of ``m`` nodes takes in ``(m - 1) / m`` of the size for a gather, and twice that for an all-reduce."""
    group = [4 * node + rank for node in range(nodes) for rank in range(ranks)]
    total: dict[str, float] = {}
    for part in loads(machine(), collective, LEVELS, group, 24.0):
        for name, load in part.items():
            total[name] = total.get(name, 0.0) + load
    needed = (2 if collective is REDUCE else 1) * (nodes - 1) / nodes * 24.0
    assert sum(total[f"nic {rank} in"] for rank in range(ranks)) == pytest.approx(needed)


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


@pytest.mark.parametrize(
    ("algorithm", "group", "known"),
    [
        (LEVELS, [0, 1, 2], "ring, parameter_server"),
        (LEVELS, [0, 1, 4], "ring, tree, parameter_server"),
        (SWITCHED, [0, 1, 4, 5], "ring, tree, hierarchical, parameter_server"),
        (Algorithm.PAIRWISE, [0, 1], "ring, parameter_server"),
        (Algorithm.MEASURED, [0, 1], "ring, parameter_server"),
    ],
)
def test_a_group_refuses_what_it_cannot_run(algorithm: Algorithm, group: list[int], known: str) -> None:
    for network in (Switch(PORT), Mesh(PORT)):
        with pytest.raises(ValueError, match=f"all_reduce by {known}, met {algorithm}"):
            phases(machine(network=network), REDUCE, algorithm, np.array([group]))


def test_the_fabric_reduces_for_groups_of_as_many_ranks_on_every_node() -> None:
    cluster = machine(4, 4, network=NVLS, fabric=LeafSpine(2, reduces=True))
    assert SWITCHED in algorithms(cluster, REDUCE, np.array([0, 1, 4, 5]))
    assert SWITCHED in algorithms(cluster, REDUCE, np.array([0, 4]))
    assert SWITCHED not in algorithms(cluster, REDUCE, np.array([0, 1, 4]))
