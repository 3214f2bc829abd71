"""Products of two dtypes are those of values in 16 bits, and all else is as torch has it."""

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from meshwise.executor.parallel.mixed_products import TurnToNarrow, find_narrow_dtype  # noqa: E402

WIDE, NARROW = torch.randn(3, 4), torch.randn(4, 4).bfloat16()


def test_a_product_of_two_dtypes_is_one_in_16_bits() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        functional.linear(WIDE, NARROW)
    expected = functional.linear(WIDE.bfloat16(), NARROW)
    with TurnToNarrow(torch.bfloat16):
        assert torch.equal(functional.linear(WIDE, NARROW), expected)
        assert torch.equal(WIDE @ NARROW.T, expected)
        assert torch.equal(torch.einsum("ij,kj->ik", WIDE, NARROW), expected)


def test_sums_and_products_of_one_dtype_stay_as_they_are() -> None:
    with TurnToNarrow(torch.bfloat16):
        assert (WIDE + NARROW[:3]).dtype is torch.float32
        assert torch.equal(WIDE @ WIDE.T, torch.mm(WIDE, WIDE.T)) and (WIDE @ WIDE.T).dtype is torch.float32


def test_blocks_that_are_computed_again_know_of_it() -> None:
    assert find_narrow_dtype() is None
    with TurnToNarrow(torch.bfloat16):
        assert find_narrow_dtype() is torch.bfloat16
    assert find_narrow_dtype() is None
