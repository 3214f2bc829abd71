"""What backward of operators that work point by point reads: operands, the result, or nothing."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402

X = random(4, 6, 8)


@pytest.mark.parametrize(
    ("name", "call", "saved"),
    [
        ("add", lambda x, w: (x * w) + 1, ()),
        ("neg", lambda x, w: -(x * w), ()),
        ("relu", lambda x, w: (x * w).relu(), ("relu",)),
        ("sigmoid", lambda x, w: (x * w).sigmoid(), ("sigmoid",)),
        ("gelu", lambda x, w: functional.gelu(x * w), ("mul",)),
        ("div", lambda x, w: (x * w) / 2, ()),
    ],
)
def test_backward_reads_the_operand_the_result_or_nothing(
    name: str, call: Callable[..., torch.Tensor], saved: tuple[str, ...]
) -> None:
    found = operators_of(call, X, (8,))[name]
    assert found.kind is OperatorKind.ELEMENTWISE and found.saved == saved
    assert dict(found.dims) == {"batch": 1, "sequence": 6, "features": 8} and found.uncut == ()


def test_a_product_keeps_the_factor_of_each_gradient() -> None:
    # the input has no gradient: its own is not asked for, so the weight is not kept for it
    assert operators_of(lambda x, w: x * w, X, (8,))["mul"].saved == ("x",)
    both = operators_of(lambda x, w, v: (x * w) * (x * v), X, (8,), (8,))["mul_3"]
    assert set(both.saved) == {"mul", "mul_2"}


def test_dropout_keeps_which_points_it_dropped_and_not_its_operand() -> None:
    found = operators_of(lambda x, w: functional.dropout(x * w, 0.5, training=True), X, (8,))
    [dropout] = [each for each in found.values() if each.kind is OperatorKind.DROPOUT]
    assert "mul" not in dropout.saved and len(dropout.saved) == 1
