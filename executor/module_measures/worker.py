"""The process of one rank that measures a module, with the file of its job and the seconds that it has."""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import exit_process, run_rank


def _measure(path: Path, rank: int, seconds: float) -> None:
    from meshwise.executor.module_measures.measuring import measure_rank  # torch comes after the watch has begun

    measure_rank(path, rank, seconds)


if __name__ == "__main__":
    job_path, num_seconds = Path(sys.argv[1]), float(sys.argv[2])
    exit_process(run_rank(job_path.parent, lambda rank: _measure(job_path, rank, num_seconds)))
