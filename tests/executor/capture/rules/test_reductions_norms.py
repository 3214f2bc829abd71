"""Norms and softmax: no axis cuts the dims along which their statistics are; what backward reads."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402


@pytest.mark.parametrize(
    ("name", "call", "kind", "uncut", "saved"),
    [
        ("layer_norm", lambda x, w: functional.layer_norm(x, (8,), w), OperatorKind.NORM, {"hidden"}, ("x",)),
        ("softmax", lambda x, w: (x * w).softmax(-1), OperatorKind.SOFTMAX, {"features"}, ("softmax",)),
        ("softmax", lambda x, w: (x * w).softmax(1), OperatorKind.SOFTMAX, {"sequence"}, ("softmax",)),
        (
            "log_softmax",
            lambda x, w: (x * w).log_softmax(-1),
            OperatorKind.CROSS_ENTROPY,
            {"classes"},
            ("log_softmax",),
        ),
    ],
)
def test_statistics_are_of_whole_dims(
    name: str, call: Callable[..., torch.Tensor], kind: OperatorKind, uncut: set[str], saved: tuple[str, ...]
) -> None:
    found = operators_of(call, random(4, 6, 8), (8,))[name]
    assert found.kind is kind and set(found.uncut) == uncut and found.saved == saved and found.reduced == ()


def test_groups_of_channels_are_normalised_over_space() -> None:
    found = operators_of(lambda x, w: functional.group_norm(x, 2, w), random(4, 6, 8, 8), (6,))["group_norm"]
    assert found.kind is OperatorKind.NORM and len(found.uncut) == 3 and "batch" not in found.uncut
