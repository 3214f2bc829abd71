"""The costs of operators and redistributions add up to the step that the simulator makes of the plan."""

from dataclasses import replace
from random import Random

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.operator import build_arrivals, build_returns
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import chain_ticks
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.plan.framework import FRAMEWORKS, MEGATRON
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import ShardingSpec

from ..problems import find_block_layout, problem

DEGREES = ({TENSOR: 6}, {TENSOR_ROWS: 2, TENSOR: 3}, {TENSOR_DEPTH: 2, TENSOR: 3})


def small(devices: int = 6, **changes: object) -> Problem:
    sizes = {"hidden": 72, "heads": 12, "kv_heads": 12, "ffn": 144, "vocab": 144}
    found = problem(devices=devices, layers=2, batch=12, bandwidth=1e11, **sizes | changes)  # type: ignore[arg-type]
    return replace(found, training=replace(found.training, framework="waiting"))


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing run beside products, as costs of operators alone have it; and let gradients be added apart."""
    changes = {"hides_input_gradients": False, "adds_gradients": True, "fused_gradients": False}
    monkeypatch.setitem(FRAMEWORKS, "waiting", replace(MEGATRON, name="waiting", **changes))


@pytest.fixture
def hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gradients of inputs be summed beside the products for those of weights, and nothing else change."""
    monkeypatch.setitem(FRAMEWORKS, "hiding", replace(FRAMEWORKS["waiting"], name="hiding", hides_input_gradients=True))


def simulated(of: Problem, plan: Plan) -> int:
    return round(SimulatedCost(of).evaluate(plan).step_time * TICKS_PER_SECOND)


def shared_redistributions(of: Problem, plan: Plan) -> int:
    """Return the ticks of redistributions that readers of one tensor in one layout share in the lowered step."""
    costs, total = StageCosts(of), 0
    clock, names = costs.clock(costs.machine(plan).rank(0)), costs.find_keys(plan).cut.kinds.kind_names

    def count_ticks(moves: list[Segment]) -> int:
        return chain_ticks(clock.time_segments(moves))

    for occurrence, block in of.graph.occurrences:
        layout = find_block_layout(costs, plan, names[occurrence])
        for name in dict.fromkeys(each for operator in block.operators for each in operator.inputs):
            have = layout.produced_layouts[name]
            readers: dict[ShardingSpec, list[ShardingSpec]] = {}
            for operator in block.operators:
                if name in operator.inputs:
                    gradient = layout.shardings[operator.name].find_gradient_spec(block.tensor[name])
                    readers.setdefault(layout.input_layout(operator, name), []).append(gradient)
            for wanted, gradients in readers.items():
                summed = dict.fromkeys(axis for each in gradients for axis in each.partial)
                once = build_returns(layout, name, ShardingSpec(wanted.cuts, tuple(summed)), have)
                each = [build_returns(layout, name, gradient, have) for gradient in gradients]
                arriving = build_arrivals(layout, name, have, wanted, sums_first=False)
                total += (len(gradients) - 1) * count_ticks(arriving) + sum(map(count_ticks, each)) - count_ticks(once)
    return total * plan.num_microbatches


def latencies(of: Problem, plan: Plan) -> int:
    """Return the ticks of sums of one byte along every axis: what the rate of many bytes leaves out."""
    groups = StageCosts(of).machine(plan).rank(0).groups
    return sum(group.ticks(Collective.ALL_REDUCE, 1.0) for group in groups.values())


@pytest.mark.parametrize("degrees", DEGREES)
def test_where_nothing_is_shared_or_summed_the_costs_are_the_step(degrees: dict[str, int]) -> None:
    # everything whole, and all cut along the batch: no redistributions; of sums only their latency is left out
    of = small()
    costs = compute_operator_costs(of, degrees, 12)
    whole = (0,) * len(costs.nodes)
    # rounding: a tick for each node's part of the update
    assert abs(costs.graph.time(whole) - simulated(of, costs.build_plan(whole))) <= len(costs.nodes)
    batch = tuple(
        next(i for i, each in enumerate(own) if dict(each.cuts) == {"batch": tuple(degrees)} and not each.kept)
        for own in costs.choices
    )
    plan = costs.build_plan(batch)
    over = costs.graph.time(batch) - simulated(of, plan)
    assert abs(over) <= latencies(of, plan) + len(costs.nodes)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("seed", range(8))
def test_the_costs_of_any_choice_are_the_step_but_for_what_is_shared(degrees: dict[str, int], seed: int) -> None:
    of, random = small(), Random(seed)
    costs = compute_operator_costs(of, degrees, random.choice((6, 12)))
    choice = tuple(random.randrange(size) for size in costs.graph.sizes)
    plan = costs.build_plan(choice)
    over = costs.graph.time(choice) - simulated(of, plan)
    alone = over - shared_redistributions(of, plan)
    assert -latencies(of, plan) - len(costs.nodes) <= alone <= len(costs.nodes)
    peak = SimulatedCost(of).peak_memory(plan)
    assert peak <= costs.graph.memory(choice) + costs.resident_bytes


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("microbatch", [6, 12])
def test_a_step_holds_no_more_than_its_choices_where_gradients_come_and_go_too(framework: str, microbatch: int) -> None:
    of, random = small(), Random(framework)
    of = replace(of, training=replace(of.training, framework=framework))
    costs = compute_operator_costs(of, {TENSOR: 6}, microbatch)
    whole = (0,) * len(costs.nodes)
    for choice in (whole, *(tuple(random.randrange(size) for size in costs.graph.sizes) for _ in range(4))):
        peak = SimulatedCost(of).peak_memory(costs.build_plan(choice))
        assert peak <= costs.graph.memory(choice) + costs.resident_bytes


def test_an_operators_choices_and_a_chain_of_them_by_hand() -> None:
    # Megatron's feed-forward layer on 2 ranks: up by columns, down by rows; one all-reduce of 12 x 32 tokens x 72
    # values of 4 bytes forward, after down, and one backward, of the gradient of what up reads
    of = small(devices=2)
    costs = compute_operator_costs(of, {TENSOR: 2}, 12)
    names = [node.name for node in costs.nodes]

    def chosen(name: str, dims: tuple[str, ...]) -> tuple[int, int]:
        node = names.index(name)
        cuts = tuple((dim, (TENSOR,)) for dim in dims)
        return node, next(i for i, each in enumerate(costs.choices[node]) if each.cuts == cuts and not each.kept)

    group = StageCosts(of).machine(costs.build_plan((0,) * len(names))).rank(0).groups[TENSOR]
    one = group.ticks(Collective.ALL_REDUCE, 12 * 32 * 72 * 4.0)
    norm, up = chosen("layers.0.feed_forward_norm", ()), chosen("layers.0.up", ("ffn",))
    active, down = chosen("layers.0.activation", ("ffn",)), chosen("layers.0.down", ("ffn",))
    residual = chosen("layers.0.feed_forward_residual", ())
    pairs = [(norm, up), (up, active), (active, down), (down, residual)]
    found = [
        next((int(e.times[a[1], b[1]]) for e in costs.graph.edges if (e.source, e.target) == (a[0], b[0])), 0)
        for a, b in pairs
    ]
    assert found == [one, 0, 0, one]


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize("between", [(), ("sequence",)])
def test_what_is_hidden_beside_products_is_hidden_in_their_costs(between: tuple[str, ...]) -> None:
    # Megatron's layer on 4 ranks; what it sums in backward is hidden in the simulated step and in the sum of costs
    waits = small(devices=4)
    hides = replace(waits, training=replace(waits.training, framework="hiding"))
    cut = {"qkv": "heads", "attention": "heads", "projection": "heads", "up": "ffn", "activation": "ffn", "down": "ffn"}
    found = []
    for of in (waits, hides):
        costs = compute_operator_costs(of, {TENSOR: 4}, 12)
        dims = [
            ((cut[node.operator.name],) if node.operator.name in cut else between) if node.block.layer else ()
            for node in costs.nodes
        ]
        choice = [
            next(i for i, each in enumerate(own) if tuple(d for d, _ in each.cuts if d != "key") == want)
            for own, want in zip(costs.choices, dims, strict=True)
        ]
        found.append((costs.graph.time(choice), simulated(of, costs.build_plan(choice))))
    hidden = [waited - hid for waited, hid in zip(*found, strict=True)]
    assert hidden[0] == hidden[1] > 0


def test_copies_of_a_layer_are_of_one_class() -> None:
    of = small()
    costs = compute_operator_costs(of, {TENSOR: 6}, 12)
    classes = {node.name: number for node, number in zip(costs.nodes, costs.graph.copies, strict=True)}
    assert classes["layers.0.up"] == classes["layers.1.up"] != classes["layers.0.down"]
    assert classes["embedding.token"] == -1
