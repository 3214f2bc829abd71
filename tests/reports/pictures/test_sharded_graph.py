"""The picture of a sharded graph says what the lowering runs."""

from pathlib import Path

import pytest

from meshwise import load
from meshwise.reports.pictures.sharded_graph import INPUT, draw_sharded_graph, list_edges
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.lowering.costs.kinds import classify_blocks
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec


def test_edges_of_a_layer_are_megatrons(tmp_path: Path) -> None:
    # Shoeybi et al. 2019, figure 4: sums after each row-parallel product forward, before each column-parallel one
    # backward; a microbatch of 1 x 2048 tokens x 12288 wide in bf16 is 48 MiB
    scenario = load("scenarios/gpt3-175b-1024-a100.yaml")
    plan = scenario.simulate().plan
    layer = scenario.problem.graph.blocks[1]
    found = list_edges(BlockLayout(layer, plan.mesh, {s.operator: s for s in plan.shardings}, 1))
    size = 2048 * 12288 * 2
    assert [edge.forward for edge in found if edge.forward] == [((Collective.ALL_REDUCE, size),)] * 2
    assert [edge.backward for edge in found if edge.backward] == [((Collective.ALL_REDUCE, size),)] * 2
    first = tmp_path / "first.png"
    draw_sharded_graph(scenario.problem.graph, plan, first)
    draw_sharded_graph(scenario.problem.graph, plan, tmp_path / "second.png")
    assert first.read_bytes() == (tmp_path / "second.png").read_bytes()


def test_an_exchange_shows_the_bytes_that_the_step_moves() -> None:
    # gelu of 512 rows of 8192 in bf16, cut along the batch and read cut along ffn: each of 8 ranks exchanges its 1 MiB
    # forward, and back the gradient; it crosses from one block to the next
    problem = load("operators/mlp").problem
    cuts = {"up.up": BATCH, "up.gelu": BATCH, "down.down": "ffn"}
    chosen = [OperatorSharding(name, ((dim, ("tensor",)),)) for name, dim in cuts.items()]
    plan = build_operator_plan(problem, {"tensor": 8}, 512, chosen)
    kind = classify_blocks(problem.graph, plan.shardings).by_name["down"]
    first, second, *_ = list_edges(BlockLayout.from_kind(kind, plan.mesh, 512))
    exchange = ((Collective.ALL_TO_ALL, 2**20),)
    assert (first.source, first.forward, first.backward) == (INPUT, exchange, exchange)
    assert (second.forward, second.backward) == (((Collective.ALL_REDUCE, 512 * 2048 * 2),), ())
    layout = BlockLayout(problem.graph.blocks[0], plan.mesh, {each.operator: each for each in chosen}, 512)
    assert [(edge.forward, edge.backward) for edge in list_edges(layout)] == [((), ())]


def test_readers_of_one_layout_share_its_redistribution() -> None:
    # what comes into a layer cut along the sequence is gathered once for the norm and for the residual, both whole
    scenario = load("scenarios/gpt3-175b-1024-a100.yaml")
    cut = ShardingSpec((("sequence", ("tensor",)),))
    layout = BlockLayout(scenario.problem.graph.blocks[1], scenario.choose_plan().mesh, {}, 1, input_layouts=[cut])
    found = {(edge.source, edge.target): edge.forward for edge in list_edges(layout)}
    readers = [moves for (source, _), moves in found.items() if source == INPUT]
    assert readers == [((Collective.ALL_GATHER, 2048 * 12288 * 2),), ()]
    assert sum(map(len, found.values())) == 1


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    scenario = load("scenarios/gpt3-175b-1024-a100.yaml")
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        draw_sharded_graph(scenario.problem.graph, scenario.simulate().plan, tmp_path / "graph.pdf")
