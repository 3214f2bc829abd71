"""Laws that the graph of every model keeps."""

from itertools import pairwise

import networkx as nx
import pytest

from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.operator_graph import Block, OperatorGraph

SMALL = (
    "gpt-byte",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "bert-base",
    "t5-small",
    "vit-b-16",
    "resnet-50",
    "dlrm-criteo",
    "dlrm-dcnv2",
    "stable-diffusion-1.5",
)


def graph_of(name: str) -> OperatorGraph:
    return build(MODELS[name], 128, "bf16")


def boundary(block: Block, names: tuple[str, ...]) -> list[tuple[int, str]]:
    return [(block.tensor[name].nbytes, block.tensor[name].dtype) for name in names]


@pytest.mark.parametrize("name", MODELS)
def test_what_leaves_a_block_enters_the_next(name: str) -> None:
    blocks = [block for _, block in graph_of(name).occurrences]
    for before, after in pairwise(blocks):
        assert boundary(before, before.outputs) == boundary(after, after.inputs), (before.name, after.name)


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_that_leaves_a_block_is_kept_by_its_reader(name: str) -> None:
    blocks = graph_of(name).blocks
    carried = {tensor for block in blocks for tensor in set(block.inputs) & set(block.outputs)}
    for block in blocks:
        saved = {name for operator in block.operators for name in operator.saved}
        assert not saved & set(block.outputs) - carried, block.name


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_every_tensor_is_used(name: str) -> None:
    graph = graph_of(name)
    assert len({block.name for block in graph.blocks}) == len(graph.blocks)
    for block in graph.blocks:
        names = [operator.name for operator in block.operators]
        assert len(set(names)) == len(names)
        used = {t for o in block.operators for t in (*o.inputs, *o.outputs, *o.parameters, *o.saved)}
        assert set(block.tensor) <= used | set(block.inputs) | set(block.outputs)


@pytest.mark.parametrize("name", MODELS)
def test_an_operator_reads_what_was_made_before_it(name: str) -> None:
    data = {"text", "target_tokens"}
    for block in graph_of(name).blocks:
        known = set(block.inputs) | data
        for operator in block.operators:
            assert set(operator.inputs) <= known, (block.name, operator.name)
            known |= set(operator.outputs)
        assert set(block.outputs) <= known


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_a_dim_agree_between_an_operator_and_its_tensors(name: str) -> None:
    for block in graph_of(name).blocks:
        for operator in block.operators:
            sizes = dict(operator.dims)
            for tensor in (*operator.inputs, *operator.outputs, *operator.parameters, *operator.saved):
                shape = dict(zip(block.tensor[tensor].dims, block.tensor[tensor].shape, strict=True))
                assert all(sizes.get(dim, size) == size for dim, size in shape.items()), (operator.name, tensor)


@pytest.mark.parametrize("name", SMALL)
def test_the_graph_is_acyclic_and_connected(name: str) -> None:
    graph = graph_of(name).to_networkx()
    assert nx.is_directed_acyclic_graph(graph) and nx.is_weakly_connected(graph)


@pytest.mark.parametrize("name", SMALL)
def test_flops_scale_with_precision_not_at_all_and_bytes_with_it(name: str) -> None:
    half, single = (build(MODELS[name], 128, precision) for precision in ("bf16", "fp32"))
    assert half.flops == single.flops and half.num_parameters == single.num_parameters
    weights = [sum(t.nbytes for b in graph.blocks for t in b.parameters) for graph in (half, single)]
    assert weights[1] == 2 * weights[0]


def test_layers_are_the_blocks_between_the_ends() -> None:
    for name in MODELS:
        layers = [block.layer for block in graph_of(name).blocks]
        assert layers[0] is False and layers[-1] is False and all(layers[1:-1]), name


def test_a_block_that_repeats_is_a_layer() -> None:
    assert Block("b", (), (), (), (), repeat=2).layer and not Block("b", (), (), (), ()).layer


def test_dense_layers_come_before_those_with_experts() -> None:
    lite, large = graph_of("deepseek-v2-lite"), graph_of("deepseek-v3")
    assert [(block.name, block.repeat) for block in lite.blocks[1:-1]] == [("dense_layers", 1), ("layers", 26)]
    assert [(block.name, block.repeat) for block in large.blocks[1:-1]] == [("dense_layers", 3), ("layers", 58)]


def test_the_encoders_output_reaches_every_layer_of_the_decoder() -> None:
    graph = graph_of("t5-small").to_networkx()
    for index in range(5):
        assert nx.has_path(graph, "first_decoder_layer.encoder_dropout", f"decoder_layers.{index}.cross_key_value")
        edge = graph.edges["first_decoder_layer.encoder_dropout", f"decoder_layers.{index}.cross_key_value"]
        assert edge["tensor"] == "encoded"


def test_skips_reach_the_way_up_last_in_first_out() -> None:
    graph = graph_of("stable-diffusion-1.5").to_networkx()
    # 12 skips: the input, two a level, and three halved images; each joins once, and the first one joins last
    joined = [name for name in graph if name.endswith(".join")]
    makers = [next(p for p in graph.predecessors(name) if p.startswith(("down", "input"))) for name in joined]
    assert len(set(makers)) == len(joined) == 12
    assert makers[0].startswith("down_4_2") and makers[-1] == "input.convolution"
