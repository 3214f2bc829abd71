"""What holds for all collectives: bounds, symmetry, groups at once, the choice of an algorithm; and measured curves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.collectives.choose import algorithms, choose, idle_time, measured_time, phases
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Dragonfly, FatTree, Graph, LeafSpine, Link, Mesh, Ring, Switch, Torus

from .collectives.machines import MANY, NIC, PORT, machine, time

SWITCH = Switch(PORT, reduces=True)
LEAVES = LeafSpine(2, oversubscription=2.0, rail_optimized=True, hop=0.125, reduces=True)
STAR = tuple(edge for d in range(32) for edge in ((f"device {d}", "hub", PORT), ("hub", f"device {d}", NIC)))
CLUSTERS = (
    machine(8, 4),
    machine(8, 4, network=SWITCH, nics=2, fabric=LEAVES),
    machine(8, 4, network=Mesh(PORT), fabric=FatTree(2, 2, core_oversubscription=2.0)),
    machine(8, 4, network=Ring(PORT), fabric=Dragonfly(2, 2, NIC, NIC)),
    machine(8, 4, fabric=Torus((4, 2, 4), PORT)),
    machine(8, 4, fabric=Graph(STAR)),
)
REDUCE = Collective.ALL_REDUCE


def run(cluster: Cluster, collective: Collective, algorithm: Algorithm, groups: list[list[int]]) -> tuple[Phase, ...]:
    return phases(cluster, collective, algorithm, np.array(groups))


@st.composite
def calls(draw: st.DrawFn, num_groups: int = 1) -> tuple[Cluster, Collective, Algorithm, list[list[int]]]:
    """Return a cluster, and disjoint groups that can all run a collective by an algorithm."""
    cluster, collective = draw(st.sampled_from(CLUSTERS)), draw(st.sampled_from(Collective))
    ranks = 2 if collective is Collective.SEND else draw(st.sampled_from([2, 3, 4, 8]))
    devices = [*range(32)] if draw(st.booleans()) else draw(st.permutations(range(32)))
    groups = [devices[first : first + ranks] for first in range(0, num_groups * ranks, ranks)]
    known = [set(algorithms(cluster, collective, np.array(group))) for group in groups]
    return cluster, collective, draw(st.sampled_from(sorted(set.intersection(*known)))), groups


@given(calls(num_groups=4))
@MANY
def test_groups_at_once_cost_what_they_cost_one_at_a_time(
    call: tuple[Cluster, Collective, Algorithm, list[list[int]]],
) -> None:
    cluster, collective, algorithm, groups = call
    together = run(cluster, collective, algorithm, groups)
    assert all(np.all(np.diff(phase.group * 10**6 + phase.link) > 0) for phase in together)
    for index, group in enumerate(groups):
        alone = run(cluster, collective, algorithm, [group])
        for phase, part in zip(together, alone, strict=False):
            rows = phase.group == index
            assert phase.latency[index] == pytest.approx(part.latency[0], rel=1e-12)
            assert phase.link[rows].tolist() == part.link.tolist()
            assert phase.load[rows] == pytest.approx(part.load, rel=1e-12)
        assert not any(index in phase.group or phase.latency[index] for phase in together[len(alone) :])


@given(calls())
@MANY
def test_every_phase_takes_time(call: tuple[Cluster, Collective, Algorithm, list[list[int]]]) -> None:
    for phase in run(*call):
        assert np.all(phase.load > 0)
        assert phase.latency[0] > 0
        assert len(phase.load)


@given(calls(), st.floats(1, 1e6), st.floats(1, 10))
@MANY
def test_more_bytes_take_longer(
    call: tuple[Cluster, Collective, Algorithm, list[list[int]]], size: float, factor: float
) -> None:
    parts = run(*call)
    assert idle_time(call[0], parts, 0, size * factor) >= idle_time(call[0], parts, 0, size) > 0
    assert idle_time(call[0], parts, 0, 0.0) == 0


def least_bytes(collective: Collective, parts: int) -> float:
    """Return the bytes, for one of size, that one of several equal parts of a group must take in."""
    if collective in (Collective.SEND, Collective.BROADCAST):
        return 1.0 / parts
    return (2 if collective is REDUCE else 1) * (parts - 1) / parts


@given(
    st.sampled_from([c for c in Collective if c is not Collective.SEND]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.permutations(range(8)),
)
@settings(max_examples=300, deadline=None)
def test_nothing_beats_the_bandwidth_bound(collective: Collective, nodes: int, ranks: int, order: list[int]) -> None:
    """A rank behind one port, and a node behind its NICs, take in what they lack, unless switches add it up.

    Patarasuk and Yuan 2009, theorem 1: ``2 * (n - 1) / n`` of the size for an all-reduce.
    """
    group = [4 * node + rank for node in order[:nodes] for rank in range(ranks)]
    if len(group) < 2:
        return
    for cluster in CLUSTERS[:4]:
        nics = len({rank * cluster.first_node.nics // 4 for rank in range(ranks)})
        bandwidth = NIC.bandwidth * nics if nodes > 1 else PORT.bandwidth
        if isinstance(cluster.first_node.network, Mesh | Ring) and nodes == 1:
            bandwidth *= min(len(group) - 1, 3) if isinstance(cluster.first_node.network, Mesh) else 2
        for algorithm in algorithms(cluster, collective, np.array(group)):
            if algorithm is not Algorithm.IN_SWITCH:
                bound = least_bytes(collective, nodes if nodes > 1 else ranks) * 1e6 / bandwidth
                assert time(cluster, collective, algorithm, group, 1e6) >= bound * (1 - 1e-12)


@given(calls(), st.permutations(range(4)), st.permutations(range(2)), st.permutations(range(8)))
@settings(max_examples=300, deadline=None)
def test_equal_leaves_and_nodes_may_change_places(
    call: tuple[Cluster, Collective, Algorithm, list[list[int]]], leaves: list[int], nodes: list[int], ranks: list[int]
) -> None:
    """Leaves among leaves, the nodes of a leaf, and the order of ranks inside nodes: nothing changes."""
    _, collective, algorithm, [group] = call
    for cluster in CLUSTERS[:2]:
        if algorithm not in algorithms(cluster, collective, np.array(group)) or algorithm is Algorithm.PARAMETER_SERVER:
            continue
        moved = [(2 * leaves[d // 8] + nodes[d // 4 % 2]) * 4 + d % 4 for d in group]
        by_node = sorted(range(len(moved)), key=lambda i: ([x // 4 for x in moved].index(moved[i] // 4), ranks[i % 8]))
        shuffled = [moved[i] for i in by_node]
        same = time(cluster, collective, algorithm, group, 64.0)
        assert time(cluster, collective, algorithm, moved, 64.0) == pytest.approx(same, rel=1e-12)
        if collective not in (Collective.SEND, Collective.SHIFT):  # these go from each rank to the next
            assert time(cluster, collective, algorithm, shuffled, 64.0) == pytest.approx(same, rel=1e-12)


@given(calls(num_groups=3), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_a_group_among_others_takes_as_long_as_alone(
    call: tuple[Cluster, Collective, Algorithm, list[list[int]]], index: int
) -> None:
    cluster, collective, algorithm, groups = call
    among = idle_time(cluster, run(cluster, collective, algorithm, groups), index, 64.0)
    assert among == pytest.approx(time(cluster, collective, algorithm, groups[index], 64.0), rel=1e-12)


def test_one_rank_moves_nothing() -> None:
    assert run(machine(), REDUCE, Algorithm.RING, [[3], [4]]) == ()
    assert choose(machine(), REDUCE, np.array([3]), 8.0) is Algorithm.RING


@pytest.mark.parametrize("group", [[0, 1, 1], [3, 0, 3]])
def test_ranks_are_on_different_devices(group: list[int]) -> None:
    with pytest.raises(ValueError, match="different devices"):
        run(machine(), REDUCE, Algorithm.RING, [group])


def test_small_messages_take_the_tree_and_equal_times_the_ring() -> None:
    cluster = machine(8, 1)
    # 8 nodes: 14 ring steps of 0.5 s against 2 * 3 levels; the same bytes
    assert choose(cluster, REDUCE, np.arange(8), 1e-3) is Algorithm.TREE
    # 2 nodes: 2 steps and 2 levels
    assert choose(cluster, REDUCE, np.arange(2), 8.0) is Algorithm.RING
    assert choose(cluster, Collective.ALL_TO_ALL, np.arange(4), 8.0) is Algorithm.PAIRWISE
    assert choose(cluster, Collective.SEND, np.array([0, 5]), 8.0) is Algorithm.DIRECT


def test_rounding_breaks_no_tie() -> None:
    """Without latency ring and tree take the same time on nodes of one rank, up to the order of sums."""
    cluster = machine(8, 4, network=Switch(Link(0.0, 8.0)), nic=Link(0.0, 2.0))
    for nodes in range(2, 9):
        assert choose(cluster, REDUCE, 4 * np.arange(nodes), 1e3) is Algorithm.RING
        # of 2 m ranks on m nodes a ring sends 2 (2 m - 1) / 2 m of the size over a node's NICs; of the two trees, each
        # with half of the size, a node that is a leaf of one and has a parent and two children in the other sends
        # 1 / 2 (1 + 3) = 2 from four nodes on; of two nodes it is 1 / 2 (1 + 1), of three 1 / 2 (1 + 2)
        group = np.array([4 * node + rank for node in range(nodes) for rank in range(2)])
        expected = Algorithm.TREE if nodes < 4 else Algorithm.RING
        assert choose(cluster, REDUCE, group, 1e3) is expected


@given(
    st.sampled_from(CLUSTERS), st.lists(st.integers(0, 31), min_size=2, max_size=16, unique=True), st.floats(1e-3, 1e6)
)
@settings(max_examples=300, deadline=None)
def test_the_fastest_is_chosen(cluster: Cluster, group: list[int], size: float) -> None:
    chosen = choose(cluster, REDUCE, np.array(group), size)
    known = [a for a in algorithms(cluster, REDUCE, np.array(group)) if a is not Algorithm.PARAMETER_SERVER]
    if cluster.first_node.network != Mesh(PORT):
        known = [a for a in known if a is not Algorithm.HIERARCHICAL]
    fastest = min(time(cluster, REDUCE, a, group, size) for a in known)
    assert time(cluster, REDUCE, chosen, group, size) <= fastest * (1 + 1e-8)


def test_a_switch_that_reduces_pays_from_four_ranks() -> None:
    # 1 + 1/n of the bytes against 2 * (n - 1)/n: equal for 3 ranks, where latency decides
    cluster = machine(1, 4, network=Switch(Link(0.0, 8.0), reduces=True))
    chosen = [choose(cluster, REDUCE, np.arange(ranks), 1e6) for ranks in (2, 3, 4)]
    assert chosen == [Algorithm.RING, Algorithm.RING, Algorithm.IN_SWITCH]


def test_the_user_fixes_an_algorithm_where_groups_can_run_it() -> None:
    cluster = replace(machine(), algorithms=((REDUCE, Algorithm.HIERARCHICAL),))
    assert choose(cluster, REDUCE, np.array([0, 1, 4, 5]), 8.0) is Algorithm.HIERARCHICAL
    assert choose(cluster, REDUCE, np.array([0, 1]), 8.0) is Algorithm.RING
    wrong = replace(machine(), algorithms=((Collective.ALL_GATHER, Algorithm.TREE),))
    with pytest.raises(ValueError, match="all_gather runs by ring, in_switch, hierarchical, met tree"):
        choose(wrong, Collective.ALL_GATHER, np.arange(2), 8.0)


def test_a_measured_curve_replaces_the_model_for_its_group_only() -> None:
    curve = CollectiveCurve(REDUCE, 2, ((1.0, 7.0),))
    cluster = replace(machine(), collectives=(curve,), algorithms=((REDUCE, Algorithm.PARAMETER_SERVER),))
    assert choose(cluster, REDUCE, np.arange(2), 1.0) is Algorithm.MEASURED
    assert choose(cluster, REDUCE, np.arange(3), 1.0) is Algorithm.PARAMETER_SERVER
    assert measured_time(cluster, REDUCE, 2, 1.0) == 7.0
    assert measured_time(cluster, REDUCE, 2, 0.0) == 0.0
    assert measured_time(cluster, REDUCE, 3, 1.0) is None
    assert measured_time(cluster, Collective.BROADCAST, 2, 1.0) is None


def test_groups_are_rows_that_can_run_the_algorithm() -> None:
    cluster = machine(2, 2)
    with pytest.raises(ValueError, match=r"groups are rows of devices, met an array of shape \(2,\)"):
        phases(cluster, Collective.ALL_REDUCE, Algorithm.RING, np.array([0, 1]))
    with pytest.raises(ValueError, match="a send has 2 ranks, met 3"):
        phases(cluster, Collective.SEND, Algorithm.DIRECT, np.array([[0, 1, 2]]))
    with pytest.raises(ValueError, match=r"the group of \[0, 1\] runs all_reduce by ring, parameter_server, met tree"):
        phases(cluster, Collective.ALL_REDUCE, Algorithm.TREE, np.array([[0, 1]]))


CURVE = CollectiveCurve(Collective.ALL_REDUCE, 4, ((100.0, 2.0), (200.0, 3.0), (400.0, 9.0)))


@pytest.mark.parametrize(
    ("size", "seconds"),
    # 150 is half way from 2 to 3, 300 from 3 to 9; above 400 bytes the rate is (9 - 3) / 200 s a byte
    [(1.0, 2.0), (100.0, 2.0), (150.0, 2.5), (200.0, 3.0), (300.0, 6.0), (400.0, 9.0), (500.0, 12.0)],
)
def test_a_curve_is_straight_between_its_points(size: float, seconds: float) -> None:
    assert CURVE.time(size) == pytest.approx(seconds)


def test_one_point_says_a_rate_and_a_falling_end_no_negative_one() -> None:
    assert CollectiveCurve(Collective.SEND, 2, ((100.0, 2.0),)).time(300.0) == pytest.approx(6.0)
    assert CollectiveCurve(Collective.SEND, 2, ((100.0, 2.0), (200.0, 1.0))).time(300.0) == 1.0


@pytest.mark.parametrize(
    "points", [(), ((1.0, 1.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),), ((0.0, 1.0),)]
)
def test_points_out_of_order_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="all_reduce over 4 ranks: sizes rise and times are positive"):
        CollectiveCurve(Collective.ALL_REDUCE, 4, points)
