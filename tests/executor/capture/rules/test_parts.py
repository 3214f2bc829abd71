"""Parts of tensors, and tensors put together: no axis cuts the dim along which that is done."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402

X = random(4, 6, 8)


@pytest.mark.parametrize(
    ("name", "call"),
    [("select", lambda x, w: (x * w)[:, 0]), ("slice", lambda x, w: (x * w)[:, :3])],
)
def test_a_part_along_a_dim_needs_all_of_it_and_none_of_the_others(
    name: str, call: Callable[..., torch.Tensor]
) -> None:
    found = operators_of(call, X, (8,))[name]
    assert found.kind is OperatorKind.VIEW and "sequence" in found.uncut
    assert "features" not in found.uncut and "batch" not in found.uncut


def test_all_of_a_dim_is_no_part() -> None:
    assert not [name for name in operators_of(lambda x, w: (x * w)[:, :6], X, (8,)) if "slice" in name]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("slice_scatter", lambda x, w: torch.slice_scatter(x * w, x[:, :2] * w, 1, 0, 2)),
        ("select_scatter", lambda x, w: torch.select_scatter(x * w, x[:, 0] * w, 1, 3)),
    ],
)
def test_a_part_is_written_along_a_dim_that_is_whole_and_others_are_cut(
    name: str, call: Callable[..., torch.Tensor]
) -> None:
    found = operators_of(call, X, (8,))[name]
    assert "sequence" in found.uncut and not {"features", "batch"} & set(found.uncut)
    assert {"batch", "features"} <= set(dict(found.dims))


def test_what_is_put_together_has_a_dim_of_its_own() -> None:
    found = operators_of(lambda x, w: torch.cat([x * w, x], 1), X, (8,))["cat"]
    [dim] = found.uncut
    assert dict(found.dims)[dim] == 12 and dim != "sequence"
