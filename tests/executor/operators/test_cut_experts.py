"""Grouped products of parts of the experts add up to the whole, forward and backward, experts without rows too."""

from random import Random

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from meshwise.executor.operators.cut_experts import multiply_experts  # noqa: E402


class Product(torch.autograd.Function):
    """A grouped product that leaves what is after the last end as it was in memory: as no number."""

    @staticmethod
    def forward(context: object, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        context.save_for_backward(rows, weight, ends)  # type: ignore[attr-defined]
        result = torch.full((len(rows), weight.shape[2]), float("nan"), dtype=rows.dtype)
        for number, (start, end) in enumerate(list_bounds(ends)):
            result[start:end] = rows[start:end] @ weight[number]
        return result

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = context.saved_tensors  # type: ignore[attr-defined]
        own, matrices = torch.full_like(rows, float("nan")), torch.zeros_like(weight)
        for number, (start, end) in enumerate(list_bounds(ends)):
            own[start:end] = gradients[0][start:end] @ weight[number].T
            matrices[number] = rows[start:end].T @ gradients[0][start:end]
        return own, matrices, None


def list_bounds(ends: Tensor) -> list[tuple[int, int]]:
    return list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_parts_of_the_experts_give_the_whole(seed: int) -> None:
    random = Random(seed)
    parts, own = random.randint(1, 3), random.randint(1, 3)
    counts = [random.choice((0, 0, 1, 5)) for _ in range(parts * own)]
    counts[random.randrange(len(counts))] += 1
    torch.manual_seed(seed)
    rows = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(parts * own, 3, 4, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(random.choice((torch.int32, torch.int64)))
    whole = Product.apply(rows, weight, ends)
    factors = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * factors).sum(), (rows, weight))
    shares = [
        multiply_experts(Product.apply, part, rows, matrices, ends) for part, matrices in enumerate(weight.chunk(parts))
    ]
    result = torch.stack(shares).sum(0)
    gradients = torch.autograd.grad((result * factors).sum(), (rows, weight))
    for one, other in zip((result, *gradients), (whole, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
