"""One rank: ``python -m meshwise.executor.launch.worker JOB.json ...``, started by our launcher or by torchrun.

Jobs run in order in the same process group; results go beside each job file. Nothing is written to stdout.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from meshwise.executor.recording.rank_files import (
    WATCH_PARENT,
    Heartbeat,
    RankError,
    UserError,
    describe_first_failure,
    error_file,
    has_several_hosts,
    place_file,
)
from meshwise.executor.training.checkpoint import CheckpointError

_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for its ranks."""
_PR_SET_PDEATHSIG = 1


def watch_parent() -> None:
    """End this process when the launcher or torchrun ends, however it ends.

    On any system the pipe of our launcher to stdin closes then; Linux also kills the process.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():  # of our launcher: processes that load data end too
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    if parent := os.environ.get(WATCH_PARENT):
        _die_with_parent(int(parent))
        threading.Thread(target=watch, daemon=True).start()
    elif _TORCHRUN in os.environ:
        _die_with_parent(os.getppid())


def _die_with_parent(parent: int) -> None:
    """Have Linux kill this process with its parent; no thread of a stopped process could do that (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)


def run_rank(folder: Path, run: Callable[[int], None]) -> int:
    """Run ``run(rank)`` and return the exit code; an exception is left in ``folder`` for the launcher."""
    watch_parent()
    rank = int(os.environ.get("RANK", "0"))
    if not folder.is_dir():
        print(f"rank {rank} on {socket.gethostname()}: {folder} is not here; hosts of a run share it", file=sys.stderr)
        return 2
    for stale_file in (error_file(folder, rank), place_file(folder, rank)):
        stale_file.unlink(missing_ok=True)
    try:
        run(rank)
    except Exception as error:  # the boundary of the process: every error becomes one message
        if not isinstance(error, CheckpointError | UserError):  # their messages need no traceback
            traceback.print_exc()
        RankError.from_exception(error).write(folder, rank)
        if has_several_hosts():
            print(f"\n{describe_first_failure(folder, int(os.environ['WORLD_SIZE']))}", file=sys.stderr)
        return 1
    return 0


def exit_process(code: int) -> NoReturn:
    """End this process at once, when all its results are in files.

    An interpreter that shuts down in the usual order meets threads of torch that are not joined yet: 1 of 20 ranks that
    sum partial gradients was aborted there after its work ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(paths: list[Path]) -> int:
    """Run every job and return the exit code."""
    return run_rank(paths[0].parent, lambda rank: _run_jobs(paths, rank))


def _run_jobs(paths: list[Path], rank: int) -> None:
    """Run the jobs of some files in one process group; results go beside each file."""
    from meshwise.executor.device import require_device  # torch comes after the watch has begun
    from meshwise.executor.job import Job
    from meshwise.executor.launch.process_group import join_process_group
    from meshwise.executor.recording.accelerator import find_accelerator
    from meshwise.executor.training.measure import measure_job

    heartbeat = Heartbeat(paths[0].parent, rank)
    heartbeat.beat("start")
    jobs = [Job.read(path) for path in paths]
    device = jobs[0].device
    require_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = find_accelerator(device)
    with join_process_group(paths[0].parent, max(job.timeout for job in jobs), accelerator):
        for path, job in zip(paths, jobs, strict=True):
            measure_job(job, path.parent, heartbeat, rank, accelerator)


if __name__ == "__main__":
    exit_process(main([Path(argument) for argument in sys.argv[1:]]))
