"""Captures the module of a user's file before ranks start, where a plan cuts its operators."""

import sys
from contextlib import redirect_stdout
from typing import Any

import torch

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import (
    capture_batch,
    check_start,
    copy_structure,
    require_same_module,
    require_samples,
)
from meshwise.executor.cut_modules.elementwise import require_elementwise
from meshwise.executor.modules.batches import count_samples, list_tensors, map_tensors, split_evenly
from meshwise.executor.modules.optimizers import build_optimizer
from meshwise.executor.operators.layouts import Layouts
from meshwise.executor.starting.construction import DeferredModule
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import load_source, next_batch, open_batches
from meshwise.executor.user_training.user_file import UserFile


def capture_job(job: TrainJob) -> CapturedModule:
    """Return the module of a job, captured with a microbatch of all data ranks.

    Raises
    ------
    UserError
        Where the module cannot be captured, its program does not compute what it computes, or the plan of the job is
        another module's; the message begins with the line of the user's file where it is known.
    """
    nearest = f"data={job.layout.num_ranks}"
    with redirect_stdout(sys.stderr):  # the user's file may print
        user_file = load_source(job)
        start = user_file.start_model(job.seed)
        values = start.values if isinstance(start, DeferredModule) else None
        module = start.module if values is None else copy_structure(start.module)  # a capture reads shapes alone
        batch = read_microbatch(job, user_file)
        num_samples = count_samples(batch)
        require_samples(num_samples, "all data ranks")
        if job.layout.is_staged:
            require_samples(num_samples // job.layout.data, "a data rank")
        captured = capture_batch(module, batch, user_file.loss, nearest=nearest)
        if job.layout.plan is not None:
            plan = job.layout.plan
            require_same_module(plan, captured, module)
            Layouts(captured, {sharding.operator: sharding for sharding in plan.shardings})
        check_start(start.module, values, batch, user_file.loss, nearest=nearest)
    return captured


def require_cut_optimizer(job: TrainJob) -> None:
    """Raise `CutError` where the optimizer of a job's file does not step the parts of a cut module."""
    with redirect_stdout(sys.stderr):
        user_file = load_source(job)
        if user_file.optimizer is not None:
            module = user_file.start_model(job.seed).module
            require_elementwise(build_optimizer(user_file.optimizer, module, {}))


def read_microbatch(job: TrainJob, user_file: UserFile) -> Any:
    """Return the first microbatch of all data ranks together."""
    parts = []
    for rank in range(job.layout.data):
        batch = next_batch(open_batches(job, user_file, rank, job.layout.data, 0), user_file, 0)
        parts.append(split_evenly(batch, job.layout.num_microbatches, "microbatches")[0])
    columns = zip(*map(list_tensors, parts), strict=True)
    joined = iter([torch.cat(tensors) for tensors in columns])
    return map_tensors(parts[0], lambda _: next(joined))
