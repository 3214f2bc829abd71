"""The process of one rank that trains a captured module; results go beside each job's file.

``python -m meshwise.executor.operators.worker JOB.json [CHECK.json]``

The check runs first: the same job in fp64, which is compared with one process. Where it differs the job does not start.
"""

import os
import sys
from pathlib import Path

from meshwise.executor.launch.worker import leave, run_rank


def _run(paths: list[Path], rank: int) -> None:
    from meshwise.executor.device import require_device
    from meshwise.executor.launch.process_group import joined
    from meshwise.executor.operators.job import OperatorJob
    from meshwise.executor.operators.trainer import OperatorTrainer, agrees
    from meshwise.executor.recording.accelerator import accelerator_of
    from meshwise.executor.recording.rank_files import Heartbeat

    heartbeat = Heartbeat(paths[0].parent, rank)
    heartbeat.beat("start")
    jobs = [OperatorJob.read(path) for path in paths]  # the first is the run: its folder has the heartbeats
    device = jobs[0].device
    require_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = accelerator_of(device)
    with joined(paths[0].parent, max(job.timeout for job in jobs), accelerator):
        for path, job in reversed(list(zip(paths, jobs, strict=True))):
            heartbeat.beat("capture")
            OperatorTrainer(job, heartbeat, accelerator).train(path.parent, rank)
            if job.double and not agrees(job, path.parent, accelerator.device):
                return


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    leave(run_rank(files[0].parent, lambda rank: _run(files, rank)))
