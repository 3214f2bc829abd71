"""Which tables of a network ranks may share, and the network without them."""

from dataclasses import replace

from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.tables.table import Table, list_tables, without_tables

SMALL = Dlrm((100, 7), (3, 1), 16, 4, (16,), (8, 1), popularity=1.1)


def test_bags_of_a_recommender_are_tables() -> None:
    first, second = list_tables(build(SMALL, 1, "fp32"))
    assert first == Table("table_0", "embedding", "bag_0", 100, 16, 3, 1, 4, 8, 1.1)
    assert (second.rows, second.lookups, second.nbytes, second.is_pooled) == (7, 1, 7 * 64, True)


def test_words_are_looked_up_one_by_one_in_a_table_that_is_not_tied() -> None:
    spec = Transformer(2, 64, 4, 4, 256, 1000, tied_embeddings=False)
    (words,) = list_tables(build(spec, 32, "bf16"))
    assert (words.rows, words.width, words.lookups, words.vectors, words.itemsize) == (1000, 64, 32, 32, 2)
    assert not words.is_pooled
    assert not list_tables(build(replace(spec, tied_embeddings=True), 32, "bf16"))


def test_only_the_named_tables_leave_the_network() -> None:
    graph = build(SMALL, 1, "fp32")
    rest = without_tables(graph, ("table_0",))
    assert graph.num_parameters - rest.num_parameters == 100 * 16
    assert rest.flops == graph.flops
    assert without_tables(graph, ()) is graph


def test_tables_of_one_name_are_told_apart_by_their_blocks() -> None:
    graph = build(SMALL, 1, "fp32")
    first, *others = graph.blocks
    both = replace(graph, blocks=(first, replace(first, name="second"), *others))
    assert [table.name for table in list_tables(both)] == [
        f"{block}.table_{index}" for block in ("embedding", "second") for index in range(2)
    ]
    assert graph.num_parameters - without_tables(graph, ("table_1",)).num_parameters == 7 * 16
    rest = without_tables(both, ("second.table_0",))
    assert both.num_parameters - rest.num_parameters == 100 * 16
    assert not rest.blocks[1].operators[0].parameters and rest.blocks[0].operators[0].parameters
