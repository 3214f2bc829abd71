"""Learning rates rise linearly, fall along a cosine, and are constant where nothing is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.job import CONSTANT, PEAKS, LearningRate


@pytest.mark.parametrize("optimizer", PEAKS)
@given(step=st.integers(0, 10**9))
def test_without_a_schedule_it_is_the_optimizers(optimizer: str, step: int) -> None:
    assert CONSTANT.at(step, optimizer) == PEAKS[optimizer]


def test_a_schedule_worked_by_hand() -> None:
    rate = LearningRate(1.0, warmup_steps=2, decay_steps=6, minimum=0.2)
    # up by halves; then 0.2 + 0.8 (1 + cos(pi k / 4)) / 2, which is 1 at k = 0, 0.6 at k = 2 and 0.2 from k = 4 on
    assert [rate.at(step, "sgd") for step in (0, 1, 2, 4, 6, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


@given(st.integers(0, 50), st.integers(1, 200), st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_it_rises_and_then_falls_between_its_bounds(warmup: int, length: int, peak: float, share: float) -> None:
    rate = LearningRate(peak, warmup, warmup + length, peak * share)
    values = [rate.at(step, "adamw") for step in range(warmup + length + 3)]
    assert all(0 < value <= peak * (1 + 1e-12) or value == rate.minimum for value in values)
    rising, falling = values[: warmup + 1], values[warmup:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert values[warmup] == pytest.approx(peak) and values[-1] == rate.minimum


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"peak": 0.0}, "learning_rate is above 0 and finite, met 0"),
        ({"peak": float("inf")}, "met inf"),
        ({"warmup_steps": -1}, "warmup_steps is at least 0, met -1"),
        ({"warmup_steps": 3, "decay_steps": 3}, r"above warmup_steps\(3\), met 3; nearest: 4"),
        ({"peak": 1.0, "decay_steps": 9, "minimum": 2.0}, "min_learning_rate is from 0 to learning_rate, met 2"),
        ({"minimum": 0.1}, "met 0.1 without decay_steps"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LearningRate(**arguments)  # type: ignore[arg-type]
