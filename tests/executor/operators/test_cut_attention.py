"""Causal attention of parts of the queries is that of all, forward and backward."""

from random import Random

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from meshwise.executor.operators.cut_attention import attend_rows  # noqa: E402


def draw(random: Random) -> tuple[int, tuple[Tensor, Tensor, Tensor], dict[str, object]]:
    """Return a number of parts, a query, keys and values, and options."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    parts, rows, groups, heads = (random.randint(1, 4) for _ in range(4))
    num_keys = random.choice((parts * rows, random.randint(1, 2 * parts * rows)))
    shapes = (2, groups * heads, parts * rows, 4), (2, heads, num_keys, 4), (2, heads, num_keys, 6)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    options = {"scale": random.choice((None, 0.3)), "enable_gqa": groups > 1}
    return parts, tuple(tensors), options  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(40))
def test_parts_of_queries_give_the_whole(seed: int) -> None:
    parts, tensors, options = draw(Random(seed))
    query, key, value = tensors
    whole = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.autograd.grad((whole * weights).sum(), tensors)
    rows = [
        attend_rows(part, own, key, value, None, 0.0, True, **options) for part, own in enumerate(query.chunk(parts, 2))
    ]
    result = torch.cat(rows, 2)
    gradients = torch.autograd.grad((result * weights).sum(), tensors)
    torch.testing.assert_close(result, whole, rtol=1e-12, atol=1e-12)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


def test_a_later_part_sees_keys_before_it() -> None:
    query, key, value = (torch.randn(1, 1, 4, 2, dtype=torch.float64) for _ in range(3))
    late = scaled_dot_product_attention(query[:, :, 2:], key, value, is_causal=True)
    assert not torch.allclose(attend_rows(1, query[:, :, 2:], key, value), late)
