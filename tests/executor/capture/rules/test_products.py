"""Products: two FLOP a point of rows, columns and what is summed; each factor is kept for the other's gradient."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402

from .single import operators_of, random  # noqa: E402

X = random(4, 6, 8)


def test_a_linear_layer_sums_its_inputs() -> None:
    found = operators_of(lambda x, w: functional.linear(x, w), X, (16, 8))["linear"]
    assert found.kind is OperatorKind.MATMUL and found.reduced == ("features",)
    assert found.flops == 2 * 6 * 8 * 16
    assert found.saved == ("x",)  # the input has no gradient, for which the weight would be kept


def test_the_weight_of_a_second_layer_is_read_by_the_gradient_of_its_input() -> None:
    found = operators_of(lambda x, w, v: functional.linear(functional.linear(x, w), v), X, (16, 8), (8, 16))
    assert "linear" in found["linear_2"].saved and len(found["linear_2"].parameters) == 1


def test_equal_sizes_of_rows_and_columns_are_dims_of_their_own() -> None:
    found = operators_of(lambda x, w: (x * w) @ (x * w).transpose(1, 2), X, (8,))["matmul"]
    assert found.kind is OperatorKind.BATCH_MATMUL and found.reduced == ("features",)
    sizes = [size for dim, size in found.dims if dim not in ("batch", "features")]
    assert sizes == [6, 6] and found.flops == 2 * 6 * 6 * 8


def test_a_sum_of_einsteins_kind_is_the_product() -> None:
    einsum = operators_of(lambda x, w: torch.einsum("bsf,fh->bsh", x, w), X, (8, 16))
    [found] = [each for each in einsum.values() if each.flops]
    assert found.flops == 2 * 6 * 8 * 16 and found.reduced == ("features",)
