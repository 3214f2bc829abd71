"""Ranks that run one trial after another, each with a fault: ``python -m tests...faulty_ranks FOLDER`` on every rank.

The folder has a file a request, with the folder of a job and the name of a fault; every rank answers with a file.
"""

import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import _train_steps
from tests.executor.user_training.faults import FAULTS

PAUSE = 0.01


def run_request(request: dict[str, Any], rank: int) -> None:
    """Run the steps of a job on this rank, with a fault."""
    folder = Path(request["folder"])
    os.environ["KIND"] = request["kind"]
    job = TrainJob.read(folder / "job.json")
    with ExitStack() as patches:
        if request["fault"]:
            for patch in FAULTS[request["fault"]].list_patches(rank, job):
                patches.enter_context(patch)
        _train_steps(job, folder, rank, Heartbeat(folder, rank), find_accelerator("cpu"))
    dist.barrier()


def serve(folder: Path, rank: int, num_ranks: int) -> None:
    """Answer requests until the process is ended."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    number = 0
    while True:
        path = folder / f"request-{number}.json"
        if not path.exists():
            time.sleep(PAUSE)
            continue
        request = json.loads(path.read_text())
        answer = ""
        try:
            run_request(request, rank)
        except Exception:
            answer = traceback.format_exc()
        partial = folder / f"answer-{number}-{rank}.partial"
        partial.write_text(answer)
        partial.rename(folder / f"answer-{number}-{rank}")
        if answer:
            raise SystemExit(answer)
        number += 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
