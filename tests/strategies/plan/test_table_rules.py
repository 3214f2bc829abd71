"""The rules of tables that data ranks share, and what a legal layout becomes."""

from typing import Any

import pytest

from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import EXPERT
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.tables.embeddings import parse_embeddings

from ..problems import problem
from ..tables.recommender import recommender

ROWS = parse_embeddings("rows")


def list_messages(**decisions: Any) -> list[tuple[str, str]]:
    small = recommender(devices=4)
    return list(violations(small, Layout(**{"data": 4, "microbatch": 8, "embeddings": ROWS} | decisions)))


def test_rows_over_all_data_ranks_are_legal() -> None:
    assert list_messages() == []


@pytest.mark.parametrize(
    ("decisions", "field", "message"),
    [
        ({"data": 2, "tensor": 2}, "tensor", "tables that data ranks share need tensor 1, met 2; nearest: 1"),
        ({"expert": 2}, "expert", "all data(4) ranks share the tables, and no experts, met expert 2; nearest: 1"),
        (
            {"zero": 1, "zero_shards": 2},
            "zero_shards",
            "all data(4) ranks share the tables, and with them states, met 2; nearest: 0",
        ),
        ({"microbatch": (4, 4, 8, 16)}, "microbatch", "ranks that share tables have equal microbatches, met several"),
        (
            {"gradient_reduction": "parameter_server"},
            "gradient_reduction",
            "ranks that share tables have no server, met parameter_server; nearest: all_reduce",
        ),
        (
            {"embeddings": parse_embeddings({"table_9": "rows"})},
            "embeddings.table_9",
            "names a table, of table_0, table_1, table_2, or default, optimizer, pipelined; met table_9; nearest: ta",
        ),
        (
            {"embeddings": parse_embeddings({"table_1": {"cut": "table", "device": 4}})},
            "embeddings.table_1",
            "table_1: device is below data(4), met 4; nearest: 3",
        ),
        (
            {"embeddings": parse_embeddings({"table_1": {"cut": "node_rows", "device": 4}})},
            "embeddings.table_1",
            "table_1: device is below data(4), for it names the node of a data rank, met 4; nearest: 3",
        ),
        (
            {"data": 3, "placement": (0, 1, 2), "microbatch": 4, "embeddings": parse_embeddings("columns")},
            "embeddings.default",
            "table_0: data(3) divides the columns(16); nearest: rows",
        ),
        (
            {"embeddings": parse_embeddings("node_rows")},
            "embeddings",
            "node_rows needs ranks in order on all devices of several alike nodes of several devices, "
            "met 4 ranks on 4 devices of 1 node; nearest: rows",
        ),
    ],
)
def test_every_broken_rule_says_so(decisions: dict[str, Any], field: str, message: str) -> None:
    messages = list_messages(**decisions)
    assert any(met == field and text.startswith(message) for met, text in messages), messages


def test_a_model_without_tables_says_so() -> None:
    messages = list(violations(problem(devices=4, tied=True), Layout(data=4, microbatch=8, embeddings=ROWS)))
    assert ("embeddings", "the model has no tables that ranks may share; nearest: leave it out") in messages


def test_a_plan_with_tables_goes_through_its_layout_and_its_document() -> None:
    small = recommender(devices=4)
    stated = parse_embeddings({"table_0": "table", "table_1": {"placement": "host", "cache": 0.5}, "pipelined": True})
    plan = complete(small, Layout(data=4, microbatch=8, embeddings=stated))
    assert (plan.mesh.size(EXPERT), plan.data) == (4, 4)
    assert plan.describe() == (
        "data 4 x tensor 1 x pipeline 1, 1 microbatch of 8, tables 1 by table, 1 by rows on hosts, pipelined"
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert complete(small, recover_layout(small, plan)) == plan


def test_plans_without_shared_tables_are_as_before() -> None:
    small = recommender(devices=4)
    plan = complete(small, Layout(data=4, microbatch=8))
    assert complete(small, Layout(data=4, microbatch=8, embeddings=parse_embeddings("replicated"))) == plan
    assert plan.mesh.size(EXPERT) == 1
