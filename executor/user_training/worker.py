"""The process of one rank that trains a user's file: ``python -m meshwise.executor.user_training.worker JOB.json``."""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import exit_process, run_rank


def _run(path: Path, rank: int) -> None:
    from meshwise.executor.user_training.training import train_rank  # torch comes after the watch has begun

    train_rank(path, rank)


if __name__ == "__main__":
    job_path = Path(sys.argv[1])
    exit_process(run_rank(job_path.parent, lambda rank: _run(job_path, rank)))
