"""Occurrences of blocks that are cut alike and whose inputs arrive alike are of one kind."""

from meshwise.simulator.collective import Collective
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.strategies.lowering.costs.kinds import classify_blocks
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.parallelism import Parallelism, shard_operators
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec

from ...problems import find_block_cost, problem

TOKENS = (("sequence", (TENSOR,)),)


def test_where_all_layers_are_cut_alike_a_kind_is_a_block() -> None:
    for by in (Parallelism(), Parallelism(tensor=True), Parallelism(tensor=True, sequence_parallel=True)):
        graph = build(MODELS["gpt3-1.3b"], 512, "bf16")
        found = classify_blocks(graph, shard_operators(graph, by))
        assert found.kind_names == {name: block.name for name, block in graph.occurrences}


def test_a_layer_that_is_cut_otherwise_and_the_one_behind_it_are_kinds_of_their_own() -> None:
    graph = problem(layers=5).graph
    last = graph.blocks[1].operators[-1].name
    found = classify_blocks(graph, (OperatorSharding(f"layers.1.{last}", TOKENS),))
    assert [found.kind_names[f"layers.{n}"] for n in range(5)] == ["layers", "layers.1", "layers.2", "layers", "layers"]
    assert found.by_name["layers.1"].input_layouts == (ShardingSpec(),)
    assert found.by_name["layers.2"].input_layouts == (ShardingSpec(TOKENS),)


def test_what_a_block_leaves_cut_the_next_one_gathers() -> None:
    # the last operator of layer 0 leaves its tokens cut: layer 1 gathers them forward; its gradient of them is whole on
    # every rank, and a part of it is what layer 0 reads
    small = problem(devices=2, layers=2, batch=4)
    last = small.graph.blocks[1].operators[-1].name
    plan = build_operator_plan(small, {TENSOR: 2}, 4, (OperatorSharding(f"layers.0.{last}", TOKENS),))
    costs = StageCosts(small)
    segments = find_block_cost(costs, plan, costs.find_keys(plan).cut.kinds.kind_names["layers.1"]).work.segments
    moved = [(s.collective, s.size) for s in segments.forward if s.collective is not None]
    assert moved == [(Collective.ALL_GATHER, 4 * 32 * 64 * 4.0)]
    assert not [s for s in segments.backward if s.collective is not None]


def test_post_norm_layers_take_tokens_as_the_norm_before_leaves_them() -> None:
    graph = build(MODELS["bert-base"], 512, "bf16")
    found = classify_blocks(graph, shard_operators(graph, Parallelism(tensor=True, sequence_parallel=True)))
    assert {found.by_name[found.kind_names[f"layers.{n}"]].input_layouts for n in range(12)} == {
        (ShardingSpec(TOKENS),)
    }
