"""The progress of a run: how far it is, how fast, and how long it still takes."""

import pytest

from meshwise.executor.user_training.log import StepRow
from meshwise.scenarios.commands.train_report import Follower
from meshwise.scenarios.console import Ticker


def test_time_left_is_that_of_recent_steps(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Ticker(), 100)
    for step, seconds in enumerate([50.0] * 10 + [2.0] * 30):
        row = StepRow(step, 3.0, seconds, 8, None if step < 39 else 800, 0.1, {"accuracy": 0.5} if step == 20 else {})
        follower(row)
    assert follower.describe(row) == "step 40/100 (40%), loss 3.0000, 400 tokens/s, 2:00 left"
    told = capsys.readouterr()
    assert told.out == "" and told.err == "step 20: evaluation accuracy 0.5\n"
