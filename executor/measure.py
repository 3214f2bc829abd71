"""What one rank does with a job: timed steps, then its tensors, then steps under the profiler."""

import json
import warnings
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from executor import shards, trace
from executor.data_parallel import local
from executor.heartbeat import Heartbeat
from executor.job import Job, checkpoints_folder, metrics_file, result_file, tensors_file
from executor.optimizer import states
from executor.profiled import profiled
from executor.recorder import Recorder
from executor.sharded_states import ShardedOptimizer
from executor.trainer import Trainer
from executor.unflushed import UnflushedTrainer
from simulator.program import Category
from strategies.mesh import TENSOR


def measure(job: Job, folder: Path, heartbeat: Heartbeat, rank: int) -> None:
    """Train as ``job`` says and leave this rank's results in ``folder``."""
    warnings.filterwarnings("ignore", category=UserWarning)
    heartbeat.step = -1
    heartbeat.beat("build")
    kind = UnflushedTrainer if job.plan.asynchronous else Trainer
    trainer = kind(job, Recorder(heartbeat))
    if job.resume is not None:
        heartbeat.beat("resume")
        shards.load(trainer, Path(job.resume))
    _timed_steps(trainer, folder, rank)
    if job.dump:
        _dump(trainer, tensors_file(folder, rank))
    if job.profile:
        result_file(folder, rank).write_text(json.dumps(_profiled_step(trainer)))


def _timed_steps(trainer: Trainer, folder: Path, rank: int) -> None:
    job, heartbeat = trainer.job, trainer.recorder.heartbeat
    dist.barrier()
    with metrics_file(folder, rank).open("w") as metrics:
        for step in range(job.first_step, job.steps):
            heartbeat.step = step
            start = perf_counter_ns()
            loss = trainer.step(step)
            seconds = (perf_counter_ns() - start) / 1e9
            metrics.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            metrics.flush()
            done = step + 1
            if job.checkpoint_every and (done % job.checkpoint_every == 0 or done == job.steps):
                heartbeat.beat("checkpoint")
                shards.save(trainer, done, checkpoints_folder(folder))


def _profiled_step(trainer: Trainer) -> dict[str, Any]:
    once = trainer.job.plan.asynchronous  # then gradients are there between steps
    if not once:
        trainer.zero_gradients()
    steps = count(trainer.job.steps)
    gradients = lambda: (p.grad for p in trainer.parameters if p.grad is not None)  # noqa: E731
    found = profiled(
        lambda: trainer.step(next(steps)), trainer.recorder, trace.rows, _resident(trainer), gradients, once=once
    )
    return found | {"host": trainer.host.peak}


def _resident(trainer: Trainer) -> dict[str, int]:
    """Return bytes of this rank that live from step to step, by category; DDP keeps gradients in its buckets."""
    networks = trainer.networks
    buckets = [module for module in trainer.modules.values() if isinstance(module, DistributedDataParallel)]
    return {
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


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, one that several share once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _dump(trainer: Trainer, path: Path) -> None:
    """Write whole gradients and parameters by name, once a tensor group."""
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
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()
