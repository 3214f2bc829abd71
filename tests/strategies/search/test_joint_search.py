"""The joint search of stages and operators: its costs and bounds against simulations, its plans against enumeration."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.operator_plan import build_operator_plan, list_operator_violations
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import compute_pass_table
from meshwise.strategies.operators.stage_costs import Span, StageOperators, compute_stage_operators
from meshwise.strategies.plan.mesh import OPERATOR_AXES, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.joint import Joint
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint_search import BestPlans, JointMesh, JointSearch, list_joint_meshes
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ..operators.operator_plans import random_plan
from ..operators.tiny import layer, tiny_problem
from ..problems import problem


def stage_operators(of: Problem, plan: Plan) -> StageOperators:
    costs = StageCosts(of)
    return compute_stage_operators(of, plan, compute_pass_table(Setting(of, plan, costs)), costs)


def indices(operators: StageOperators, plan: Plan) -> list[int]:
    """Return for every node the index of its choice in a plan."""
    shardings = {sharding.operator: sharding for sharding in plan.shardings}
    result = []
    for node, options in zip(operators.table.nodes, operators.table.choices, strict=True):
        own = shardings.get(node.name) or shardings[f"{node.block.name}.{node.operator.name}"]
        result.append(next(n for n, each in enumerate(options) if (each.cuts, each.kept) == (own.cuts, own.kept)))
    return result


@pytest.mark.parametrize("degrees", [{TENSOR: 6}, {TENSOR_ROWS: 2, TENSOR: 3}])
def test_one_span_of_all_blocks_costs_what_one_stage_costs(degrees: dict[str, int]) -> None:
    of = problem(devices=6, layers=2, batch=12, hidden=72, heads=12, kv_heads=12, ffn=144, vocab=144)
    costs, random = compute_operator_costs(of, degrees, 6), Random(0)
    operators = stage_operators(of, build_operator_plan(of, degrees, 6))
    graph = operators.build_graph((Span(0, len(of.graph.occurrences), 1, Recompute.NONE),))
    for _ in range(5):
        choice = tuple(random.randrange(size) for size in graph.sizes)
        fixed = costs.graph.time(choice) - graph.time(choice)
        assert fixed == costs.graph.time((0,) * len(choice)) - graph.time((0,) * len(choice))  # the end of a step
        assert graph.memory(choice) == costs.graph.memory(choice)


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_holds_no_more_than_its_spans(seed: int) -> None:
    of, plan = random_plan(Random(seed))
    plan = replace(plan, schedule="1f1b")
    operators = stage_operators(of, plan)
    choice = indices(operators, plan)
    numbers = {name: number for number, (name, _) in enumerate(of.graph.occurrences)}
    held = []
    for stage, blocks in enumerate(each.blocks for each in plan.stages):
        alive = min(plan.pipeline - stage, plan.num_microbatches)
        span = Span(numbers[blocks[0]], numbers[blocks[-1]] + 1, alive, Recompute.NONE)
        own = [choice[number] for number in operators.list_nodes((span,))]
        held.append(operators.count_bytes(span, own))
        assert held[-1] == operators.build_graph((span,)).memory(own)
    # what crosses a boundary is no part of a stage: one microbatch of it, sent or received, and its gradient
    crossing = 4 * 4.0 * plan.sequences * of.training.sequence * 72 if plan.pipeline > 1 else 0.0
    assert SimulatedCost(of).peak_memory(plan) <= max(held) + operators.resident_bytes + crossing


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_of_a_mesh_is_faster_than_its_bound(seed: int) -> None:
    random = Random(seed)
    of, plan = random_plan(random)
    plan = replace(
        plan, schedule=random.choice(("1f1b", "gpipe", "zb1p")), recompute=random.choice(tuple(Recompute)), zero=0
    )
    degrees = tuple((axis.name, axis.size) for axis in plan.mesh.axes if axis.name in OPERATOR_AXES)
    mesh = JointMesh(plan.pipeline, plan.data, degrees, plan.sequences, plan.num_microbatches)
    table = compute_pass_table(Setting(of, plan, StageCosts(of)))
    bound = mesh.bound_step(sum(table.least_kernel_ticks) / TICKS_PER_SECOND)
    assert bound <= SimulatedCost(of).evaluate(plan).step_time


@pytest.mark.parametrize(("times", "microbatches"), [((1.0, 2.0, 4.0), 3), ((5.0, 1.0), 1), ((2.0, 2.0, 2.0, 2.0), 8)])
def test_the_bound_of_a_mesh_by_hand(times: tuple[float, ...], microbatches: int) -> None:
    # rank k begins when a microbatch has come through those before it, and then computes all of its own
    work, begin = sum(times), 0.0
    step = 0.0
    for time in times:
        step, begin = max(step, begin + microbatches * time), begin + time
    mesh = JointMesh(len(times), 1, ((TENSOR, 1),), 1, microbatches)
    assert mesh.bound_step(work) <= step
    # equal where all ends are equal: t_k = (v - t_1 - .. - t_(k-1)) / m
    level = mesh.bound_step(work)
    begin = 0.0
    for _ in times:
        begin += (level - begin) / microbatches
    assert begin == pytest.approx(work)


def test_recomputation_runs_forward_again() -> None:
    of = tiny_problem(layer())
    operators = stage_operators(of, build_operator_plan(of, {TENSOR: 1}, 2))
    plain, again = (operators.build_graph((Span(0, 1, 1, each),)) for each in (Recompute.NONE, Recompute.FULL))
    whole = (0,) * len(plain.times)
    forward = sum(int(own.forward[0]) for own in operators.table.passes)
    assert again.time(whole) - plain.time(whole) == 3 * forward  # three microbatches
    # kept is x alone, instead of x, the two wide tensors and the activation's
    saved = {name: int(size[0]) for own in operators.table.passes for name, size in own.saved.items() if name}
    assert plain.count_kept(whole) - again.count_kept(whole) == sum(saved.values()) - saved["x"]


def enumerate_plans(of: Problem) -> list[Plan]:
    """Return every plan of two tiny layers on two devices: one stage or two, every sharding of every operator."""
    result = []
    for mesh in list_joint_meshes(of, Space()):
        degrees = dict(mesh.degrees)
        names = [name for name, _ in of.graph.occurrences]
        if mesh.pipeline > 1 or mesh.data > 1:
            search_of = JointSearch(of, Space(), SimulatedCost(of), 9.0, BestPlans())  # type: ignore[arg-type]
            base = search_of.build_base_plan(mesh)
            result += [replace(base, zero=zero, shardings=()) for zero in ((0,) if mesh.data == 1 else (0, 1, 2, 3))]
            continue
        table = compute_operator_costs(of, degrees, mesh.microbatch)
        result += [table.build_plan(choice) for choice in product(*(range(size) for size in table.graph.sizes))]
        assert len(names) == len(of.graph.occurrences)
    return [plan for plan in result if not any(list_operator_violations(of, plan))]


@pytest.mark.parametrize("bandwidth", [16.0, 256.0, 4096.0])
@pytest.mark.parametrize("blocks", [1, 2])
def test_tiny_problems_against_enumeration(bandwidth: float, blocks: int) -> None:
    own = [layer(name=f"layer{number}") for number in range(blocks)] if blocks == 1 else [layer(), layer(name="next")]
    of = tiny_problem(*own, devices=2, bandwidth=bandwidth)
    if blocks == 2:  # too many to list: two stages of one layer, and a layer's worth of one stage
        of = tiny_problem(*own, devices=2, bandwidth=bandwidth)
        result = search(Joint(), of)
        assert result.best is not None and result.lower_bound is not None
        assert result.lower_bound <= result.best.evaluation.step_time
        return
    costs = SimulatedCost(of)
    steps = [costs.evaluate(plan).step_time for plan in enumerate_plans(of)]
    result = search(Joint(), of)
    assert result.best is not None and result.lower_bound is not None
    assert result.lower_bound <= min(steps)
    assert result.best.evaluation.step_time <= min(steps) * 1.02


@pytest.mark.parametrize("bandwidth", [1e9, 1e10, 1e11])
def test_it_is_never_slower_than_uniform_plans_or_one_stage(bandwidth: float) -> None:
    of = problem(nodes=2, devices=2, layers=4, batch=16, bandwidth=bandwidth)
    joint, uniform, operators = (search(algorithm, of) for algorithm in (Joint(), BestFirst(), Frontier()))
    assert joint.best is not None and joint.lower_bound is not None
    for other in (uniform, operators):
        assert other.best is not None
        assert joint.best.evaluation.step_time <= other.best.evaluation.step_time
    steps = [trial.evaluation.step_time for each in (joint, uniform, operators) for trial in each.trials]
    assert joint.lower_bound <= min(step for step in steps if step < inf)


def test_stages_are_cut_unlike_where_that_is_faster() -> None:
    """On a mesh of four operator ranks and two stages, stages that are cut along the batch communicate less."""
    of = problem(devices=8, layers=8, batch=16, bandwidth=1e10)
    space = Space(tensor=(4,), pipeline=(2,), data=(1,), microbatch=(4,))
    uniform, joint = search(BestFirst(), of, space), search(Joint(), of, space)
    assert uniform.best is not None and joint.best is not None
    assert joint.best.evaluation.step_time < 0.98 * uniform.best.evaluation.step_time
