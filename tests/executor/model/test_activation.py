"""The activation of a feed-forward layer is that of torch's operators on pairs, and keeps no more than they do."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from meshwise.executor.model.mixture import activation, width  # noqa: E402


@pytest.mark.parametrize(("kind", "function"), [("swiglu", functional.silu), ("geglu", functional.gelu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_gate_beside_its_value(kind, function, dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    source, gradient = torch.randn(2, 3, 10, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype)
    own, theirs = source.clone().requires_grad_(), source.clone().requires_grad_()
    made, told = activation(kind)(own), function(theirs[..., ::2]) * theirs[..., 1::2]
    made.backward(gradient)
    told.backward(gradient)
    torch.testing.assert_close(made, told)
    torch.testing.assert_close(own.grad, theirs.grad)


def test_without_a_gate_it_is_gelu() -> None:
    x = torch.randn(2, 3)
    assert width("gelu", 3) == 3
    assert torch.equal(activation("gelu")(x), functional.gelu(x))


def test_gradients_are_slopes() -> None:
    wide = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation("swiglu"), (wide,))


def test_gates_values_and_what_becomes_of_gates_are_kept() -> None:
    kept: list[torch.Tensor] = []
    wide = torch.randn(2, 3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        activation("swiglu")(wide)
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [4 * 2 * 3 * 4] * 3
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept} | {wide.untyped_storage().data_ptr()}) == 4


def test_no_rows_are_no_rows() -> None:
    wide = torch.randn(0, 8, requires_grad=True)
    activation("swiglu")(wide).sum().backward()
    assert wide.grad.shape == (0, 8)
