"""A grouped product is the products of its groups, with their gradients, and stands for torch's own."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import grouped_mm  # noqa: E402

from meshwise.executor.capture.grouped_products import GroupedProducts, grouped_product  # noqa: E402

from .rules.single import operators_of, random  # noqa: E402


def test_it_is_the_products_of_its_groups() -> None:
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 5, 5])
    result = grouped_product(rows, matrices, ends)
    expected = torch.cat((rows[:2] @ matrices[0], rows[2:5] @ matrices[2], torch.zeros(1, 2, dtype=torch.float64)))
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(result)
    own, others = (torch.autograd.grad((y * weights).sum(), (rows, matrices)) for y in (result, expected))
    torch.testing.assert_close(own, others)


def test_it_stands_for_the_one_of_torch() -> None:
    rows, matrices, ends = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    with GroupedProducts():
        result = grouped_mm(rows.double(), matrices.double(), offs=ends)
        assert torch.equal(grouped_mm(rows, matrices, offs=ends), grouped_product(rows, matrices, ends))
    torch.testing.assert_close(result.float(), grouped_mm(rows, matrices, offs=ends), rtol=1e-4, atol=1e-5)


def test_rows_are_whole_and_experts_are_summed_over() -> None:
    ends = torch.tensor([3, 5, 12], dtype=torch.int32)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return grouped_mm(x.flatten(0, 1), weight, offs=ends)

    (product,) = operators_of(call, random(4, 3, 8), (3, 8, 16)).values()
    assert product.kind == "grouped_matmul" and dict(product.dims)["experts"] == 3
    assert {"batch"} < set(product.uncut) and "experts" in product.reduced and "experts" not in product.uncut
    assert product.flops == pytest.approx(2 * 3 * 8 * 16)  # a sample has three rows, each of one expert
