"""What one rank of a run does once it is watched: it joins the others, and runs one job after the other."""

import os
from pathlib import Path

from meshwise.executor.device import require_device
from meshwise.executor.job import Job
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.training.measure import measure_job


def run_jobs(paths: list[Path], rank: int) -> None:
    """Run the jobs of some files in one process group; results go beside each file."""
    heartbeat = Heartbeat(paths[0].parent, rank)
    heartbeat.beat("start")
    jobs = [Job.read(path) for path in paths]
    device = jobs[0].device
    require_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = find_accelerator(device)
    with join_process_group(paths[0].parent, max(job.timeout for job in jobs), accelerator):
        for path, job in zip(paths, jobs, strict=True):
            measure_job(job, path.parent, heartbeat, rank, accelerator)
