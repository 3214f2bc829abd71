"""Stages cover every block of the network once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.models.builder import BlockBuilder
from simulator.models.layers import linear
from simulator.operator_graph import OperatorGraph
from strategies.partition import num_layers, partition

from .problems import problem

PROBLEM = problem()


@given(st.integers(1, 8), st.sampled_from(["balanced", "even"]))
def test_stages_cover_every_block_once_in_order(stages: int, how: str) -> None:
    if how == "even" and num_layers(PROBLEM.graph) % stages:
        return
    blocks = [block for stage in partition(PROBLEM.graph, stages, how) for block in stage.blocks]
    assert blocks == [name for name, _ in PROBLEM.graph.occurrences]


def test_balanced_stages_leave_room_for_the_output_layer() -> None:
    # 10 layers on 4 stages with an output layer worth about 5 layers: the last stage gets the fewest
    heavy = problem(layers=10, vocab=4096)
    counts = [sum("layers" in b for b in stage.blocks) for stage in partition(heavy.graph, 4, "balanced")]
    assert sum(counts) == 10 and counts == [3, 3, 3, 1]


@pytest.mark.parametrize(("ends_in_a_product", "expected"), [(False, [3, 2]), (True, [4, 1])])
def test_layers_without_products_are_divided_too(ends_in_a_product: bool, expected: list[int]) -> None:
    builder = BlockBuilder("fp32", {"hidden": 8})
    x, y = (builder.tensor(name, "batch hidden") for name in ("x", "y"))
    builder.elementwise("add", "batch hidden", (x,), (y,))
    blocks = [builder.block("layers", (x,), (y,), repeat=5, layer=True)]
    if ends_in_a_product:  # it is heavier than all of them
        head = BlockBuilder("fp32", {"hidden": 8, "out": 4})
        x, z = head.tensor("x", "batch hidden"), head.tensor("z", "batch out")
        linear(head, "last", x, (z,), "batch out hidden", weight="hidden out", reduced="hidden")
        blocks.append(head.block("head", (x,), (z,)))
    stages = partition(OperatorGraph("adds", tuple(blocks), 1), 2, "balanced")
    assert [sum("layers" in name for name in stage.blocks) for stage in stages] == expected
