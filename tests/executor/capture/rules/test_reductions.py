"""Sums may be cut along what they sum; the largest, deviations and choices may not."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402

X = random(4, 6, 8)


def test_parts_of_a_sum_are_partial_sums() -> None:
    found = operators_of(lambda x, w: (x * w).sum(1), X, (8,))["sum"]
    assert found.reduced == ("sequence",) and found.uncut == () and found.saved == ()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("amax", lambda x, w: (x * w).amax(1)),
        ("var", lambda x, w: (x * w).var(1)),
        ("logsumexp", lambda x, w: (x * w).logsumexp(1, keepdim=True)),
    ],
)
def test_what_is_no_sum_of_parts_is_not_cut(name: str, call: Callable[..., torch.Tensor]) -> None:
    found = operators_of(call, X, (8,))[name]
    assert found.reduced == () and found.uncut == ("sequence",)
    assert found.saved == ("mul", name)


def test_the_largest_are_chosen_of_all_and_backward_reads_which() -> None:
    found = operators_of(lambda x, w: (x * w).topk(2, -1).values, X, (8,))["topk"]
    assert found.kind is OperatorKind.TOP_K and found.reduced == ()
    assert {dim: size for dim, size in found.dims if dim in found.uncut}.get("experts") == 8
