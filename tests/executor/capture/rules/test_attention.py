"""Attention as one kernel: its square, the half of it that a causal one computes, and what its backward reads."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.simulator.operator_graph import Operator, OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402


def attention(causal: bool) -> Operator:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x * weight, x, x, is_causal=causal)

    return operators_of(call, random(4, 2, 6, 8), (8,))["attention"]


@pytest.mark.parametrize("causal", [True, False])
def test_two_products_of_queries_and_keys(causal: bool) -> None:
    found = attention(causal)
    assert found.kind is OperatorKind.ATTENTION
    assert dict(found.dims) == {"batch": 1, "heads": 2, "sequence": 6, "key": 6, "head_dim": 8}
    # 2 FLOP for each of two products over 6 queries, 6 keys and 8 dims of 2 heads; a causal kernel executes half
    assert found.flops == 2 * 2 * 2 * 6 * 6 * 8
    assert found.executed_fraction == (0.5 if causal else 1.0)


@pytest.mark.parametrize("causal", [True, False])
def test_heads_and_queries_may_be_cut_and_keys_not(causal: bool) -> None:
    uncut = set(attention(causal).uncut)
    assert {"key", "head_dim"} <= uncut and uncut.isdisjoint({"heads", "sequence"})


def test_backward_reads_queries_keys_values_and_the_result() -> None:
    assert len(attention(True).saved) == 4
