"""The joint search of stages and operators: its costs and bounds against simulations, its plans against enumeration."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from random import Random

import pytest

from meshwise.scenarios.inputs.plan_table import list_plan_violations
from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.choices import Pin
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.operator_plan import build_operator_plan, cuts_operators, list_operator_violations
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import ChoiceFilter, compute_pass_table
from meshwise.strategies.operators.stage_costs import Span, StageOperators, compute_stage_operators
from meshwise.strategies.plan.mesh import OPERATOR_AXES, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.partition import Stage, partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.joint import Joint
from meshwise.strategies.search.algorithms.operators import Frontier
from meshwise.strategies.search.joint.courses import BestPlans
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.joint.meshes import JointMesh, bound_mesh, list_joint_meshes
from meshwise.strategies.search.joint.stages import assemble_exactly
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
    bound = bound_mesh(mesh, [table] * plan.pipeline, plan.splits_backward)
    assert bound <= SimulatedCost(of).evaluate(plan).step_time


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p"])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_no_schedule_of_a_long_pipeline_is_faster_than_the_bound(schedule: str, microbatch: int) -> None:
    """Where the part of backward for weights runs later, a microbatch need not come back before a rank goes on."""
    of = problem(devices=4, layers=8, batch=4, bandwidth=1e13, vocab=8)
    stages = partition_layers(of.graph, 4, "balanced")
    plan = build_operator_plan(of, {}, microbatch, stages=stages, schedule=schedule)
    if any(list_operator_violations(of, plan)):
        return
    mesh = JointMesh(4, 1, ((TENSOR, 1),), microbatch, plan.num_microbatches)
    table = compute_pass_table(Setting(of, plan, StageCosts(of)))
    step = SimulatedCost(of).evaluate(plan).step_time
    assert bound_mesh(mesh, [table] * 4, plan.splits_backward) <= step
    # nothing is sent and nothing summed: the bound is near, where all of backward is on the way
    assert plan.splits_backward or bound_mesh(mesh, [table] * 4, False) > 0.7 * step


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_faster_than_the_bound_where_one_device_is_slow(seed: int) -> None:
    random = Random(seed)
    speeds = ((random.randrange(2), random.choice((0.02, 0.5))),)
    of = problem(devices=2, layers=4, batch=2, bandwidth=1e13, vocab=8)
    of = replace(of, cluster=replace(of.cluster, speeds=speeds))
    result = search(Joint(), of, Space(tensor=(1,)))
    assert result.best is not None and result.lower_bound is not None
    costs = SimulatedCost(of)
    names = [name for name, _ in of.graph.occurrences]
    for end in range(1, len(names)):
        stages = Stage(tuple(names[:end])), Stage(tuple(names[end:]))
        for microbatch, schedule in product((1, 2), ("1f1b", "gpipe", "zb1p")):
            plan = build_operator_plan(of, {}, microbatch, stages=stages, schedule=schedule)
            if not any(list_operator_violations(of, plan)):
                assert result.lower_bound <= costs.evaluate(plan).step_time


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
    """Return two blocks of a product and an activation each, for two slow devices.

    What is before them makes the tensor that the first product reads: its gradient is summed there, where it is cut.
    """
    hidden, wide = random.choice((8, 16)), random.choice((8, 32))
    builder = BlockBuilder("fp32", {"sequence": 4, "hidden": hidden})
    x, out = (builder.add_tensor(each, "batch sequence hidden") for each in ("x", "out"))
    builder.add_elementwise("work", "batch sequence", (x,), (out,))
    blocks = [builder.build_block("stem", (x,), (out,), layer=True)]
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
    costs = SimulatedCost(of)
    search_of = JointSearch(of, Space(), costs, partial(assemble_exactly, spread=9.0), BestPlans())  # type: ignore[arg-type]
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


@pytest.mark.parametrize("seed", range(20 if LONG else 2))
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


def pinned(name: str, **cuts: str) -> Pin:
    return Pin(name, tuple((dim, (axis,)) for dim, axis in cuts.items()))


def test_with_pins_nothing_is_claimed_of_plans_that_were_not_looked_at() -> None:
    of = problem(nodes=2, devices=2, layers=2, batch=4)
    space = Space(pipeline=(1,), data=(1,), pin=(pinned("layers.0.up", batch="data", ffn="tensor"),))
    result = search(Joint(), of, space)
    assert result.best is not None and not result.nothing_fits
    assert result.lower_bound is not None and result.lower_bound < result.best.evaluation.step_time


def test_a_pin_of_one_layer_is_kept_and_its_neighbours_are_free() -> None:
    of = problem(devices=10, layers=8, batch=8, bandwidth=1e12)
    space = Space(pipeline=(5,), data=(1,), tensor=(2,), pin=(pinned("layers.2.up", ffn="tensor"),))
    result = search(Joint(), of, space)
    assert result.best is not None
    for trial in result.trials:
        own = next(each for each in trial.plan.shardings if each.operator in ("layers.2.up", "layers.up"))
        shardings = {each.operator: each for each in trial.plan.shardings}
        own = shardings.get("layers.2.up", own)
        assert own.cuts == (("ffn", (TENSOR,)),)


LIMITS = {
    "data": (1,),
    "tensor": (2,),
    "zero": (0,),
    "schedule": ("gpipe",),
    "pipeline": (2,),
    "microbatch": (2,),
    "overlap_gradients": (False,),
    "overlap_tensor": (False,),
    "devices": (4,),
}


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_kept(name: str) -> None:
    of = problem(devices=4, layers=4, batch=8)
    result = search(Joint(), of, Space(**{name: LIMITS[name]}))
    assert result.best is not None
    for trial in result.trials:
        if name == "schedule" and trial.plan.pipeline == 1:
            continue  # one stage has no schedule
        value = trial.plan.mesh.num_ranks if name == "devices" else getattr(trial.plan, name)
        assert value in LIMITS[name] or (name == "tensor" and trial.plan.tensor_rows > 1)


def test_contexts_are_not_cut_apart() -> None:
    of = problem(devices=4, layers=4, batch=8)
    result = search(Joint(), of, Space(context=(2,)))
    assert result.best is not None
    assert all(trial.plan.context == 2 or not cuts_operators(of, trial.plan) for trial in result.trials)


def test_few_microbatches_run_on_the_schedules_that_take_them() -> None:
    # 1F1B of a long pipeline may need more microbatches than there are
    of = problem(devices=4, layers=4, batch=2)
    assemble = partial(assemble_exactly, spread=9.0)
    joint_search = JointSearch(of, Space(), SimulatedCost(of), assemble, BestPlans())  # type: ignore[arg-type]
    for mesh in joint_search.meshes:
        plan = joint_search.build_base_plan(mesh)
        fault = find_rule(plan.schedule).find_violation(mesh.pipeline, mesh.num_microbatches, 1)
        assert mesh.pipeline == 1 or not fault


def test_nodes_of_one_device_have_meshes_with_operator_axes() -> None:
    of = problem(nodes=4, devices=1, layers=4, batch=8)
    assert any(dict(mesh.degrees).get(TENSOR, 1) > 1 for mesh in list_joint_meshes(of, Space()))


def test_a_search_that_ends_early_has_the_bound_so_far() -> None:
    of = problem(nodes=2, devices=2, layers=4, batch=16)
    result = search(Joint(), of, budget=60)
    assert result.lower_bound is not None and result.lower_bound > 0
    step_times = [trial.evaluation.step_time for trial in search(Joint(), of).trials]
    assert result.lower_bound <= min(step_times)


def test_frozen_weights_have_no_gradients_to_sum() -> None:
    of = problem(devices=4, layers=2, batch=8)
    frozen = replace(of, training=replace(of.training, frozen=True))
    assert search(Joint(), frozen).best is not None


def test_stages_are_cut_unlike_where_that_is_faster() -> None:
    """On a mesh of four operator ranks and two stages, stages that are cut along the batch communicate less."""
    of = problem(devices=8, layers=8, batch=16, bandwidth=1e10)
    space = Space(tensor=(4,), pipeline=(2,), data=(1,), microbatch=(4,))
    uniform, joint = search(BestFirst(), of, space), search(Joint(), of, space)
    assert uniform.best is not None and joint.best is not None
    assert joint.best.evaluation.step_time < 0.98 * uniform.best.evaluation.step_time


@pytest.mark.parametrize("bandwidth", [1e9, 1e11])
def test_every_plan_is_legal_as_a_plan_of_its_kind(bandwidth: float) -> None:
    """A plan whose shardings are those of a layout is one of a layout, with its rules."""
    of = problem(nodes=2, devices=2, layers=4, batch=16, bandwidth=bandwidth)
    for trial in search(Joint(), of).trials:
        assert list_plan_violations(of, trial.plan) == []
