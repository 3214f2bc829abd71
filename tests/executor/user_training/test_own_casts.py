"""A cast of a module to fewer digits is seen; constants of fp32 and casts of integers are none."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.user_training.own_casts import CastWatch  # noqa: E402


def test_only_values_of_fp64_that_lose_digits_count() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with CastWatch() as watch:
        _ = x.long().float() + torch.ones(3), x.double(), torch.zeros(3)
    assert not watch.has_cast
    with CastWatch() as watch:
        _ = torch.nn.functional.rms_norm(x.to(torch.bfloat16), (3,))
    assert watch.has_cast
