"""The joint search of stages and operators: its costs and bounds against simulations, its plans against enumeration."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.operator_plan import build_operator_plan, list_operator_violations
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import ChoiceFilter, compute_pass_table
from meshwise.strategies.operators.stage_costs import Span, StageOperators, compute_stage_operators
from meshwise.strategies.plan.mesh import OPERATOR_AXES, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.joint import Joint
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint.courses import BestPlans
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.joint.meshes import JointMesh, list_joint_meshes
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ....examples import LONG
from ...operators.operator_plans import random_plan
from ...operators.tiny import layer, tiny_problem
from ...problems import problem


def stage_operators(of: Problem, plan: Plan, choice_filter: ChoiceFilter | None = None) -> StageOperators:
    costs = StageCosts(of)
    return compute_stage_operators(of, plan, compute_pass_table(Setting(of, plan, costs), choice_filter), costs)


@pytest.mark.parametrize("degrees", [{TENSOR: 6}, {TENSOR_ROWS: 2, TENSOR: 3}])
def test_one_span_of_all_blocks_costs_what_one_stage_costs(degrees: dict[str, int]) -> None:
    of = problem(devices=6, layers=2, batch=12, hidden=72, heads=12, kv_heads=12, ffn=144, vocab=144)
    costs, random = compute_operator_costs(of, degrees, 6), Random(0)
    operators = stage_operators(of, build_operator_plan(of, degrees, 6))
    graph = operators.build_graph((Span(0, len(of.graph.occurrences), 1, Recompute.NONE),)).graph
    for _ in range(5):
        choice = tuple(random.randrange(size) for size in graph.sizes)
        fixed = costs.graph.time(choice) - graph.time(choice)
        assert fixed == costs.graph.time((0,) * len(choice)) - graph.time((0,) * len(choice))  # the end of a step
        assert graph.memory(choice) == costs.graph.memory(choice)


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_holds_no_more_than_its_spans(seed: int) -> None:
    of, plan = random_plan(Random(seed))
    plan = replace(plan, schedule="1f1b")
    own_shardings = {sharding.operator: sharding for sharding in plan.shardings}

    def keep_own(name: str, options: tuple[OperatorSharding, ...]) -> tuple[OperatorSharding, ...]:
        """Return the plan's own choice alone: others cost time to price."""
        block_name = options[0].operator
        own = own_shardings.get(name) or own_shardings[block_name]
        return tuple(each for each in options if (each.cuts, each.kept) == (own.cuts, own.kept))

    operators = stage_operators(of, plan, keep_own)
    choice = [0] * len(operators.table.nodes)
    numbers = {name: number for number, (name, _) in enumerate(of.graph.occurrences)}
    held = []
    for stage, blocks in enumerate(each.blocks for each in plan.stages):
        alive = min(plan.pipeline - stage, plan.num_microbatches)
        span = Span(numbers[blocks[0]], numbers[blocks[-1]] + 1, alive, Recompute.NONE)
        own = [choice[number] for number in operators.list_nodes((span,))]
        held.append(operators.count_bytes(span, own))
        stage_graph = operators.build_graph((span,))
        outside = [0] * stage_graph.num_outside
        assert held[-1] == stage_graph.graph.memory([*outside, *own])
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
    plain, again = (operators.build_graph((Span(0, 1, 1, each),)).graph for each in (Recompute.NONE, Recompute.FULL))
    whole = (0,) * len(plain.times)
    forward = sum(int(own.forward[0]) for own in operators.table.passes)
    assert again.time(whole) - plain.time(whole) == 3 * forward  # three microbatches
    # kept is x alone, instead of x, the two wide tensors and the activation's
    saved = {name: int(size[0]) for own in operators.table.passes for name, size in own.saved.items() if name}
    assert plain.count_kept(whole) - again.count_kept(whole) == sum(saved.values()) - saved["x"]


@pytest.mark.parametrize("seed", range(10))
def test_stages_after_one_another_cost_what_all_blocks_cost_together(seed: int) -> None:
    random = Random(seed)
    of = problem(devices=6, layers=3, batch=12, hidden=72, heads=12, kv_heads=12, ffn=144, vocab=144)
    operators = stage_operators(of, build_operator_plan(of, {TENSOR: 6}, 6))
    num_blocks = len(of.graph.occurrences)
    whole = operators.build_graph((Span(0, num_blocks, 1, Recompute.NONE),)).graph
    choice = tuple(random.randrange(size) for size in whole.sizes)
    middle = random.randrange(1, num_blocks)
    total, known = 0, dict[int, int]()
    for first, end in ((0, middle), (middle, num_blocks)):
        span = Span(first, end, 1, Recompute.NONE)
        numbers = operators.list_nodes((span,))
        stage_graph = operators.build_graph((span,), known)
        assert stage_graph.num_outside == 0  # all that comes from before is known
        total += stage_graph.graph.time([choice[number] for number in numbers])
        known |= {number: choice[number] for number in numbers}
    assert total == whole.time(choice)
    # without knowing, the layouts that suit best cost no more
    free = operators.build_graph((Span(middle, num_blocks, 1, Recompute.NONE),))
    own = [choice[number] for number in operators.list_nodes((Span(middle, num_blocks, 1, Recompute.NONE),))]
    sizes = free.graph.sizes[: free.num_outside]
    least = min(free.graph.time([*outside, *own]) for outside in product(*map(range, sizes)))
    assert least <= stage_graph.graph.time(own)


def two_products(random: Random) -> Problem:
    """Return two blocks of a product and an activation each, for two slow devices."""
    hidden, wide = random.choice((8, 16)), random.choice((8, 32))
    blocks = []
    for name, sizes, dims in (("first", hidden, ("hidden", "ffn")), ("next", wide, ("ffn", "hidden"))):
        builder = BlockBuilder("fp32", {"sequence": 4, "hidden": hidden, "ffn": wide})
        x, y, out = (
            builder.add_tensor(each, f"batch sequence {dim}") for each, dim in zip("xyz", (*dims, dims[1]), strict=True)
        )
        linear(builder, f"product{sizes}", x, (y,), dims[1], dims[0])
        builder.add_elementwise("activation", f"batch sequence {dims[1]}", (y,), (out,), saved=(y,))
        blocks.append(builder.build_block(name, (x,), (out,), layer=True))
    bandwidth, latency = random.choice((16.0, 64.0, 1024.0)), random.choice((0.0, 0.25))
    return tiny_problem(*blocks, devices=2, bandwidth=bandwidth, latency=latency)


def enumerate_steps(of: Problem) -> list[float]:
    """Return the steps of all plans: every mesh, every sharding of every operator, every ZeRO stage, 1F1B."""
    search_of, costs = JointSearch(of, Space(), SimulatedCost(of), 9.0, BestPlans()), SimulatedCost(of)  # type: ignore[arg-type]
    steps = []
    for mesh in list_joint_meshes(of, Space()):
        base = search_of.build_base_plan(mesh)
        options = list(compute_pass_table(Setting(of, base, StageCosts(of))).choices)
        for shardings in product(*options):
            for zero in (0,) if mesh.data == 1 else (0, 1, 2, 3):
                plan = replace(base, zero=zero, shardings=shardings)
                if not any(list_operator_violations(of, plan)):
                    steps.append(costs.evaluate(plan).step_time)
    return steps


@pytest.mark.parametrize("seed", range(40 if LONG else 4))
def test_small_problems_against_enumeration(seed: int) -> None:
    of = two_products(Random(seed))
    steps = enumerate_steps(of)
    result = search(Joint(), of)
    assert result.best is not None and result.lower_bound is not None
    assert result.lower_bound <= min(steps)
    # faster where another schedule is; slower where readers share what their costs count for each of them
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
