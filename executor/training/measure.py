"""Runs a job on one rank: timed steps, then a dump of its tensors, then steps under the profiler."""

import json
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.job import Job, checkpoints_folder, metrics_file, result_file, tensors_file
from meshwise.executor.parallel.sharded_states import ShardedOptimizer
from meshwise.executor.recording.accelerator import Accelerator, Held
from meshwise.executor.recording.profiled import profiled
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import local
from meshwise.executor.training import shards
from meshwise.executor.training.optimizer import states
from meshwise.executor.training.trainer import Trainer
from meshwise.executor.training.unflushed import UnflushedTrainer
from meshwise.simulator.program import Category
from meshwise.strategies.plan.mesh import TENSOR


def measure(job: Job, folder: Path, heartbeat: Heartbeat, rank: int, accelerator: Accelerator) -> None:
    """Train as ``job`` says and write this rank's results into ``folder``."""
    warnings.filterwarnings("ignore", category=UserWarning)
    heartbeat.step = -1
    heartbeat.beat("build")
    accelerator.settle(exact=job.training.precision == "fp64")
    kind = UnflushedTrainer if job.plan.asynchronous else Trainer
    trainer = kind(job, Recorder(heartbeat, accelerator.synchronise), accelerator)
    if job.resume is not None:
        heartbeat.beat("resume")
        shards.load(trainer, Path(job.resume))
    held = timed_steps(trainer, folder, rank)
    if job.dump:
        _dump(trainer, tensors_file(folder, rank))
    if job.profile:
        result_file(folder, rank).write_text(json.dumps(profiled_step(trainer) | described(held)))


def timed_steps(trainer: Trainer, folder: Path, rank: int) -> Held | None:
    """Run the steps of the job, write a line of metrics after each, and return the device memory that they took.

    The first step, which makes the optimizer states, does not count in the peak, unless it is the only one.
    """
    job, heartbeat, accelerator = trainer.job, trainer.recorder.heartbeat, trainer.accelerator
    accelerator.reset_peak()
    dist.barrier()
    with metrics_file(folder, rank).open("w") as metrics:
        for step in range(job.first_step, job.steps):
            heartbeat.step = step
            loss, seconds = timed(accelerator, lambda: trainer.step(heartbeat.step))
            metrics.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            metrics.flush()
            if step == job.first_step < job.steps - 1:
                accelerator.reset_peak()
            done = step + 1
            if job.checkpoint_every and (done % job.checkpoint_every == 0 or done == job.steps):
                heartbeat.beat("checkpoint")
                shards.save(trainer, done, checkpoints_folder(folder))
    return accelerator.held()


def timed(accelerator: Accelerator, step: Callable[[], float | None]) -> tuple[float | None, float]:
    """Return the loss of a step, and its seconds until the device has finished."""
    losses: list[float | None] = []
    seconds = accelerator.timer.once(lambda: losses.append(step()))
    return losses[0], seconds


def described(held: Held | None) -> dict[str, Any]:
    """Return the entry of a rank's result file for its device memory."""
    return {"held": None if held is None else held._asdict()}


def profiled_step(trainer: Trainer) -> dict[str, Any]:
    """Return spans and memory of a profiled step, which is not among the timed ones, and the peak bytes on the host."""
    once = trainer.job.plan.asynchronous  # then gradients live on between steps, and nothing is dropped before one
    before: Callable[[], object] = (lambda: None) if once else trainer.zero_gradients
    before()
    steps = count(trainer.job.steps)
    gradients = lambda: (p.grad for p in trainer.parameters if p.grad is not None)  # noqa: E731
    accelerator = trainer.accelerator
    step, held = (lambda: trainer.step(next(steps))), resident(trainer)
    found = profiled(step, trainer.recorder, accelerator, held, gradients, before=before, once=once)
    return found | {"host": trainer.host.peak}


def resident(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of this rank that live from step to step, by category.

    Gradients are among them where DistributedDataParallel keeps them in buckets. Other bytes of the device's allocator,
    as those that cuBLAS took, count as buffers.
    """
    networks = trainer.networks
    buckets = [module for module in trainer.modules.values() if isinstance(module, DistributedDataParallel)]
    found: dict[str, int] = {
        Category.PARAMETERS: nbytes(
            p for n in networks.values() for p in n.parameters() if not trainer.host.holds(local(p.detach()))
        ),
        Category.GRADIENTS: sum(local(p).numel() * p.element_size() for module in buckets for p in module.parameters()),
        Category.OPTIMIZER: nbytes(
            value
            for values in states(trainer.optimizer).values()
            for value in values.values()
            if isinstance(value, Tensor)
        ),
    }
    held = trainer.accelerator.held()
    return found if held is None else found | {Category.BUFFERS: max(held.now - sum(found.values()), 0)}


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``; a storage that several tensors share counts once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _dump(trainer: Trainer, path: Path) -> None:
    """Write whole gradients and parameters by name, on the first rank of each tensor group."""
    arrays: dict[str, Any] = {}
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.gather_gradients()
    for network in trainer.networks.values():
        for name, parameter in network.model_parameters():
            arrays[f"parameter {name}"] = _whole(parameter.detach())
            if parameter.grad is not None:
                arrays[f"gradient {name}"] = _whole(parameter.grad)
    if trainer.mesh[TENSOR].get_local_rank() == 0:
        np.savez(path, **arrays)


def _whole(tensor: Tensor) -> Any:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()
