"""What one rank of a captured module does once it is watched: its check, then its run."""

import os
from pathlib import Path

from meshwise.executor.device import require_device
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.operators.job import OperatorJob
from meshwise.executor.operators.trainer import OperatorTrainer, agrees
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.rank_files import Heartbeat


def run_jobs(paths: list[Path], rank: int) -> None:
    """Run the job of the first file, before it the check of the second where there is one: no job runs that differs."""
    heartbeat = Heartbeat(paths[0].parent, rank)
    heartbeat.beat("start")
    jobs = [OperatorJob.read(path) for path in paths]  # the run is the first one: its folder has the signs of life
    device = jobs[0].device
    require_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = find_accelerator(device)
    with join_process_group(paths[0].parent, max(job.timeout for job in jobs), accelerator):
        for path, job in reversed(list(zip(paths, jobs, strict=True))):
            heartbeat.beat("capture")
            OperatorTrainer(job, heartbeat, accelerator).train(path.parent, rank)
            if job.double and not agrees(job, path.parent, accelerator.device):
                return
