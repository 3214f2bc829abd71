"""A wrong gradient shows however small gradients are: a mean over many tokens has small ones."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwise.executor.check.verification import SINGLE_TOLERANCE, TOLERANCE, Verification, distance
from meshwise.executor.job import tensors_file


def found(folder: Path, expected: dict[str, float], met: dict[str, float], tolerance: float) -> Verification:
    names = {f"gradient {name}": np.array([value, 0.0]) for name, value in met.items()}
    np.savez(tensors_file(folder, 0), **names)  # type: ignore[arg-type]
    wanted = {f"gradient {name}": np.array([value, 0.0]) for name, value in expected.items()}
    return distance(1, folder, (2.0,), (2.0,), wanted, tolerance)


def test_a_small_gradient_that_is_missing_is_not_equal(tmp_path: Path) -> None:
    # all gradients are of 3e-5: beside 1 the difference would be below what fp32 rounds to
    result = found(tmp_path, {"weight": 3e-5, "bias": 2e-5}, {"weight": 3e-5, "bias": 0.0}, SINGLE_TOLERANCE)
    assert result.gradient_error == 1.0
    assert not result.equal and result.largest == "gradient bias"


def test_a_gradient_far_below_the_others_has_the_errors_of_their_sums(tmp_path: Path) -> None:
    # 1e-9 beside 1: it is set beside a hundredth of the largest, 1e-2; 1e-15 / 1e-2 = 1e-13
    result = found(tmp_path, {"weight": 1.0, "bias": 1e-9}, {"weight": 1.0, "bias": 1e-9 + 1e-15}, TOLERANCE)
    assert result.gradient_error == pytest.approx(1e-13, rel=1e-3)
    assert result.equal


def test_gradients_that_are_all_zero_are_set_beside_one(tmp_path: Path) -> None:
    assert found(tmp_path, {"weight": 0.0}, {"weight": 1e-14}, TOLERANCE).gradient_error == 1e-14
