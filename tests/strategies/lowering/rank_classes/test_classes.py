"""Ranks that do the same are one class: on any machine a folded step is the unfolded one, and a straggler is apart."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import step_time
from meshwise.simulator.machine.topology import Crossbar, Dragonfly, FatTree, LeafSpine, Link, Mesh, Ring, Torus
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ...problems import problem
from .test_machine_effects import on_cluster

LAYOUT = Layout(data=2, tensor=2, pipeline=2)


@pytest.mark.parametrize(("slow", "classes"), [((), 2), ((3,), 8), ((3, 12), 12)])
def test_a_straggler_splits_the_classes(slow: tuple[int, ...], classes: int) -> None:
    # 2 stages x 2 replicas x 4 tensor ranks: the straggler, its tensor group, its data group and the rest,
    # on its own stage and on the other one
    small = on_cluster(problem(nodes=2), speeds=tuple((device, 0.9) for device in slow))
    program = lower(small, complete(small, Layout(data=2, tensor=4, pipeline=2)))
    assert len(program.rank_classes) == classes


@pytest.mark.parametrize(
    "fabric",
    [LeafSpine(1, 4.0), LeafSpine(2, 2.0, rail_optimized=True), FatTree(1, 2, 2.0, 2.0), Torus((4, 2), Link(1e-6, 1e9)),
     Torus((2, 2, 2), Link(1e-6, 1e9)), Dragonfly(1, 2, Link(1e-6, 1e8), Link(1e-6, 1e8))],
)  # fmt: skip
def test_every_fabric_folds_as_it_unfolds(fabric: Crossbar) -> None:
    small = problem(nodes=4, devices=2, nics=2, bandwidth=1e8, fabric=fabric)
    plan = complete(small, LAYOUT)
    folded, unfolded = (step_time(lower(small, plan, folded=flag)) for flag in (True, False))
    assert folded == pytest.approx(unfolded, rel=1e-8)  # ticks of each phase are rounded up


@pytest.mark.parametrize(
    "network", [Mesh(Link(1e-6, 1e8)), Ring(Link(1e-6, 1e8)), Mesh(Link(1e-6, 1e8), ((0, 1, 2), (1, 2, 1), (2, 3, 2)))]
)
def test_every_node_network_folds_as_it_unfolds(network: Mesh | Ring) -> None:
    small = problem(nodes=2, devices=4, nics=1, bandwidth=1e8)
    ((node, count),) = small.cluster.nodes
    small = on_cluster(small, nodes=((replace(node, network=network), count),))
    plan = complete(small, LAYOUT)
    folded, unfolded = (step_time(lower(small, plan, folded=flag)) for flag in (True, False))
    assert folded == pytest.approx(unfolded, rel=1e-8)  # ticks of each phase are rounded up


@given(st.permutations(range(4)), st.permutations(range(2)), st.sampled_from([Crossbar(), LeafSpine(4, 2.0)]))
@settings(max_examples=60, deadline=None)
def test_who_is_called_what_changes_nothing(nodes: list[int], devices: list[int], fabric: Crossbar) -> None:
    # equal nodes below one leaf, equal devices in each: any names of theirs are as good
    small = problem(nodes=4, devices=2, nics=2, bandwidth=1e8, fabric=fabric)
    renamed = tuple(2 * node + device for node in nodes for device in devices)
    plain, other = (complete(small, replace(LAYOUT, placement=placement)) for placement in ((), renamed))
    assert step_time(lower(small, other)) == pytest.approx(step_time(lower(small, plain)), rel=1e-9, abs=1e-10)
