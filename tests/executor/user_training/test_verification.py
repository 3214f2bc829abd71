"""The bound of an update in a low precision: rounding is within it, and what is no rounding is not."""

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.user_training.verification import _judge, _measure, _measure_all, _measure_distance

EXACT = torch.randn(512, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sign()
NOISE = 0.05 * torch.randn(512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.5, 2.0, -1.0, float("nan")])
def test_another_scale_is_no_rounding(factor: float) -> None:
    difference = _measure(_judge("weight", factor * EXACT, EXACT, EXACT + NOISE))
    assert not difference.is_equal


def test_few_elements_that_turn_around_are_rounding() -> None:
    own = EXACT.clone()
    own[:8] *= -1
    assert _measure(_judge("weight", own + NOISE.flip(0), EXACT, EXACT + NOISE)).is_equal
    own[:64] *= -1
    assert not _measure(_judge("weight", own, EXACT, EXACT + NOISE)).is_equal


def test_a_gradient_that_is_rounding_may_be_any() -> None:
    assert _measure(_judge("bias", torch.zeros(512), 1e-9 * EXACT, 1e-3 * NOISE)).is_equal


def test_small_parameters_are_judged_together_and_stuck_ones_alone() -> None:
    parts = EXACT.split(64)
    own = [part.clone() for part in parts]
    own[0][:3] *= -1
    judgements = [_judge(str(n), row, part, part) for n, (row, part) in enumerate(zip(own, parts, strict=True))]
    assert all(difference.is_equal for difference in _measure_all(judgements, "small"))
    stuck = [_judge("stuck", torch.zeros(64), parts[0], parts[0]), *judgements[1:]]
    assert [difference.name for difference in _measure_all(stuck, "small") if not difference.is_equal] == ["stuck"]


def test_noisy_elements_may_differ_and_others_may_not() -> None:
    expected, noisy = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([False, True, False])
    assert _measure_distance(torch.tensor([2.0, 0.5, 1.0]), expected, noisy) == 0.0
    assert _measure_distance(torch.tensor([2.0, 0.5, 1.0]), expected, None) == 0.25
    assert _measure_distance(torch.tensor([2.0, 0.5, 1.5]), expected, noisy) == 0.25
    assert _measure_distance(torch.tensor([2.0, float("nan"), 1.0]), expected, noisy) != 0.0  # it is no rounding
