"""The process of one rank that trains a captured module; results go beside each job's file.

``python -m meshwise.executor.operators.worker JOB.json [CHECK.json]``

The check runs first: the same job in fp64, which is compared with one process. Where it differs the job does not start.
"""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import exit_process, run_rank


def _run(paths: list[Path], rank: int) -> None:
    from meshwise.executor.operators.trainer import run_jobs  # torch comes after the watch has begun

    run_jobs(paths, rank)


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    exit_process(run_rank(files[0].parent, lambda rank: _run(files, rank)))
