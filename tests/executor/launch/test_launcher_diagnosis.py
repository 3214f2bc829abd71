"""The first cause is named, whatever its echoes look like."""

import signal
from pathlib import Path

import pytest

from meshwise.executor.launch.launcher import Ending, diagnose
from meshwise.executor.recording.rank_files import Heartbeat, RankError

TIMEOUT = 10.0
RUNNING, FAILED = Ending(None, False, 0.0), Ending(1, False, 0.0)


def killed(name: str) -> Ending:
    return Ending(-signal.Signals[name].value, False, 0.0)


def said(folder: Path, rank: int, time: float) -> None:
    RankError(time, f"RuntimeError: of rank {rank}").write(folder, rank)


@pytest.mark.parametrize(
    ("endings", "errors", "words"),
    [
        # a peer that fails because of a killed rank is an echo, and so is one that gloo's threads abort
        ([FAILED, killed("SIGKILL"), RUNNING], {0: 5.0}, "rank 1 was killed by SIGKILL"),
        ([killed("SIGABRT"), killed("SIGKILL"), FAILED], {2: 5.0}, "rank 1 was killed by SIGKILL"),
        ([killed("SIGABRT"), Ending(7, False, 0.0), RUNNING], {}, "rank 1 ended with exit code 7"),
        ([FAILED, killed("SIGABRT"), RUNNING], {0: 5.0}, "rank 1 was killed by SIGABRT"),
        ([killed("SIGSEGV"), FAILED, FAILED], {1: 5.0, 2: 6.0}, "rank 0 was killed by SIGSEGV"),
        # of exceptions the earliest, whatever the order of ranks
        ([FAILED, FAILED, RUNNING], {0: 6.0, 1: 5.0}, "rank 1 failed: RuntimeError: of rank 1"),
        # whoever waited for its whole time waited for somebody else
        ([Ending(1, False, 9.8), RUNNING, Ending(None, True, 9.5)], {0: 5.0}, "rank 2 was stopped by a signal"),
        ([Ending(1, False, 9.8), RUNNING, Ending(None, False, 9.5)], {0: 5.0}, "rank 2 has not moved for 10 s"),
        ([Ending(1, False, 1.0), RUNNING, Ending(None, True, 9.5)], {0: 5.0}, "rank 0 failed: RuntimeError: of rank 0"),
        # nobody said anything
        ([Ending(None, False, 10.1), Ending(None, True, 9.9), RUNNING], {}, "rank 1 was stopped by a signal"),
        ([Ending(None, False, 10.1), Ending(None, False, 12.0), RUNNING], {}, "rank 1 has not moved for 12 s"),
    ],
)
def test_first_cause(endings: list[Ending], errors: dict[int, float], words: str, tmp_path: Path) -> None:
    for rank, time in errors.items():
        said(tmp_path, rank, time)
    for rank in range(3):
        heart = Heartbeat(tmp_path, rank)
        heart.step = rank
        heart.beat(f"forward {rank}F0")
    message = diagnose(endings, tmp_path, TIMEOUT)
    assert message.startswith(words)
    named = int(words.split()[1])
    places = [f"step {rank}, forward {rank}F0" for rank in range(3)]
    assert f"(at {places[named]}; " in message
    assert all(f"rank {rank} at {places[rank]}" in message for rank in range(3) if rank != named)
