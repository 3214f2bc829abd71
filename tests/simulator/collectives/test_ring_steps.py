"""A ring as one bundle against all of its steps: chunks that wait for the step before, over shared links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import phases
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import LeafSpine, Link

from .fluid import Message, run
from .machines import machine

NIC = Link(latency=1e-3, bandwidth=2.0)
SIZE = 64.0


def steps(cluster: Cluster, group: list[int]) -> list[Message]:
    """Return ``2 * (n - 1)`` steps of ``n`` messages; each waits for its sender's last one, and for its chunk."""
    ranks, messages = len(group), []
    network = interconnect(cluster)
    for step in range(2 * (ranks - 1)):
        for rank in range(ranks):
            ends = np.array([group[rank]]), np.array([group[(rank + 1) % ranks]])
            routes = network.routes(*ends)
            usage = dict(zip(routes.link.tolist(), (routes.share * SIZE / ranks).tolist(), strict=True))
            latency = float(network.latency[routes.link] @ routes.share)
            before = (step - 1) * ranks
            after = (before + rank, before + (rank - 1) % ranks) if step else ()
            messages.append(Message(usage, latency, after))
    return messages


def bundle(cluster: Cluster, group: list[int]) -> Message:
    [phase] = phases(cluster, Collective.ALL_REDUCE, Algorithm.RING, np.array([group]))
    return Message(dict(zip(phase.link.tolist(), (phase.load * SIZE).tolist(), strict=True)), float(phase.latency[0]))


def finish(cluster: Cluster, groups: list[list[int]]) -> tuple[float, float]:
    """Return when rings that start together have all ended: as bundles, and step by step."""
    capacity = dict(enumerate(interconnect(cluster).bandwidth.tolist()))
    messages: list[Message] = []
    for group in groups:
        first = len(messages)
        messages += [
            Message(m.usage, m.latency, tuple(first + other for other in m.after)) for m in steps(cluster, group)
        ]
    return run([bundle(cluster, group) for group in groups], capacity), run(messages, capacity)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_alone_the_two_are_equal(ranks: int) -> None:
    bundled, stepped = finish(machine(8, 1, nic=NIC), [[*range(ranks)]])
    assert bundled == pytest.approx(stepped, rel=1e-9)


@given(st.permutations(range(8)), st.integers(2, 8), st.sampled_from([2, 4]), st.sampled_from([1.0, 2.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_one_ring_in_any_order_over_a_narrow_spine(
    order: list[int], ranks: int, nodes_per_leaf: int, oversubscription: float
) -> None:
    cluster = machine(8, 1, nic=NIC, fabric=LeafSpine(nodes_per_leaf, oversubscription))
    bundled, stepped = finish(cluster, [order[:ranks]])
    assert bundled == pytest.approx(stepped, rel=2e-3)


@pytest.mark.parametrize("oversubscription", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4, 1, 5], [2, 6, 3, 7]], [[0, 4], [1, 5], [2, 6]]]
)
def test_rings_that_share_a_spine(groups: list[list[int]], oversubscription: float) -> None:
    cluster = machine(8, 1, nic=NIC, fabric=LeafSpine(4, oversubscription))
    bundled, stepped = finish(cluster, groups)
    assert bundled == pytest.approx(stepped, rel=2e-3)
