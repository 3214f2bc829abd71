"""The norm of root mean squares is torch's own, and keeps its input alone."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.model.network import RMSNorm  # noqa: E402


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    own, theirs = RMSNorm(6, eps=1e-5, dtype=dtype), torch.nn.RMSNorm(6, eps=1e-5, dtype=dtype)
    weight, source, gradient = torch.randn(6), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    found = []
    for norm in (own, theirs):
        x = source.to(dtype).requires_grad_()
        with torch.no_grad():
            norm.weight.copy_(weight)
        y = norm(x)
        y.backward(gradient.to(dtype))
        assert y.dtype is x.grad.dtype is norm.weight.grad.dtype is dtype
        found.append((y.detach(), x.grad, norm.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)


def test_gradients_are_slopes() -> None:
    norm = RMSNorm(4, eps=1e-5, dtype=torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x), (x, norm.weight)
    )


def test_beside_its_input_it_keeps_a_number_a_token() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        RMSNorm(8)(x)
    assert sorted(tensor.numel() for tensor in kept) == [6, 8, 48]  # roots, weight, input
