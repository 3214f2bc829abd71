from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.reports.pictures.goodput import draw_goodput, list_stretches, summarize_goodput
from meshwise.simulator.reliability.failures import Component, Failure, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.goodput import BestInterval, best_interval, goodput
from meshwise.simulator.reliability.job import replay_failures
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

DAY = 86400.0
RATES = (
    FailureRate(FailureKind.DEVICE, 2 * DAY, Component.DEVICE, Restart.REPLACE_HOST),
    FailureRate(FailureKind.SOFTWARE, DAY, Component.JOB, Restart.IN_PLACE),
)
RUN = LongRun(
    step_time=10.0,
    devices=8,
    hosts=1,
    failures=FailureModel("often", RATES),
    checkpoint=Checkpoint(interval=1800.0, blocking=20.0, save=60.0, load=30.0),
    recovery=Recovery(detection=60.0, restart=300.0, repair=12 * 3600.0, replacement=3 * 3600.0),
    duration=6 * DAY,
    spares=1,
)
NEVER = replace(RUN, failures=FailureModel("never", (replace(RATES[1], mtbf=1e30),)), duration=DAY)


def test_stretches_lie_between_recoveries_and_add_up_to_all_training() -> None:
    failures = [Failure(time, FailureKind.SOFTWARE, Restart.IN_PLACE) for time in (5000.0, 5100.0, 20_000.0)]
    outcome = replay_failures(RUN, failures)
    parts = list(list_stretches(outcome))
    # struck at 5000 and, before it went on, at 5100: one recovery until 5100 + 60 + 300 + 30
    assert [(part.start, part.end) for part in parts] == [(0, 5000), (5490, 20_000), (20_390, 6 * DAY)]
    trained = sum(part.end_progress - part.start_progress for part in parts)
    assert trained == pytest.approx(outcome.useful + sum(struck.lost for struck in outcome.interruptions))
    assert parts[1].start_progress == 180 * 2 * 10  # two checkpoints of 180 steps were durable
    assert parts[-1].end_progress == outcome.useful


def best(run: LongRun) -> BestInterval:
    return best_interval(run, runs=2)


def test_the_facts_state_goodput_interval_and_interruptions() -> None:
    quiet = goodput(NEVER, runs=2)
    # 47 cycles of 1800 + 20 s take 85,540 s; the day ends 860 s later
    assert quiet.mean == pytest.approx((47 * 1800 + 860) / DAY)
    line = summarize_goodput(quiet, BestInterval(3600.0, quiet, (quiet,)))
    assert line == "goodput 98.9% ± 0.0%, checkpoint every 30 min (best: 1 h); 0 interruptions in 24 h"
    busy = goodput(RUN, runs=2)
    assert summarize_goodput(busy, BestInterval(3600.0, busy, ())).endswith("interruptions in 6 days, one every 4.8 h")
    assert "(the best interval)" in summarize_goodput(quiet, BestInterval(1800.0, quiet, (quiet,)))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn_and_the_same_run_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    result = goodput(RUN, runs=2)
    assert result.average("waiting") > 0
    found = best(RUN)
    for name in "ab":
        draw_goodput(result, found, tmp_path / f"{name}{suffix}", title="</x> $")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second
    assert len(first) > 20_000


@pytest.mark.parametrize("interval", [10.0, 1800.0, 5 * DAY])
def test_it_draws_runs_far_from_the_best_interval_and_runs_without_failures(tmp_path: Path, interval: float) -> None:
    for run in (RUN, NEVER):
        draw_goodput(goodput(run.with_interval(interval), runs=2), best(run), tmp_path / "goodput.png")
        assert (tmp_path / "goodput.png").stat().st_size > 20_000


def test_a_suffix_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    result = goodput(NEVER, runs=2)
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw_goodput(result, BestInterval(1800.0, result, (result,)), tmp_path / "goodput.pdf")
