"""Rotary positions turn pairs of numbers as complex numbers turn, and keep angles alone."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.model.network import compute_rotation, rotate_heads  # noqa: E402


@pytest.mark.parametrize("dims", [(2, 5, 3, 1, 8), (2, 5, 3, 8)])
def test_halves_of_a_head_are_complex_numbers_that_turn_by_position(dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    heads = torch.randn(*dims, dtype=torch.float64)
    turned = rotate_heads(heads, compute_rotation(torch.arange(5), heads))
    # the pair i of a head of 8 turns by position * 10000 ** (-i / 4)
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turns = torch.polar(torch.ones_like(angles), angles).view(5, *(1,) * (len(dims) - 3), 4)
    told = torch.complex(heads[..., :4], heads[..., 4:]) * turns
    torch.testing.assert_close(turned, torch.cat([told.real, told.imag], dim=-1), rtol=1e-14, atol=1e-14)


def test_positions_of_a_rank_are_its_own() -> None:
    heads = torch.randn(1, 6, 2, 4)
    whole = rotate_heads(heads, compute_rotation(torch.arange(6), heads))
    part = rotate_heads(heads[:, 4:], compute_rotation(torch.arange(4, 6), heads))
    torch.testing.assert_close(part, whole[:, 4:])


def test_gradients_are_slopes_of_parts_of_a_tensor_too() -> None:
    parts = torch.randn(1, 3, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    turn = compute_rotation(torch.arange(3), parts)
    assert torch.autograd.gradcheck(lambda parts: rotate_heads(parts[..., :1, :], turn), (parts,))


def test_cosines_and_sines_are_all_that_is_kept() -> None:
    kept: list[torch.Tensor] = []
    heads = torch.randn(2, 3, 2, 1, 8, requires_grad=True)
    turn = compute_rotation(torch.arange(3), heads)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rotate_heads(heads, turn)
    assert [tensor.data_ptr() for tensor in kept] == [part.data_ptr() for part in turn]
