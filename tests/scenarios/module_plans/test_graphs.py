"""Graphs with measured times take what was measured, however it is divided among operators."""

from dataclasses import replace

import pytest

from meshwise.scenarios.module_plans.graphs import (
    build_block_graph,
    count_layers,
    keep_more,
    mark_blocks,
    measure_operators,
)
from meshwise.scenarios.module_plans.prediction import at_pace
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.operator_graph import BATCH, OperatorGraph
from tests.scenarios.module_plans.modules import BLOCK_ELEMENTS, build_figures

CORE = cluster("local-cpu").accelerator


def sum_times(graph: OperatorGraph, samples: int, *directions: Pass) -> float:
    return sum(
        block.repeat
        * operator_time(
            CORE, block, operator, {name: samples if name == BATCH else size for name, size in operator.dims}, direction
        )
        for block in graph.blocks
        for operator in block.operators
        for direction in directions
    )


@pytest.mark.parametrize("kind", ["blocks", "captured"])
def test_operators_together_take_the_measured_passes(kind: str) -> None:
    figures = build_figures()
    transformer = build(PRESETS["gpt-byte"], 64, "fp32")
    graph = build_block_graph(figures, "fp32", "m") if kind == "blocks" else transformer
    graph = measure_operators(graph, figures, CORE) if kind == "captured" else graph
    assert sum_times(graph, 8, *Pass) == pytest.approx(6e-3)
    assert sum_times(graph, 8, Pass.FORWARD) == pytest.approx(3e-3)  # half of what all parts took
    if kind == "blocks":
        assert sum_times(graph, 2, *Pass) == pytest.approx(3e-3)
        assert sum_times(at_pace(graph, 0.5), 2, *Pass) == pytest.approx(1.5e-3)


def test_blocks_are_layers_with_their_parameters() -> None:
    graph = build_block_graph(build_figures(), "fp32", "m")
    assert count_layers(graph) == 2 and graph.num_parameters == 2 * BLOCK_ELEMENTS


def test_layers_are_the_blocks_of_the_module_alone() -> None:
    # a stem of two products, twice two equal layers with a projection between, and a layer of its own
    names = {"stem_0": 1, "stem_1": 1, "net_layers": 2, "project": 1, "net_layers_2": 2, "net_layers_4": 1, "head": 1}
    (block, *_) = build_block_graph(build_figures(), "fp32", "m").blocks
    blocks = (replace(block, name=name, repeat=repeat, layer=True) for name, repeat in names.items())
    graph = mark_blocks(OperatorGraph("m", tuple(blocks), 1), [f"net.layers.{place}" for place in range(5)])
    assert [block.name for block in graph.blocks if block.layer] == ["net_layers", "net_layers_2", "net_layers_4"]
    assert count_layers(graph) == 5


def test_more_is_kept_through_both_passes() -> None:
    graph = build_block_graph(build_figures(), "fp32", "m")
    first, *others = keep_more(graph, 1024).blocks
    assert first.tensor["kept"].nbytes == 1024 and first.operators[0].saved[-1] == "kept"
    assert tuple(others) == graph.blocks[1:] and keep_more(graph, -5) == graph
    at_end = keep_more(graph, 1024, at_end=True)
    assert at_end.blocks[:-1] == graph.blocks[:-1] and at_end.blocks[-1].tensor["kept"].nbytes == 1024
