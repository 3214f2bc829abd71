"""The process of one rank of a user's file: ``python -m meshwise.executor.user_training.worker JOB.json [SECONDS]``.

It trains; with SECONDS it measures the module for about so long instead.
"""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import exit_process, run_rank


def _run(path: Path, rank: int, seconds: float | None) -> None:
    # torch comes after the watch has begun
    if seconds is None:
        from meshwise.executor.user_training.training import train_rank

        train_rank(path, rank)
    else:
        from meshwise.executor.user_training.measuring import measure_rank

        measure_rank(path, rank, seconds)


if __name__ == "__main__":
    job_path = Path(sys.argv[1])
    num_seconds = float(sys.argv[2]) if len(sys.argv) > 2 else None
    exit_process(run_rank(job_path.parent, lambda rank: _run(job_path, rank, num_seconds)))
