"""`meshwise compare` on a terminal."""

import pytest

from meshwise.scenarios.commands.main import run


def test_every_plan_is_told_once_with_the_algorithms_that_found_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "local/dp2", "--algorithms", "best_first,mcmc,expert", "--budget", "18"]) == 0
    table, *plans = capsys.readouterr().out.split("\n\n")
    assert "data 2 x" not in table
    first, words = plans[0].splitlines()
    assert first.endswith(" by best_first, expert:")
    assert words.startswith("  data 2 x tensor 1 x pipeline 1")
    times = [plan.split(" by ")[0] for plan in plans]
    assert len(set(times)) == len(times)
    assert all(time in table for time in times)
