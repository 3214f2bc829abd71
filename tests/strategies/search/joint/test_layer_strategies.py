"""Strategies of layers: what their choices cut, what they cost in stages, and what UniAP's program makes of them."""

from random import Random

import numpy as np
import pytest

from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import compute_pass_table
from meshwise.strategies.operators.stage_costs import Span, StageOperators, compute_stage_operators
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.partition import partition_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.joint.layer_strategies import (
    LayerStrategies,
    assemble_jointly,
    filter_shardings,
    list_layer_strategies,
)
from meshwise.strategies.search.joint.stages import AssemblyProblem, count_alive, count_boundary_ticks

from ...problems import problem

REAL = problem(devices=4, layers=3, batch=16)
ALL = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)


def assembly_problem(of: Problem, pipeline: int, **degrees: int) -> AssemblyProblem:
    costs = StageCosts(of)
    stages = partition_layers(of.graph, pipeline, "balanced")
    plan = build_operator_plan(of, degrees, 4, stages=stages, schedule="1f1b")
    operators = compute_stage_operators(of, plan, compute_pass_table(Setting(of, plan, costs)), costs)
    return AssemblyProblem(plan, (operators,) * pipeline, count_boundary_ticks(operators, costs), 1.0, ALL)


def test_every_axis_does_what_a_strategy_says() -> None:
    case = assembly_problem(REAL, 1, tensor_rows=2, tensor=2)
    table = case.operators[0].table
    for strategy in list_layer_strategies({TENSOR_ROWS: 2, TENSOR: 2}):
        for options in table.choices:
            kept = [options[index] for index in filter_shardings(options, strategy)]
            assert kept
            for axis, use in strategy.items():
                # microbatches of 4 divide by both axes, so that every operator can be cut along samples, or not
                assert {axis in dict(each.cuts).get(BATCH, ()) for each in kept} == {use != "tensor"}
                if use == "data":
                    assert not any(axis in axes for each in kept for _, cuts in each.kept for _, axes in cuts)


def stage_span(operators: StageOperators, first: int, end: int, alive: int) -> tuple[Span, list[int]]:
    span = Span(first, end, alive, Recompute.NONE)
    return span, operators.list_nodes((span,))


@pytest.mark.parametrize("seed", range(8))
def test_tables_say_what_the_cost_graph_of_a_stage_says(seed: int) -> None:
    """Layers and what moves between them add up to a stage's ticks and kept bytes, for any strategies."""
    random, pipeline = Random(seed), 2
    case = assembly_problem(REAL, pipeline, tensor=2)
    layers, alive = LayerStrategies(case.operators[0]), count_alive(case.plan)
    tables = layers.build_tables(case, Recompute.NONE)
    num_layers, microbatches = layers.num_layers, case.plan.num_microbatches
    strategies = tuple(random.randrange(len(layers.strategies)) for _ in range(num_layers))
    choice = [index for layer, strategy in enumerate(strategies) for index in layers.choices[layer][strategy]]
    cut = random.randint(1, num_layers - 1)
    for stage, (first, end) in enumerate(((0, cut), (cut, num_layers))):
        operators = case.operators[stage]
        span, numbers = stage_span(operators, first, end, alive[stage])
        before = {number: choice[number] for number in range(operators.table.starts[first])}
        graph, num_outside = operators.build_graph((span,), before)
        assert num_outside == 0
        own = [choice[number] for number in numbers]
        own_ticks = sum(tables.times[stage, u, strategies[u]] for u in range(first, end))
        inner_ticks = sum(tables.inner_times[u, strategies[u], strategies[u + 1]] for u in range(first, end - 1))
        if stage:  # what crosses is redistributed by the stage that reads it
            inner_ticks += tables.inner_times[first - 1, strategies[first - 1], strategies[first]]
        if np.isfinite(own_ticks):  # a repeated strategy has no time of its own
            assert microbatches * (own_ticks + inner_ticks) == pytest.approx(graph.time(own), rel=1e-12)
        kept_bytes = sum(tables.memory[stage, u, strategies[u]] for u in range(first, end))
        assert kept_bytes == graph.count_kept(own)


def test_less_memory_takes_leaner_strategies_and_more_time() -> None:
    case = assembly_problem(REAL, 2, tensor=2)
    free = assemble_jointly(case, 10.0, 0.0)
    assert free is not None and all(stage.is_free for stage in free.stages)
    needed = max(
        operators.count_bytes(stage_span(operators, first, end, alive)[0], stage.choice)
        for operators, stage, (first, end), alive in zip(
            case.operators, free.stages, ((0, free.ends[0]), free.ends), count_alive(case.plan), strict=True
        )
    )
    share = 0.8 * needed / case.operators[0].limit
    lean = assemble_jointly(case._replace(share=share), 10.0, 0.0)
    assert lean is not None and not any(stage.is_free for stage in lean.stages)
    assert lean.stages[0].ticks > free.stages[0].ticks  # the ticks of all stages by the formula
    assert assemble_jointly(case._replace(share=1e-6), 10.0, 0.0) is None
