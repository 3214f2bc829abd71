"""Stages cover every block of the network once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.plan.partition import count_possible_stages, num_layers, partition_layers, share_ends

from ..problems import problem

PROBLEM = problem()


@given(st.integers(1, 8), st.sampled_from(["balanced", "even"]))
def test_stages_cover_every_block_once_in_order(stages: int, how: str) -> None:
    if how == "even" and num_layers(PROBLEM.graph) % stages:
        return
    blocks = [block for stage in partition_layers(PROBLEM.graph, stages, how) for block in stage.blocks]
    assert blocks == [name for name, _ in PROBLEM.graph.occurrences]


def test_balanced_stages_leave_room_for_the_output_layer() -> None:
    # 10 layers on 4 stages with an output layer worth about 5 layers: the last stage gets the fewest
    heavy = problem(layers=10, vocab=4096)
    counts = [sum("layers" in b for b in stage.blocks) for stage in partition_layers(heavy.graph, 4, "balanced")]
    assert sum(counts) == 10 and counts == [3, 3, 3, 1]


@pytest.mark.parametrize(("ends_in_a_product", "expected"), [(False, [3, 2]), (True, [4, 1])])
def test_layers_without_products_are_divided_too(ends_in_a_product: bool, expected: list[int]) -> None:
    builder = BlockBuilder("fp32", {"hidden": 8})
    x, y = (builder.add_tensor(name, "batch hidden") for name in ("x", "y"))
    builder.add_elementwise("add", "batch hidden", (x,), (y,))
    blocks = [builder.build_block("layers", (x,), (y,), repeat=5, layer=True)]
    if ends_in_a_product:  # it is heavier than all of them
        head = BlockBuilder("fp32", {"hidden": 8, "out": 4})
        x, z = head.add_tensor("x", "batch hidden"), head.add_tensor("z", "batch out")
        linear(head, "last", x, (z,), "out", over="batch")
        blocks.append(head.build_block("head", (x,), (z,)))
    stages = partition_layers(OperatorGraph("adds", tuple(blocks), 1), 2, "balanced")
    assert [sum("layers" in name for name in stage.blocks) for stage in stages] == expected


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 4))
def test_blocks_between_layers_are_in_the_stage_of_the_layer_before_them(are_layers: list[bool], stages: int) -> None:
    are_layers = [*are_layers, *[True] * stages]
    blocks = []
    for number, layer in enumerate(are_layers):
        builder = BlockBuilder("fp32", {"hidden": 8})
        x, y = (builder.add_tensor(name, "batch hidden") for name in ("x", "y"))
        builder.add_elementwise("add", "batch hidden", (x,), (y,))
        blocks.append(builder.build_block(f"block{number}", (x,), (y,), layer=layer))
    parts = partition_layers(OperatorGraph("adds", tuple(blocks), 1), stages, "balanced")
    names = [[int(name.removeprefix("block")) for name in part.blocks] for part in parts]
    assert [name for part in names for name in part] == list(range(len(blocks)))
    assert all(are_layers[part[0]] for part in names[1:])  # a stage begins at a layer, the first one at the input


def test_blocks_between_layers_weigh_in_the_stage_that_has_them() -> None:
    # layers of 1, and 4 between the first two of them: 5 + 1 + 1 + 1 in two stages are 5 and 3
    blocks = []
    for number, (width, layer) in enumerate([(1, True), (4, False), (1, True), (1, True), (1, True)]):
        builder = BlockBuilder("fp32", {"hidden": 8, "width": 8 * width})
        x, y = builder.add_tensor("x", "batch hidden"), builder.add_tensor("y", "batch width")
        linear(builder, "product", x, (y,), "width", over="batch")
        blocks.append(builder.build_block(f"block{number}", (x,), (y,), layer=layer))
    stages = partition_layers(OperatorGraph("products", tuple(blocks), 1), 2, "balanced")
    assert [len(stage.blocks) for stage in stages] == [2, 3]


def counts_of(graph: OperatorGraph, stages: int) -> list[int]:
    return [sum("layers" in block for block in stage.blocks) for stage in partition_layers(graph, stages, "balanced")]


def test_embedding_and_loss_have_stages_of_their_own_where_there_are_more_stages_than_layers() -> None:
    layers = num_layers(PROBLEM.graph)
    assert count_possible_stages(PROBLEM.graph) == layers + 2  # one a layer, one for the embedding, one for the loss
    assert counts_of(PROBLEM.graph, layers + 1) == [1] * layers + [0]
    assert counts_of(PROBLEM.graph, layers + 2) == [0] + [1] * layers + [0]
    blocks = [block for stage in partition_layers(PROBLEM.graph, layers + 2, "balanced") for block in stage.blocks]
    assert blocks == [name for name, _ in PROBLEM.graph.occurrences]
    assert all(stage.blocks for stage in partition_layers(PROBLEM.graph, layers + 2, "balanced"))


@given(st.integers(2, 200), st.integers(2, 64))
def test_ends_weigh_as_much_as_a_layer(layers: int, stages: int) -> None:
    counts = share_ends(layers, stages)
    if min(counts) < 0:
        assert stages > layers + 2  # then there is nothing for some stage
        return
    weights = [counts[0] + 1, *counts[1:-1], counts[-1] + 1]
    assert sum(counts) == layers and max(weights) - min(weights) <= 1
