"""What a cost model says of a plan does not hang on which others it was asked of before.

Each of its parts keeps what it has computed for all plans that share it, under a key; where a key lacks a field on
which the value hangs, a plan is told what holds of another.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import step_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import GRADIENT_REDUCTIONS, Layout, StepDecisions
from meshwise.strategies.plan.offloading import NO_OFFLOADING, WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import PerStage, Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.choices import find_family

from ..examples import LONG
from .plans import OFFLOADINGS, ORDERS, RECOMPUTATIONS, SEQUENCE, Case, Network, any_machine
from .problems import problem

Answers = dict[str, object]

RANKS, LAYERS, BATCH = 8, 8, 24
WALK = 25
"""Plans that one cost model is asked of."""

V = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 \n 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
SPLIT_V = "0F0 3F0 3I0 0I0 3W0 0W0 0F1 3F1 3I1 0I1 0W1 3W1 \n 1F0 2F0 2I0 1I0 1W0 2W0 1F1 2F1 2I1 1I1 1W1 2W1"
LOOP = "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1 \n 1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"
HALVES = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 \n 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"
WRITTEN = (V, SPLIT_V, LOOP, HALVES)
"""Orders of two microbatches and four stages, which lie on two ranks in three ways."""

OFFLOADS = (*OFFLOADINGS, Offloading(activations=(1.0, 0.0)), Offloading(optimizer=(0.0, 1.0)))
NAMES = [field.name for field in fields(Layout)]
OFTEN = (*NAMES, *("schedule", "chunks", "zero", "offload", "overlap_gradients") * 2)


@given(st.integers(0, 2**32))
@settings(max_examples=400 if LONG else 8, deadline=None)
def test_a_plan_is_told_the_same_after_any_others(seed: int) -> None:
    draw = Random(seed)
    problem = any_problem(draw)
    shared = SimulatedCost(problem)
    for layout in islice(walk(problem, draw), WALK):
        plan, group = complete(problem, layout), any_group(problem, layout, draw) if draw.random() < 0.2 else None
        simulated = not plan.asynchronous and draw.random() < 0.2
        told = asked(shared, layout, group, draw, simulated=simulated)
        assert told == asked(SimulatedCost(problem), layout, group, draw, simulated=simulated), layout
        if simulated:
            path, step = told["path"], told["step"]
            assert isinstance(path, float)
            assert isinstance(step, float)
            assert shared.plan_bound(plan) <= path <= step, layout


def asked(costs: SimulatedCost, layout: Layout, group: Group | None, draw: Random, *, simulated: bool) -> Answers:
    """Return what a cost model says, asked in any order of a layout and, if there is one, of a group."""
    plan, family = complete(costs.problem, layout), find_family(layout)
    questions: dict[str, Callable[[], object]] = {
        "bound": lambda: costs.plan_bound(plan),
        "peak": lambda: costs.peak_memory(plan),
        "fits": lambda: costs.fits(plan),
    }
    if group is not None:
        questions["floor"], questions["reach"] = lambda: costs.family_bound(family), lambda: costs.busy_bound(family)
        questions["table"] = lambda: costs.group_bounds(group).tolist()
    if simulated:
        questions["path"] = lambda: costs.longest_paths([plan])[0]
        questions["step"] = lambda: step_time(lower(costs.problem, plan, costs=costs.costs))
    names = draw.sample(list(questions), len(questions))
    return dict(sorted((name, questions[name]()) for name in names))


def any_problem(draw: Random) -> Problem:
    """Return a network of eight layers on a machine of eight devices."""
    training = Training(
        BATCH,
        SEQUENCE,
        draw.choice(["fp32", "bf16"]),
        draw.choice(["adamw", "sgd"]),
        gradient_clipping=draw.choice([False, True]),
        framework=draw.choice(sorted(FRAMEWORKS)),
    )
    network = Network(LAYERS, draw.choice(["flash", "unfused", "experts"]), draw.choice([False, True]))
    return Case(network, any_machine(draw.choice, RANKS), training, Layout()).problem()


def walk(problem: Problem, draw: Random) -> Iterator[Layout]:
    """Yield layouts, all but the first like an earlier one but for one field or two."""
    found: list[Layout] = []
    while True:
        base, other = draw.choice(found or [Layout(data=RANKS)]), any_layout(draw)
        names = draw.sample(OFTEN, draw.choice([1, 1, 2]))
        layout = replace(base, **{name: getattr(other, name) for name in names}) if draw.random() < 0.8 else other
        if layout not in found and next(violations(problem, layout), None) is None:
            found.append(layout)
            yield layout


def any_layout(draw: Random) -> Layout:
    """Return a layout on all devices, legal or not: every field is drawn."""
    pipeline = draw.choice([1, 2, 2, 4])
    tensor = draw.choice([size for size in (1, 1, 2, 4) if size * pipeline <= RANKS])
    rows = draw.choice([size for size in (1, 1, 1, 2) if size * tensor * pipeline <= RANKS])
    context = draw.choice([size for size in (1, 1, 1, 2) if size * rows * tensor * pipeline <= RANKS])
    data, zero = RANKS // (pipeline * tensor * rows * context), draw.choice([0, 1, 2, 3])
    schedule = draw.choice([*SCHEDULES, *WRITTEN] if pipeline == 2 else [*SCHEDULES])
    rule = SCHEDULES.get(schedule)
    chunks = 1 if rule is None or pipeline == 1 else draw.randint(rule.chunks[0], rule.chunks[1] or 2)
    stages = 4 if rule is None else pipeline * chunks
    sizes = (1, 2, 3, 4, 6) if rule else (BATCH // 2 // data,)
    apart = PerStage(tuple(draw.choice(RECOMPUTATIONS) for _ in range(stages)))
    cuts = sorted(draw.sample(range(1, LAYERS), stages - 1))
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        microbatch=draw.choice([*sizes, tuple(draw.choice(sizes) for _ in range(data))]),
        schedule=schedule,
        chunks=chunks,
        zero=zero,
        sequence_parallel=draw.choice([False, True]),
        recompute=draw.choice([*RECOMPUTATIONS, apart]),
        context=context,
        expert=draw.choice([1, 1, 2, 4]),
        attention=draw.choice(list(Attention)),
        overlap_gradients=draw.choice([False, True]),
        scatter_gather=draw.choice([False, True]),
        stages=draw.choice(["even", "balanced", tuple(b - a for a, b in pairwise([0, *cuts, LAYERS]))]),
        order=draw.choice(ORDERS),
        placement=draw.choice([(), (), tuple(range(RANKS))[::-1]]),
        offload=draw.choice(OFFLOADS),
        zero_shards=draw.choice([0, 0, 2]) if zero else 0,
        reshard_after_forward=zero < 3 or draw.choice([False, True]),
        gradient_reduction=draw.choice(GRADIENT_REDUCTIONS),
        tensor_rows=rows,
        overlap_tensor=draw.choice([False, True]),
    )


def any_group(problem: Problem, layout: Layout, draw: Random) -> Group | None:
    """Return a group of a layout's degrees and schedule; none where ranks have different microbatches."""
    if not isinstance(layout.microbatch, int):
        return None
    passes = tuple(
        StepDecisions(
            recompute=draw.choice(RECOMPUTATIONS),
            overlap_tensor=draw.choice([False, True]),
            offload=Offloading(activations=draw.choice([(), WHOLE_FRACTION, (0.5,)])),
        )
        for _ in range(3)
    )
    away = (
        NO_OFFLOADING,
        NO_OFFLOADING,
        Offloading((0.5,)),
        Offloading(WHOLE_FRACTION),
        Offloading(WHOLE_FRACTION, (0.5,)),
    )
    states = tuple(
        StepDecisions(
            zero=draw.choice([0, 1, 2, 3]),
            reshard_after_forward=draw.choice([False, True]),
            overlap_gradients=draw.choice([False, True]),
            gradient_reduction=draw.choice(GRADIENT_REDUCTIONS),
            offload=draw.choice(away),
        )
        for _ in range(4)
    )
    group = Group(layout, passes, states, np.ones((len(passes), len(states)), np.bool_))
    legal = [
        [next(violations(problem, group.build_layout(row, at)), None) is None for at in range(4)] for row in range(3)
    ]
    return replace(group, member_mask=np.array(legal))


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
    ids=lambda each: repr(each) if isinstance(each, dict) else None,
)
def test_what_holds_of_one_plan_is_not_told_of_another(one: Layout, changes: dict[str, Any], framework: str) -> None:
    devices = one.data * one.tensor * one.pipeline
    small = problem(devices=devices, batch=32)
    small = replace(small, training=replace(small.training, framework=framework))
    both, draw = (one, replace(one, **changes)), Random(0)
    for first, second in (both, both[::-1]):
        shared = SimulatedCost(small)
        asked(shared, first, None, draw, simulated=True)
        alone = asked(SimulatedCost(small), second, None, draw, simulated=True)
        assert asked(shared, second, None, draw, simulated=True) == alone
        assert alone != asked(SimulatedCost(small), first, None, draw, simulated=True)  # or the law says nothing


def test_bounds_of_orders_that_split_backward_are_not_told_of_those_that_do_not() -> None:
    small = problem(devices=4, batch=8)
    states = (StepDecisions(zero=2),)
    groups = [
        Group(
            replace(TWO, microbatch=2, schedule=each, stages=(4, 1, 2, 1)),
            (StepDecisions(recompute=Recompute.NONE),),
            states,
            np.ones((1, 1), np.bool_),
        )
        for each in (V, SPLIT_V)
    ]
    for first, second in (groups, groups[::-1]):
        shared = SimulatedCost(small)
        shared.group_bounds(first)
        assert shared.group_bounds(second).tolist() == SimulatedCost(small).group_bounds(second).tolist()
