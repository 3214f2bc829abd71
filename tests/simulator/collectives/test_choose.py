"""What a communication library makes of links: protocols, a rank's own part, and collectives in switches."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, candidates, choose, fastest_algorithms, idle_time, phases
from meshwise.simulator.machine.cluster import LOSSLESS, SIMPLE, Cluster, CommunicationLibrary, Protocol
from meshwise.simulator.machine.topology import LeafSpine, Link, Switch

from .machines import NIC, loads, machine, time

REDUCE, GATHER = Collective.ALL_REDUCE, Collective.ALL_GATHER
RING, TREE, SWITCHED = Algorithm.RING, Algorithm.TREE, Algorithm.IN_SWITCH
LL = Protocol("ll", launch=0.5, step=0.25, payload=0.5, messages=True)
LL128 = Protocol("ll128", launch=0.75, step=0.5, payload=0.75)
PORT = Link(latency=0.25, bandwidth=8.0, launch=1.0)


def driven(library: CommunicationLibrary, **options: object) -> Cluster:
    return replace(machine(**{"network": Switch(PORT, reduces=True)} | options), library=library)  # type: ignore[arg-type]


def test_the_fastest_protocol_moves_a_ring() -> None:
    # 4 ranks, all-gather: launch 1 s, 3 steps of 0.25 s, 3/4 of the size over ports of 8 byte/s
    cluster, group = driven(CommunicationLibrary((LL, LL128))), [0, 1, 2, 3]
    simple, ll, ll128 = 1.75, 0.5 + 0.75 * 0.25, 0.75 + 0.75 * 0.5
    # 0.75/8 = 0.09375 s a byte: Simple that, LL twice, LL128 4/3 of it
    assert time(cluster, GATHER, RING, group, 1.0) == pytest.approx(ll + 0.1875)
    assert time(cluster, GATHER, RING, group, 8.0) == pytest.approx(ll128 + 1.0)
    assert time(cluster, GATHER, RING, group, 80.0) == pytest.approx(simple + 7.5)
    # LL and LL128 meet at 0.4375 / 0.0625 = 7 bytes, LL128 and Simple at 0.625 / 0.03125 = 20
    for size in (6.9, 7.1):
        assert time(cluster, GATHER, RING, group, size) == pytest.approx(min(ll + 0.1875 * size, ll128 + 0.125 * size))


def test_messages_have_their_own_protocols() -> None:
    # LL128 would take 0.75 + 0.125 + 12/6 s; a send has LL, 0.5 + 0.0625 + 12/4, and Simple, 1.25 + 12/8
    cluster = driven(CommunicationLibrary((LL, LL128)))
    assert time(cluster, Collective.SEND, Algorithm.DIRECT, [0, 1], 12.0) == pytest.approx(1.25 + 1.5)
    assert time(cluster, Collective.SEND, Algorithm.DIRECT, [0, 1], 2.0) == pytest.approx(0.5625 + 0.5)
    assert time(cluster, Collective.SHIFT, Algorithm.DIRECT, [0, 1], 2.0) == pytest.approx(0.5625 + 0.5)


def test_each_level_of_a_hierarchy_has_its_own_protocol() -> None:
    # inside 2 ranks, 8 bytes: launch 1, a step of 0.25, 4/8 s; LL 0.5 + 0.0625 + 1. Between 2 nodes, 4 bytes
    # a rank: 2 steps of 0.5 and 4/2 s; LL 2 * 0.125 + 4, without a launch of NICs
    cluster = driven(CommunicationLibrary((LL,)))
    inside, between = 0.5625 + 1.0, 1.0 + 2.0
    assert time(cluster, REDUCE, Algorithm.HIERARCHICAL, [0, 1, 4, 5], 8.0) == pytest.approx(2 * inside + between)


def test_a_rank_copies_its_own_part() -> None:
    # all-gather of 4: 3 parts arrive, and the own one costs half of its bytes: (3 + 0.5)/4; all-reduce (6 + 0.5)/4
    cluster, group = driven(CommunicationLibrary(own=0.5)), [0, 1, 2, 3]
    for collective, share in ((GATHER, 3.5 / 4), (REDUCE, 6.5 / 4)):
        [bytes_over] = loads(cluster, collective, RING, group, 16.0)
        assert set(bytes_over.values()) == {16.0 * share}
    [bytes_over] = loads(cluster, Collective.ALL_TO_ALL, Algorithm.PAIRWISE, group, 16.0)
    assert [*bytes_over.values()] == pytest.approx([16.0 * 3.5 / 4] * 8)
    # between nodes the copy does not keep a NIC
    assert loads(cluster, GATHER, RING, [0, 4], 16.0) == loads(machine(), GATHER, RING, [0, 4], 16.0)
    exchange = Collective.ALL_TO_ALL, Algorithm.PAIRWISE, [0, 1, 4, 5]
    assert loads(cluster, *exchange, 16.0) == loads(machine(), *exchange, 16.0)


def test_switches_reach_a_part_of_the_ports_by_one_protocol() -> None:
    # 4 ranks, 32 bytes: 1 + 1/4 of them at half of 8 byte/s, 1 s of launch, 0.5 s once, 2 ways of 0.25 s
    cluster = driven(CommunicationLibrary((LL,), reduction=0.5, reduction_launch=0.5))
    assert time(cluster, REDUCE, SWITCHED, [0, 1, 2, 3], 32.0) == 1.0 + 0.5 + 0.5 + 40 / 4
    # LL would need 0.5 s less, but the switch does not have it
    assert time(cluster, REDUCE, SWITCHED, [0, 1, 2, 3], 1e-9) == pytest.approx(2.0)


def test_switches_in_nodes_and_a_tree_between_them() -> None:
    # 2 nodes of 4, 32 bytes: ports 1 + 1/4 of them; over the 4 NICs of a node one edge of the trees,
    # half of the bytes up and half down in each: 2 * 1/2 * 32 / 4 = 8 each way
    cluster, group = driven(CommunicationLibrary(reduction_launch=0.5)), [0, 1, 2, 3, 4, 5, 6, 7]
    [bytes_over] = loads(cluster, REDUCE, SWITCHED, group, 32.0)
    assert {load for name, load in bytes_over.items() if "device" in name} == {40.0}
    assert {load for name, load in bytes_over.items() if "nic" in name} == {8.0}
    # launch 1, once 0.5, through the switch twice 0.25, one level up and down 2 * 0.5; max(40/8, 8/2) s
    assert time(cluster, REDUCE, SWITCHED, group, 32.0) == 1.0 + 0.5 + 0.5 + 1.0 + 5.0
    assert SWITCHED not in algorithms(cluster, GATHER, np.array(group))
    assert SWITCHED not in algorithms(cluster, REDUCE, np.array([0, 4]))
    assert SWITCHED not in algorithms(cluster, REDUCE, np.array([0, 1, 4]))


PROTOCOLS = st.builds(Protocol, st.just("p"), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1), st.booleans())
LIBRARIES = st.builds(
    CommunicationLibrary,
    st.lists(PROTOCOLS, max_size=3).map(tuple),
    st.floats(0, 1),
    st.floats(0.5, 1),
    st.floats(0, 2),
)
GROUPS = st.sampled_from([[*range(3)], [*range(4)], [*range(8)]]) | st.lists(
    st.integers(0, 31), min_size=2, max_size=16, unique=True
)


@given(LIBRARIES, GROUPS, st.sampled_from([REDUCE, GATHER, Collective.ALL_TO_ALL]), st.lists(st.floats(1e-3, 1e6)))
@settings(max_examples=200, deadline=None)
def test_time_rises_with_size_and_nothing_is_faster_than_its_links(
    library: CommunicationLibrary, group: list[int], collective: Collective, sizes: list[float]
) -> None:
    cluster = driven(library, nodes=8)
    for algorithm in algorithms(cluster, collective, np.array(group)):
        taken = [time(cluster, collective, algorithm, group, size) for size in sorted(sizes)]
        assert all(before <= after for before, after in pairwise(taken))
        parts = phases(replace(cluster, library=LOSSLESS), collective, algorithm, np.array([group]))
        still = [part._replace(latency=np.zeros(1), launch=None) for part in parts]
        assert all(
            seconds >= idle_time(cluster, still, 0, size) * (1 - 1e-9)
            for seconds, size in zip(taken, sorted(sizes), strict=True)
        )


@given(LIBRARIES, GROUPS, st.sampled_from([REDUCE, GATHER]), st.floats(1e-3, 1e6))
@settings(max_examples=200, deadline=None)
def test_what_is_chosen_is_fastest_and_never_left_out(
    library: CommunicationLibrary, group: list[int], collective: Collective, size: float
) -> None:
    cluster = driven(library, nodes=8, fabric=LeafSpine(2, oversubscription=2.0))
    able = [a for a in candidates(cluster, collective) if a in algorithms(cluster, collective, np.array(group))]
    least = min(time(cluster, collective, a, group, size) for a in able)
    assert time(cluster, collective, choose(cluster, collective, np.array(group), size), group, size) == least
    kept = fastest_algorithms(cluster, collective, np.array(group))
    assert min(time(cluster, collective, a, group, size) for a in kept) <= least * (1 + 1e-9)


def test_ways() -> None:
    assert list(CommunicationLibrary((LL, LL128)).list_protocol_costs(3.0, 1.0, False)) == [
        (3.0, 1.0),
        (1.0, 2.0),
        (1.75, 4 / 3),
    ]
    assert list(CommunicationLibrary((LL, LL128)).list_protocol_costs(3.0, 1.0, True)) == [(3.0, 1.0), (1.0, 2.0)]
    assert list(CommunicationLibrary((LL, LL128)).list_protocol_costs(3.0, None, False)) == [(3.0, 1.0)]
    assert SIMPLE.latency(3.0, 1.0) == 3.0
    assert NIC.launch == 0.0


@pytest.mark.parametrize("payload", [0.0, 1.5, float("nan")])
def test_a_protocol_moves_some_of_its_bytes(payload: float) -> None:
    with pytest.raises(ValueError, match=r"payload in \(0, 1\]"):
        Protocol("p", 1.0, 1.0, payload)


@pytest.mark.parametrize(("launch", "step"), [(-1e-9, 1.0), (1.0, -1e-9)])
def test_a_protocol_takes_no_negative_time(launch: float, step: float) -> None:
    with pytest.raises(ValueError, match="launch >= 0, step >= 0"):
        Protocol("p", launch, step, 1.0)


def test_a_library_may_copy_a_byte_twice_and_lose_nothing() -> None:
    assert CommunicationLibrary(own=2.0, reduction=1.0, reduction_launch=0.0).own == 2.0


@pytest.mark.parametrize(
    "values", [{"own": -1.0}, {"own": 3.0}, {"reduction": 0.0}, {"reduction": 1.5}, {"reduction_launch": -1.0}]
)
def test_a_library_loses_no_more_than_there_is(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"own lies in \[0, 2\]"):
        CommunicationLibrary(**values)
