"""What is worked out once for groups that lie alike is what each of them does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import can_run, phases
from meshwise.simulator.collectives.placement import GroupShapes
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar, Fabric, Graph, LeafSpine

from ..interconnect.machines import clusters
from .machines import machine


@st.composite
def groups_on_clusters(draw: st.DrawFn) -> tuple[Cluster, np.ndarray]:
    """Random groups of one size on a random cluster: some of them others' devices moved by whole nodes."""
    cluster = draw(clusters().filter(lambda each: each.num_devices > 1 and not isinstance(each.fabric, Graph)))
    count = cluster.num_devices
    size = draw(st.integers(2, min(count, 5)))
    each = st.permutations(range(count)).map(lambda devices: devices[:size])
    rows = [np.array(row) for row in draw(st.lists(each, min_size=1, max_size=4))]
    moved = [(row + shift * cluster.first_node.devices) % count for row in rows for shift in range(3)]
    return cluster, np.array(draw(st.permutations(moved)))


@given(groups_on_clusters(), st.sampled_from(list(Collective)))
@settings(max_examples=80, deadline=None)
def test_spread_phases_are_those_of_every_group(case: tuple[Cluster, np.ndarray], collective: Collective) -> None:
    cluster, groups = case
    alike = GroupShapes(cluster, groups)
    assert np.array_equal(
        alike.shape[[alike.shape.tolist().index(s) for s in range(len(alike.numbers))]], alike.numbers
    )
    for algorithm in Algorithm:
        runs = can_run(cluster, collective, algorithm, groups)
        if not runs.all() or (collective is Collective.SEND and groups.shape[1] != 2):
            continue
        every = phases(cluster, collective, algorithm, groups)
        once = phases(cluster, collective, algorithm, alike.representatives)
        for whole, phase in zip(every, once, strict=True):
            spread = alike.spread_phase(phase)
            assert np.array_equal(spread.group, whole.group)
            assert np.array_equal(spread.link, whole.link)
            assert spread.load == pytest.approx(whole.load, rel=1e-12)
            assert spread.latency == pytest.approx(whole.latency, rel=1e-12)


@given(groups_on_clusters(), st.data())
@settings(max_examples=20, deadline=None)
def test_some_of_the_groups_lie_as_all_do(case: tuple[Cluster, np.ndarray], data: st.DataObject) -> None:
    cluster, groups = case
    alike = GroupShapes(cluster, groups)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(groups) - 1), min_size=1))))
    some = alike.select(chosen)
    assert np.array_equal(some.numbers[some.shape], alike.shape[chosen])
    assert np.array_equal(some.representatives[some.shape[0]], groups[chosen[0]])


@pytest.mark.parametrize(
    ("fabric", "first", "second", "same"),
    [
        (Crossbar(), [0, 1], [6, 7], True),  # a node each
        (Crossbar(), [0, 1], [1, 0], False),  # other places
        (Crossbar(), [0, 2], [2, 6], True),  # two nodes each, in order
        (Crossbar(), [0, 2], [6, 2], False),  # against the order
        (Crossbar(), [0, 2], [0, 3], False),
        (LeafSpine(2, 1.0), [0, 2], [4, 6], True),  # below one leaf each
        (LeafSpine(2, 1.0), [0, 2], [2, 4], False),  # nodes 1 and 2 are below two
        (LeafSpine(2, 1.0), [0, 4], [2, 6], True),  # below two leaves each
    ],
)
def test_groups_lie_alike_where_nodes_can_be_renamed(
    fabric: Fabric, first: list[int], second: list[int], same: bool
) -> None:
    shape = GroupShapes(machine(nodes=4, devices=2, fabric=fabric), np.array([first, second])).shape
    assert (shape[0] == shape[1]) == same
