from typing import Any

import pytest

from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

from .reference import NEVER

FIELDS: dict[str, Any] = {
    "step_time": 1.0,
    "devices": 8,
    "hosts": 1,
    "failures": NEVER,
    "checkpoint": Checkpoint(60.0, 1.0, 10.0, 5.0),
    "recovery": Recovery(20.0, 30.0, 40.0),
    "steps": 100,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_time": 0.0}, "step_time is above 0"),
        ({"hosts": 0}, "devices and hosts are at least 1, met 8 and 0"),
        ({"duration": 5.0}, "one of duration and steps is given, met 5.0 and 100"),
        ({"steps": None}, "one of duration and steps is given, met None and None"),
        ({"steps": 0}, "duration and steps are above 0 and finite, met 0"),
        ({"steps": None, "duration": float("inf")}, "duration and steps are above 0 and finite, met inf"),
        ({"spares": -1}, "spares and seed are not negative"),
    ],
)
def test_what_is_no_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongRun(**FIELDS | change)


def test_another_interval_changes_nothing_else() -> None:
    run = LongRun(**FIELDS)
    assert run.with_interval(120.0).checkpoint == Checkpoint(120.0, 1.0, 10.0, 5.0)
    assert run.with_interval(120.0).with_interval(60.0) == run
