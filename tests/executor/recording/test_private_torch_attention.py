"""Attention by whole scores is what torch's fused kernel computes, part by part too."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from meshwise.executor.recording.private_torch import (  # noqa: E402
    attention_by_products,
    attention_gradients,
    attention_gradients_by_products,
    attention_with_logsumexp,
)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_and_its_gradients_those_of_autograd(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = 2, 3, 6, 4
    query, key, value, back = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [each.requires_grad_() for each in (query, key, value)]
    expected = functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    wanted = torch.autograd.grad(expected, inputs, back)
    with torch.no_grad():
        out, logsumexp = attention_by_products(query, key, value, causal=causal)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
        found = attention_gradients_by_products(back, query, out, logsumexp, key, value, causal=causal)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_keys_may_be_some_of_those_that_the_output_is_over() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value, back = (torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    out, logsumexp = attention_by_products(query, key, value, causal=False)
    other, sums = attention_with_logsumexp(query, key, value, causal=False)
    torch.testing.assert_close((out, logsumexp), (other, sums), rtol=0, atol=1e-14)
    early = (part[:, :, :3].contiguous() for part in (key, value))
    some = tuple(early)
    mine = attention_gradients_by_products(back, query, out, logsumexp, *some, causal=False)
    fused = attention_gradients(back, query, out, logsumexp, *some, causal=False)
    for one, two in zip(mine, fused, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-13)
