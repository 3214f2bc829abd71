"""Options of a run are in their ranges; learning rates rise linearly, fall along a cosine, or are constant."""

import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.job import Job
from meshwise.executor.options import CONSTANT_RATE, PEAKS, LearningRate, RunOptions


@pytest.mark.parametrize("optimizer", PEAKS)
@given(step=st.integers(0, 10**9))
def test_without_a_schedule_it_is_the_optimizers(optimizer: str, step: int) -> None:
    assert CONSTANT_RATE.rate_at(step, optimizer) == PEAKS[optimizer]


def test_a_schedule_worked_by_hand() -> None:
    rate = LearningRate(1.0, warmup_steps=2, decay_steps=6, minimum=0.2)
    # up by halves; then 0.2 + 0.8 (1 + cos(pi k / 4)) / 2, which is 1 at k = 0, 0.6 at k = 2 and 0.2 from k = 4 on
    assert [rate.rate_at(step, "sgd") for step in (0, 1, 2, 4, 6, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


@given(st.integers(0, 50), st.integers(1, 200), st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_it_rises_and_then_falls_between_its_bounds(warmup: int, length: int, peak: float, share: float) -> None:
    rate = LearningRate(peak, warmup, warmup + length, peak * share)
    values = [rate.rate_at(step, "adamw") for step in range(warmup + length + 3)]
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps is at least 1, met 0"),
        ("seed", -1, "seed is from 0 to 9223372036854775807, met -1"),
        ("timeout", 0.0, "timeout is above 0 and finite, in seconds, met 0"),
        ("timeout", float("inf"), "timeout is above 0 and finite, in seconds, met inf"),
        ("device", "tpu", "--device: cpu or cuda, met 'tpu'; nearest: cpu"),
        ("checkpoint_every", -1, "checkpoint_every is at least 0 and keep_checkpoints at least 1, met -1 and 2"),
        ("keep", 0, "checkpoint_every is at least 0 and keep_checkpoints at least 1, met 0 and 0"),
    ],
)
def test_an_option_out_of_its_range_is_told(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RunOptions(**{field: value})


@pytest.mark.parametrize(("steps", "asked", "verified"), [(5, None, False), (6, None, True), (6, False, False)])
def test_longer_runs_are_verified_where_nothing_is_said(steps: int, asked: bool | None, verified: bool) -> None:
    assert RunOptions(steps, verify=asked).is_verified is verified
    assert RunOptions(1, verify=True).is_verified


def test_what_only_the_executors_own_model_has() -> None:
    assert not RunOptions(9, True, 3, 1.0, "cuda").needs_own_model
    own = {"data": "README.md", "learning_rate": CONSTANT_RATE, "checkpoint_every": 1, "keep": 3, "resume": True}
    assert all(RunOptions(**{field: value}).needs_own_model for field, value in own.items())


def test_a_job_has_the_defaults_of_the_options() -> None:
    shared = {"timeout", "device", "keep", "checkpoint_every", "data"}
    of_job, of_options = ({each.name: each.default for each in fields(kind)} for kind in (Job, RunOptions))
    assert {name: of_job[name] for name in shared} == {name: of_options[name] for name in shared}
