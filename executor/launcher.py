"""Starts the ranks of a run on this host, watches them, and leaves none behind.

A rank ends when its stdin closes, so ranks die with this process however it dies. Waits are
bounded: a rank whose heartbeat does not change for ``timeout`` seconds ends the run.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from executor.heartbeat import operation, read
from executor.worker import WATCH_PARENT, error_file

POLL = 0.05
GRACE = 1.0
"""Seconds that ranks get to end by themselves once one has failed, and again once they are told to."""
LOG_LINES = 12


class ExecutionError(RuntimeError):
    """A rank failed, was killed or hung; the message says which, where and why."""


def log_file(folder: Path, rank: int) -> Path:
    """Return where everything goes that ``rank`` prints."""
    return folder / f"rank-{rank}.log"


def require_torch() -> None:
    """Return where torch is installed, else raise ``ModuleNotFoundError``."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("executing needs torch, which is not installed", name="torch")


def launch(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    ranks: int,
    *,
    timeout: float = 600.0,
    poll: Callable[[], None] | None = None,
) -> None:
    """Run ``python -m module arguments`` once a rank and return when all have ended well.

    ``poll`` is called about every 50 ms.

    Raises
    ------
    ExecutionError
        Where a rank fails; the others are stopped. Any exception, ``KeyboardInterrupt`` too,
        stops the ranks before it leaves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / "store", *folder.glob("rank-*")):
        stale.unlink(missing_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            processes.append(_start(module, arguments, folder, rank, ranks))
        _watch(processes, folder, timeout, poll or (lambda: None))
    finally:
        _stop(processes)


def _start(module: str, arguments: Sequence[str], folder: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    inherited = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    search_path = os.pathsep.join([root, *filter(None, [inherited.get("PYTHONPATH")])])
    environment = inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": search_path,
        WATCH_PARENT: "1",
    }
    with log_file(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _watch(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float, poll: Callable[[], None]) -> None:
    ranks = range(len(processes))
    beats = {rank: ("", time.monotonic()) for rank in ranks}
    while True:
        codes = [process.poll() for process in processes]
        poll()
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            _wait(processes, GRACE)
            raise ExecutionError(_failure([process.poll() for process in processes], folder))
        for rank in ranks:
            beat = read(folder, rank)
            if beat != beats[rank][0]:
                beats[rank] = (beat, time.monotonic())
            elif codes[rank] is None and time.monotonic() - beats[rank][1] > timeout:
                raise ExecutionError(
                    f"rank {rank} has not moved for {timeout:g} s; {_whereabouts(folder, list(ranks))}"
                )
        time.sleep(POLL)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(POLL)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    _wait(processes, GRACE)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _failure(codes: list[int | None], folder: Path) -> str:
    """Return what went wrong first: a killed rank before a raised exception, the earliest one before its echoes."""
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
    errors = {}
    for rank in failed:
        if error_file(folder, rank).exists():
            errors[rank] = json.loads(error_file(folder, rank).read_text())
    silent = [rank for rank in failed if rank not in errors]
    if silent:
        rank, code = silent[0], codes[silent[0]] or 0
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    else:
        rank = min(errors, key=lambda rank: float(errors[rank]["time"]))
        cause = f"failed: {errors[rank]['error']}"
    where = operation(read(folder, rank))
    others = _whereabouts(folder, [other for other in range(len(codes)) if other != rank])
    lines = log_file(folder, rank).read_text(errors="replace").splitlines()[-LOG_LINES:]
    tail = "\n".join(["", f"end of {log_file(folder, rank)}:", *lines]) if lines else ""
    return f"rank {rank} {cause} (at {where}{'; ' + others if others else ''}){tail}"


def _whereabouts(folder: Path, ranks: list[int]) -> str:
    return ", ".join(f"rank {rank} at {operation(read(folder, rank))}" for rank in ranks)
