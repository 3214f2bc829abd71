"""The cuts that are chosen for a tensor axis: parameters of products are cut, samples are not."""

import pytest

from meshwise.scenarios.inputs.operator_cuts import HEAVY, choose_cuts, keep_causal_queries_whole
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, OperatorKind
from meshwise.strategies.operators.operator_plan import list_operator_violations
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.problem import Problem, Training

from ...executor.tiny_jobs import cluster

SPEC = Transformer(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, tied_embeddings=True)


@pytest.mark.parametrize(("data", "tensor", "num_microbatches"), [(1, 2, 1), (2, 4, 2), (3, 2, 1)])
def test_products_are_cut_and_samples_are_not(data: int, tensor: int, num_microbatches: int) -> None:
    graph = build(SPEC, 32, "fp32")
    plan = choose_cuts(graph, data=data, tensor=tensor, samples=4, num_microbatches=num_microbatches)
    assert (plan.data, plan.tensor, plan.microbatch, plan.num_microbatches) == (data, tensor, 4, num_microbatches)
    shardings = {sharding.operator: sharding for sharding in plan.shardings}
    assert not any(BATCH in dict(sharding.cuts) or sharding.kept for sharding in shardings.values())
    for block in graph.blocks:
        for operator in block.operators:
            if operator.kind in HEAVY and operator.parameters:
                axes = [axis for _, cut_axes in shardings[f"{block.name}.{operator.name}"].cuts for axis in cut_axes]
                assert axes == [TENSOR], operator.name
    training = Training(4 * data * num_microbatches, 32, "fp32", "adamw", framework="torch")
    assert list(list_operator_violations(Problem(graph, cluster(data * tensor), training), plan)) == []


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor\(7\) divides a dim of some parameter, .*, met 7; nearest: "):
        choose_cuts(build(SPEC, 32, "fp32"), data=1, tensor=7, samples=4, num_microbatches=1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"context": 7}, r"context\(7\) divides the tokens of a sequence, 32, met 7; nearest: 8"),
        (
            {"expert": 2},
            r"expert\(2\) divides the experts, .* each, met none; nearest: 1",
        ),
    ],
)
def test_an_axis_that_cuts_nothing_of_its_own_is_refused(words: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        choose_cuts(build(SPEC, 32, "fp32"), data=1, samples=4, num_microbatches=1, **words)


def test_no_axis_cuts_causal_queries_of_a_graph_that_searches_take() -> None:
    graph = build(SPEC, 32, "fp32")
    found = keep_causal_queries_whole(graph)
    pairs = [
        (before, after)
        for one, other in zip(graph.blocks, found.blocks, strict=True)
        for before, after in zip(one.operators, other.operators, strict=True)
    ]
    attention = [after for before, after in pairs if before.kind is OperatorKind.ATTENTION]
    assert attention and all(SEQUENCE in operator.uncut for operator in attention)
    assert all(before == after for before, after in pairs if before.kind is not OperatorKind.ATTENTION)
