"""The picture of a sharded graph says what the lowering runs."""

from pathlib import Path

import pytest

from reports.sharded_graph import draw_sharded_graph, edges
from scenarios import load
from simulator.collective_kinds import Collective
from strategies.lowering.operator import BlockLayout


def test_edges_of_a_layer_are_megatrons(tmp_path: Path) -> None:
    # Shoeybi et al. 2019, figure 4: sums after each row-parallel product forward, before each column-parallel one
    # backward; a microbatch of 1 x 2048 tokens x 12288 wide in bf16 is 48 MiB
    scenario = load("scenarios/gpt3-175b-1024-a100.yaml")
    plan = scenario.simulate().plan
    layer = scenario.problem.graph.blocks[1]
    found = edges(BlockLayout(layer, plan.mesh, {s.operator: s for s in plan.shardings}, 1))
    size = 2048 * 12288 * 2
    assert [edge.forward for edge in found if edge.forward] == [((Collective.ALL_REDUCE, size),)] * 2
    assert [edge.backward for edge in found if edge.backward] == [((Collective.ALL_REDUCE, size),)] * 2
    first = tmp_path / "first.png"
    draw_sharded_graph(scenario.problem.graph, plan, first)
    draw_sharded_graph(scenario.problem.graph, plan, tmp_path / "second.png")
    assert first.read_bytes() == (tmp_path / "second.png").read_bytes()


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    scenario = load("scenarios/gpt3-175b-1024-a100.yaml")
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        draw_sharded_graph(scenario.problem.graph, scenario.simulate().plan, tmp_path / "graph.pdf")
