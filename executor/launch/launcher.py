"""Starts the ranks of a run on this host, watches them, stops all of them in the end, and diagnoses failures.

Ranks die with this process however it dies: Linux kills them, and on any system a rank ends when its stdin closes.
Waits are bounded: a rank whose heartbeat does not change for ``timeout`` seconds ends the run. Ranks meet through a
file and listen on the loopback interface only.

A diagnosis says which rank failed first, how, and what each rank was doing. It separates the cause from its echoes: a
rank that was killed or stopped writes no error itself, its peers fail because of it, and a wait that timed out only
says that another rank did not come.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshwise.executor.device import avoid_broken_tiles
from meshwise.executor.launch.processes import is_stopped
from meshwise.executor.options import TIMEOUT
from meshwise.executor.recording.rank_files import WATCH_PARENT, RankError, parse_operation, read_beat, read_errors

LOG_LINES = 12
_WAITED_SHARE = 0.9
"""Share of the time limit from which on a failed wait counts as timed out; heartbeats are read only now and then."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The state of one rank when a run failed.

    Parameters
    ----------
    code
        Exit code of the process, the negative signal where it was killed, None while it runs.
    was_stopped
        Whether a signal or a debugger has stopped the process (SIGSTOP).
    quiet_time
        Seconds since its last heartbeat, when the first rank failed.
    """

    code: int | None
    was_stopped: bool
    quiet_time: float


def log_file(folder: Path, rank: int) -> Path:
    """Return the file of everything that ``rank`` prints."""
    return folder / f"rank-{rank}.log"


def diagnose(endings: Sequence[Ending], folder: Path, timeout: float) -> str:
    """Return a message: which rank failed first, how, where all ranks were, and the end of that rank's log.

    A rank waits ``timeout`` seconds for another.
    """
    errors = {rank: error for rank, error in read_errors(folder, len(endings)).items() if endings[rank].code}
    rank, cause = _find_cause(endings, errors, timeout)
    other_operations = ", ".join(
        f"rank {other_rank} at {parse_operation(read_beat(folder, other_rank))}"
        for other_rank in range(len(endings))
        if other_rank != rank
    )
    operations = parse_operation(read_beat(folder, rank)) + ("; " + other_operations if other_operations else "")
    return f"rank {rank} {cause} (at {operations}){_read_tail(folder, rank)}"


def _find_cause(endings: Sequence[Ending], errors: Mapping[int, RankError], timeout: float) -> tuple[int, str]:
    """Return the rank that failed first and what happened to it."""
    running_ranks = [rank for rank, ending in enumerate(endings) if ending.code is None]
    silent_ranks = [rank for rank, ending in enumerate(endings) if ending.code and rank not in errors]
    if silent_ranks:  # a killed rank writes no error, but its peers do
        rank = min(silent_ranks, key=lambda rank: _rate_echo(endings[rank].code or 0))  # of equals the lowest
        return rank, _describe_end(endings[rank].code or 0)
    first_rank = min(errors, key=lambda rank: errors[rank].time, default=None)
    is_late = first_rank is None or endings[first_rank].quiet_time >= _WAITED_SHARE * timeout
    if running_ranks and is_late:
        stopped_ranks = [rank for rank in running_ranks if endings[rank].was_stopped]
        rank = max(stopped_ranks or running_ranks, key=lambda rank: endings[rank].quiet_time)
        description = "was stopped by a signal and has not moved" if stopped_ranks else "has not moved"
        return rank, f"{description} for {endings[rank].quiet_time:.0f} s"
    assert first_rank is not None  # a run goes wrong where a rank ends badly or where one is late
    return first_rank, f"failed: {errors[first_rank].error}"


def _rate_echo(code: int) -> int:
    """Return 0 to 2, higher where an exit is more likely an echo: gloo's threads abort a process whose peer is gone."""
    if code == -signal.SIGABRT:
        return 2
    return 0 if code < 0 else 1


def _describe_end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _read_tail(folder: Path, rank: int) -> str:
    path = log_file(folder, rank)
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return "\n".join(["", f"end of {path}:", *lines]) if lines else ""


POLL = 0.05
GRACE = 1.0
"""Seconds that ranks get to end by themselves after one has failed, and again after their stdin is closed."""


class ExecutionError(RuntimeError):
    """A rank failed, was killed or hung; the message says which rank, where and why."""


def require_torch() -> None:
    """Raise ``ModuleNotFoundError`` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("executing needs torch, which is not installed", name="torch")


def launch_ranks(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    num_ranks: int,
    *,
    timeout: float = TIMEOUT,
    poll: Callable[[], None] | None = None,
) -> None:
    """Run ``python -m module arguments`` once for each rank and return when all have ended without error.

    ``poll`` is called about every 50 ms.

    Raises
    ------
    ExecutionError
        Where a rank fails; the others are stopped. Any exception, ``KeyboardInterrupt`` as well, stops the ranks
        before it propagates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_folder(folder)
    avoid_broken_tiles()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            processes.append(_start_rank(module, arguments, folder, rank, num_ranks))
        _watch_ranks(processes, folder, timeout, poll or (lambda: None))
    finally:
        _stop_ranks(processes)


def clear_folder(folder: Path) -> None:
    """Remove the files of an earlier run's ranks from ``folder``."""
    for stale_file in (folder / "store", *folder.glob("rank-*")):
        stale_file.unlink(missing_ok=True)


def _start_rank(
    module: str, arguments: Sequence[str], folder: Path, rank: int, num_ranks: int
) -> subprocess.Popen[bytes]:
    # a rank that saw a master address would take itself for one of torchrun's
    base_environment = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    environment = base_environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        WATCH_PARENT: str(os.getpid()),
    }
    with log_file(folder, rank).open("wb") as log:
        return _spawn_process([module, *arguments], environment, log)


def _spawn_process(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _watch_ranks(
    processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float, poll: Callable[[], None]
) -> None:
    beats = [("", time.monotonic())] * len(processes)
    while True:
        codes = [process.poll() for process in processes]
        poll()
        if all(code == 0 for code in codes):
            return
        now = time.monotonic()
        for rank, (beat, _) in enumerate(beats):
            if codes[rank] is None and (new_beat := read_beat(folder, rank)) != beat:
                beats[rank] = (new_beat, now)
        quiet_times = [now - last_change for _, last_change in beats]
        has_failed = any(code not in (None, 0) for code in codes)
        if has_failed:  # time for the other ranks to write their errors
            _wait_for_end(processes, GRACE)
        if has_failed or any(
            code is None and seconds > timeout for code, seconds in zip(codes, quiet_times, strict=True)
        ):
            ends = [Ending(p.poll(), is_stopped(p.pid), quiet) for p, quiet in zip(processes, quiet_times, strict=True)]
            raise ExecutionError(diagnose(ends, folder, timeout))
        time.sleep(POLL)


def _wait_for_end(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(POLL)


def _stop_ranks(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    _wait_for_end(processes, GRACE)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
