"""Which rank ended a run, what happened to it, and what each rank was doing.

The first cause is told from its echoes: a rank that is killed or stopped says nothing itself, its peers fail because of
it, and a wait that ended after its whole time says only that somebody else did not come.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.heartbeat import operation, read_beat
from executor.rank_error import RankError, read_errors

LOG_LINES = 12
_WAITED = 0.9
"""Part of the time limit after which a failed wait counts as one that ended by it: beats are looked at now and then."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rank was found when a run went wrong.

    Parameters
    ----------
    code
        What the process returned, minus its signal where it was killed, None while it runs.
    stopped
        Whether it waits to be continued (SIGSTOP, a debugger).
    quiet
        Seconds since it last said what it does, when the first rank failed.
    """

    code: int | None
    stopped: bool
    quiet: float


def log_file(folder: Path, rank: int) -> Path:
    """Return where everything goes that ``rank`` prints."""
    return folder / f"rank-{rank}.log"


def diagnose(endings: Sequence[Ending], folder: Path, timeout: float) -> str:
    """Return which rank failed first, how, and where all ranks were, with the end of its log.

    Parameters
    ----------
    timeout
        Seconds that a rank waits for another.
    """
    errors = {rank: error for rank, error in read_errors(folder, len(endings)).items() if endings[rank].code}
    rank, cause = _cause(endings, errors, timeout)
    others = ", ".join(
        f"rank {other} at {operation(read_beat(folder, other))}" for other in range(len(endings)) if other != rank
    )
    where = operation(read_beat(folder, rank))
    return f"rank {rank} {cause} (at {where}{'; ' + others if others else ''}){_tail(folder, rank)}"


def _cause(endings: Sequence[Ending], errors: Mapping[int, RankError], timeout: float) -> tuple[int, str]:
    """Return the rank that is to blame and what happened to it."""
    running = [rank for rank, ending in enumerate(endings) if ending.code is None]
    silent = [rank for rank, ending in enumerate(endings) if ending.code and rank not in errors]
    if silent:
        rank = min(silent, key=lambda rank: _rarity(endings[rank].code or 0))  # of equals the lowest
        return rank, _ended(endings[rank].code or 0)
    first = min(errors, key=lambda rank: errors[rank].time, default=None)
    late = first is None or endings[first].quiet >= _WAITED * timeout
    if running and late:
        stopped = [rank for rank in running if endings[rank].stopped]
        rank = max(stopped or running, key=lambda rank: endings[rank].quiet)
        how = "was stopped by a signal and has not moved" if stopped else "has not moved"
        return rank, f"{how} for {endings[rank].quiet:.0f} s"
    assert first is not None  # a run goes wrong where a rank ends badly or where one is late
    return first, f"failed: {errors[first].error}"


def _rarity(code: int) -> int:
    """Return how likely an end is an echo of another: gloo's threads abort a process when a peer is gone."""
    if code == -signal.SIGABRT:
        return 2
    return 0 if code < 0 else 1


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(folder: Path, rank: int) -> str:
    path = log_file(folder, rank)
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return "\n".join(["", f"end of {path}:", *lines]) if lines else ""
