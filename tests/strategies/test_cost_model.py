"""What a cost model says of a plan does not hang on which others it was asked of before.

Each of its parts keeps what it has computed for all plans that share it, under a key; where a key lacks a field on
which the value hangs, a plan is told what holds of another.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import LeafSpine, Link, PcieTree
from meshwise.strategies.bounds.group_bounds import _GroupMachines
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group, select_passes, select_states
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import find_family

from ..examples import LONG
from .layouts import (
    HALVES,
    LAYERS,
    RANKS,
    SPLIT_V,
    V,
    any_group,
    any_layout,
    any_problem,
    group_of_one,
    groups_are_defined,
    is_legal,
)
from .pairs import FIELDS, LAYOUT_FIELDS, Sample, any_pair
from .problems import IDEAL, problem

Answers = dict[str, object]

PAIRS = -(-2000 // len(FIELDS)) if LONG else 2
"""Pairs of every field: 2,000 of all together in the long run."""

MOST_PAIRS = 5 * PAIRS
"""Pairs after which some must have differed in their answers."""

QUICK = ("bound", "peak", "fits", "family", "busy", "group")
ALL = (*QUICK, "path", "evaluation", "step")
"""Questions about a plan: all, and those that are answered without its program."""

WALK = 25
"""Plans that one cost model is asked of."""

OFTEN = (*LAYOUT_FIELDS, *("schedule", "chunks", "zero", "offload", "overlap_gradients") * 2)


@pytest.mark.parametrize("name", FIELDS)
def test_nothing_that_holds_of_a_plan_is_told_of_one_that_differs_in_one_field(name: str) -> None:
    num_apart = 0
    for number in range(MOST_PAIRS):
        if number >= PAIRS and num_apart:
            break
        draw = Random(f"{name} {number}")
        problem, first, second = any_pair(name, draw)
        chosen = ALL if LONG or not number else QUICK
        fresh_first, later_second = ask_in_turn(problem, (first, second), draw, chosen)
        fresh_second, later_first = ask_in_turn(problem, (second, first), draw, chosen)
        assert later_first == fresh_first, (number, problem, first, second)
        assert later_second == fresh_second, (number, problem, second, first)
        num_apart += fresh_first != fresh_second
    assert num_apart, "of no pair the answers differ, so that no confusion shows"


@pytest.mark.parametrize("name", FIELDS)
def test_bounds_are_in_order_on_plans_of_every_field(name: str) -> None:
    for number in range(PAIRS if LONG else 1):
        draw = Random(f"laws of {name} {number}")
        problem, *samples = any_pair(name, draw)
        for sample in samples:
            if not sample.plan.asynchronous:
                obeys_laws(problem, sample, draw)


def test_members_with_copies_to_hosts_do_not_run_in_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks in reverse order on PCIe trees, of which one device is slow, and one NIC: without copies groups crowd a link
    # together, with copies they do not.
    link = Link(1e-6, 1e10)
    host = Host("host", 1e12, pcie=Pcie(Link(1e-6, 1e9), devices_per_switch=2))
    node = Node(IDEAL, host, 4, PcieTree(link, 2, 1, Link(1e-6, 1e9)), 1, Link(2e-6, 2.5e9))
    cluster = Cluster("trees", ((node, 2),), LeafSpine(2, 2.0, rail_optimized=True))
    cluster = replace(cluster, speeds=((4, 0.5),), link_speeds=(("nic 0 out", 0.5),))
    crowded = replace(problem(devices=8, layers=LAYERS, batch=24), cluster=cluster)
    layout = Layout(data=4, tensor_rows=2, microbatch=6, order=AXES[::-1], placement=tuple(range(7, -1, -1)), zero=1)
    states = [select_states(replace(layout, offload=offload)) for offload in (NO_OFFLOADING, Offloading((1.0,)))]
    group = Group(layout, (select_passes(layout),), tuple(states), np.array([[True, True]]))
    bounds = [SimulatedCost(crowded).plan_bound(complete(crowded, member)) for member in group]
    assert SimulatedCost(crowded).group_bounds(group).tolist() == [bounds]
    without_copies = _GroupMachines.find_machine
    monkeypatch.setattr(
        _GroupMachines,
        "find_machine",
        lambda machines, state, copies: without_copies(machines, states[0], copies=False),
    )
    assert SimulatedCost(crowded).group_bounds(group)[0, 1] > bounds[1]  # or the law says nothing


def obeys_laws(problem: Problem, sample: Sample, draw: Random) -> None:
    """Assert that each bound of a plan, and each of a group of which it is a member, is at most the next tighter."""
    costs, (plan, layout) = SimulatedCost(problem), sample
    timeline = simulate(lower(problem, plan))
    assert costs.plan_bound(plan) <= costs.longest_paths([plan])[0] <= timeline.step_time, sample
    assert costs.peak_memory(plan) == timeline.peak_memory, sample
    if layout is None or not groups_are_defined(layout):
        return
    group, family = any_group(problem, layout, draw), find_family(layout)
    assert plan.overlaps_passes or costs.busy_bound(family) <= timeline.step_time, sample
    table = costs.group_bounds(group)
    for row, column in np.ndindex(table.shape):
        if not group.member_mask[row, column]:
            continue
        member = complete(problem, group.build_layout(row, column))
        bound = costs.plan_bound(member)
        assert table[row, column] <= bound or not costs.fits(member), (sample, row, column)
        assert costs.family_bound(family) <= bound, (sample, row, column)


def ask_in_turn(
    problem: Problem, samples: Sequence[Sample], draw: Random, chosen: Sequence[str] = ALL
) -> list[Answers]:
    """Return what one cost model, made where nothing is known of any plan, says of plans one after another."""
    forget()
    costs = SimulatedCost(problem)
    answers = [ask(costs, sample, draw, chosen) for sample in samples]
    if all("path" in answer for answer in answers):
        together = costs.longest_paths([sample.plan for sample in samples])
        assert together == [answer["path"] for answer in answers], samples
    return answers


def forget() -> None:
    """Forget what functions keep of plans for all cost models."""
    modules = [module for name, module in sys.modules.items() if name.startswith("meshwise.strategies.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def ask(costs: SimulatedCost, sample: Sample, draw: Random, chosen: Sequence[str] = ALL) -> Answers:
    """Return all that a cost model says of a plan, or what is chosen of it, asked in any order."""
    plan, layout = sample
    questions: dict[str, Callable[[], object]] = {
        "bound": lambda: costs.plan_bound(plan),
        "peak": lambda: costs.peak_memory(plan),
        "fits": lambda: (costs.fits(plan), costs.hosts_fit(plan)),
        "path": lambda: costs.longest_paths([plan])[0],
        "evaluation": lambda: costs.evaluate(plan),
        "step": lambda: simulate_with(costs, sample),
    }
    if plan.asynchronous and not LONG:
        chosen = QUICK  # many steps are simulated of these plans
    if layout is not None and groups_are_defined(layout):
        questions["family"] = lambda: costs.family_bound(find_family(layout))
        questions["busy"] = lambda: costs.busy_bound(find_family(layout))
        questions["group"] = lambda: costs.group_bounds(group_of_one(layout)).tolist()
    names = [name for name in questions if name in chosen]
    names = draw.sample(names, len(names))
    return dict(sorted((name, questions[name]()) for name in names))


def simulate_with(costs: SimulatedCost, sample: Sample) -> tuple[object, ...]:
    """Return step time, and peak memory of all devices and hosts, of the program made of what a cost model knows."""
    timeline = simulate(lower(costs.problem, sample.plan, costs=costs.costs))
    peaks = [[profile.peak for profile in profiles] for profiles in (timeline.memory, timeline.host_memory)]
    return timeline.step_time, peaks, timeline.links


@given(st.integers(0, 2**32))
@settings(max_examples=400 if LONG else 2, deadline=None)
def test_a_plan_is_told_the_same_after_any_others(seed: int) -> None:
    draw = Random(seed)
    problem = any_problem(draw)
    shared = SimulatedCost(problem)
    for layout in islice(walk(problem, draw), WALK):
        sample = Sample(complete(problem, layout), layout)
        names = QUICK if draw.random() < 0.8 else ALL
        assert ask(shared, sample, draw, names) == ask(SimulatedCost(problem), sample, draw, names), layout


def walk(problem: Problem, draw: Random) -> Iterator[Layout]:
    """Yield layouts, all but the first like an earlier one but for one field or two."""
    layouts: list[Layout] = []
    while True:
        base, other = draw.choice(layouts or [Layout(data=RANKS)]), any_layout(problem, draw)
        names = draw.sample(OFTEN, draw.choice([1, 1, 2]))
        layout = replace(base, **{name: getattr(other, name) for name in names}) if draw.random() < 0.8 else other
        if layout not in layouts and is_legal(problem, layout):
            layouts.append(layout)
            yield layout


TWO = Layout(data=2, pipeline=2, microbatch=8, zero=2)


@pytest.mark.parametrize(
    ("one", "changes", "framework"),
    [
        # passes in pairs hide communication
        (Layout(tensor=2, pipeline=2, schedule="zbv", chunks=2), {"schedule": "dualpipev"}, "megatron"),
        # stages lie on ranks otherwise
        (replace(TWO, schedule=V, stages=(5, 1, 1, 1)), {"schedule": HALVES}, "megatron"),
        # gradients begin with a backward, of as many shards as there are
        (Layout(data=4, zero=2), {"zero_shards": 2}, "torch"),
        (Layout(data=4), {"overlap_gradients": False}, "torch"),
        (Layout(data=4), {"gradient_reduction": "parameter_server"}, "torch"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else None,
)
def test_what_holds_of_one_plan_is_not_told_of_another(one: Layout, changes: dict[str, Any], framework: str) -> None:
    devices = one.data * one.tensor * one.pipeline
    small = problem(devices=devices, batch=32)
    small = replace(small, training=replace(small.training, framework=framework))
    layouts, draw = (one, replace(one, **changes)), Random(0)
    samples = [Sample(complete(small, layout), layout) for layout in layouts]
    for first, second in (samples, samples[::-1]):
        fresh, later = ask_in_turn(small, (first, second), draw)
        (alone,) = ask_in_turn(small, (second,), draw)
        assert later == alone
        assert alone != fresh  # or the law says nothing


def test_bounds_of_orders_that_split_backward_are_not_told_of_those_that_do_not() -> None:
    small = problem(devices=4, batch=8)
    layouts = [replace(TWO, microbatch=2, schedule=order, stages=(4, 1, 2, 1)) for order in (V, SPLIT_V)]
    groups = list(map(group_of_one, layouts))
    for first, second in (groups, groups[::-1]):
        shared = SimulatedCost(small)
        shared.group_bounds(first)
        assert shared.group_bounds(second).tolist() == SimulatedCost(small).group_bounds(second).tolist()
