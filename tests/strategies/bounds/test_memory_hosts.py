"""A plan fits where every device and every host has room: what the search says is what the simulation says."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.relief import list_reliefs
from meshwise.strategies.explanation.shortfall import find_shortfall
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout, StepDecisions
from meshwise.strategies.plan.offloading import NO_OFFLOADING, OFFLOADS, WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute

from ..plans import OFFLOADINGS, Case, any_cases
from ..problems import problem

STATES_AWAY = Offloading(optimizer=WHOLE_FRACTION)


def roomy(cluster: Cluster, memory: float) -> Cluster:
    """Return a cluster whose hosts have so much memory."""
    return cluster.with_nodes(lambda node: replace(node, host=replace(node.host, memory=memory)))


def room(value: Problem, plan: Plan) -> bool:
    """Return whether everything that the simulation watches stays within what it has."""
    # copies wait for each other on shared links, of which longest paths know nothing: what is kept meanwhile differs
    timeline = simulate(lower(value, plan), "discrete_event")
    return all(profile.peak <= profile.capacity for profile in (*timeline.memory, *timeline.host_memory))


@given(any_cases(), st.sampled_from(OFFLOADINGS[3:]), st.sampled_from([0.5, 0.999, 1.0, 1.5]))
@settings(max_examples=60, deadline=None)
def test_a_plan_fits_where_every_device_and_host_of_its_simulation_has_room(
    case: Case, offload: Offloading, part: float
) -> None:
    case = case._replace(layout=replace(case.layout, offload=offload))
    try:
        own, plan = case.build()
    except ValueError:  # what is offloaded is refused beside the rest of the layout
        return
    hosts = simulate(lower(own, plan), "discrete_event").host_memory
    peak = max((profile.peak for profile in hosts), default=0.0)
    own = replace(own, cluster=roomy(own.cluster, max(peak * part, 1.0)))
    assert SimulatedCost(own).fits(plan) == room(own, plan) == (part >= 1 or not peak)
    assert SimulatedCost(own).evaluate(plan).fits == room(own, plan)


def test_a_host_of_several_sizes_of_host_counts_by_its_own() -> None:
    # 4 ranks of equal work on two nodes: only the second host is small
    own = problem(nodes=2, devices=2, batch=8)
    ((node, _),) = own.cluster.nodes
    small = replace(node, host=replace(node.host, name="small", memory=1.0))
    own = replace(own, cluster=replace(own.cluster, nodes=((node, 1), (small, 1))))
    plan = complete(own, Layout(data=4, offload=STATES_AWAY))
    assert not SimulatedCost(own).fits(plan)
    assert not room(own, plan)


@pytest.mark.parametrize("part", [0.3, 0.6, 1.0])
def test_bounds_of_groups_keep_every_plan_that_fits(part: float) -> None:
    own = problem(devices=4, layers=4, batch=8, precision="bf16")
    plan = complete(own, Layout(data=4, offload=STATES_AWAY))
    peak = max(profile.peak for profile in simulate(lower(own, plan)).host_memory)
    own = replace(own, cluster=roomy(own.cluster, peak * part))
    costs = SimulatedCost(own)
    states = tuple(
        StepDecisions(zero=zero, offload=offload) for zero in (0, 1) for offload in (NO_OFFLOADING, *OFFLOADINGS[4:6])
    )
    group = Group(Layout(data=4), (StepDecisions(recompute=Recompute.NONE),), states, np.full((1, len(states)), True))
    table = costs.group_bounds(group)
    fitting = [costs.fits(complete(own, group.build_layout(0, column))) for column in range(len(states))]
    assert set(fitting) == ({True, False} if part < 1 else {True})
    assert all(bound < inf for bound, fits in zip(table[0].tolist(), fitting, strict=True) if fits)


def test_the_host_that_is_full_is_named_with_what_it_lacks() -> None:
    # AdamW in fp32: two states of 4 bytes a parameter, of every one of 4 ranks, on one host
    own = problem(devices=4, batch=8)
    costs = SimulatedCost(own)
    plan = complete(own, Layout(data=4, offload=STATES_AWAY))
    states = 4 * 8 * costs.costs.plan_parameters(plan).elements[0]
    own = replace(own, cluster=roomy(own.cluster, states / 2))
    found = find_shortfall(own, plan)
    assert found.host == "host 0"
    assert (found.needed_memory, found.usable_memory, found.missing_memory) == (states, states / 2, states / 2)
    assert dict(found.memory_by_kind)["optimizer"] == states
    assert found.stages == (0,)


def test_a_device_that_lacks_more_of_its_own_is_named_before_a_host() -> None:
    own = problem(devices=4, batch=8)
    plan = complete(own, Layout(data=4, offload=STATES_AWAY))
    assert find_shortfall(own, plan).host == ""  # nothing lacks: the device is nearest to it


@pytest.mark.parametrize("what", [("optimizer",), ("activations",), OFFLOADS])
@pytest.mark.parametrize("memory", [1.0, 1e5])
def test_every_cure_of_a_full_host_makes_the_plan_fit(what: tuple[str, ...], memory: float) -> None:
    own = problem(devices=4, batch=8)
    layout = Layout(data=4, microbatch=2, zero=3, offload=Offloading(**dict.fromkeys(what, WHOLE_FRACTION)))
    own = replace(own, cluster=roomy(own.cluster, memory))
    assert not SimulatedCost(own).fits(complete(own, layout))
    found = list_reliefs(own, [layout], count=20)
    names = {relief.change for relief in found}
    assert any(name.endswith("kept on devices") for name in names)
    larger = next(relief for relief in found if relief.change.startswith("hosts with"))
    assert larger.changes_machine
    for relief in found:
        if not relief.changes_machine and "gradients in" not in relief.change:
            assert room(own, relief.plan)
