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
from meshwise.executor.recording.accelerator import Accelerator, DeviceMemory
from meshwise.executor.recording.profiled import profile_steps
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.training import shards
from meshwise.executor.training.trainer import Trainer
from meshwise.executor.training.unflushed import UnflushedTrainer
from meshwise.simulator.program import Category
from meshwise.strategies.plan.mesh import TENSOR


def measure_job(job: Job, folder: Path, heartbeat: Heartbeat, rank: int, accelerator: Accelerator) -> None:
    """Train as ``job`` says and write this rank's results into ``folder``."""
    warnings.filterwarnings("ignore", category=UserWarning)
    heartbeat.step = -1
    heartbeat.beat("build")
    accelerator.settle(exact=job.training.precision == "fp64")
    kind = UnflushedTrainer if job.plan.asynchronous else Trainer
    trainer = kind(job, Recorder(heartbeat, accelerator.synchronise), accelerator)
    if job.resume is not None:
        heartbeat.beat("resume")
        shards.load_checkpoint(trainer, Path(job.resume))
    memory = run_timed_steps(trainer, folder, rank)
    if job.dump:
        _dump(trainer, tensors_file(folder, rank))
    if job.profile:
        result_file(folder, rank).write_text(json.dumps(profile_step(trainer) | describe_memory(memory)))


def run_timed_steps(trainer: Trainer, folder: Path, rank: int) -> DeviceMemory | None:
    """Run the steps of the job, write a line of metrics after each, and return the device memory that they took.

    The first step, which makes the optimizer states, does not count in the peak, unless it is the only one.
    """
    job, heartbeat, accelerator = trainer.job, trainer.recorder.heartbeat, trainer.accelerator
    accelerator.reset_peak()
    dist.barrier()
    with metrics_file(folder, rank).open("w") as metrics:
        for step in range(job.first_step, job.steps):
            heartbeat.step = step
            loss, seconds = time_step(accelerator, lambda: trainer.step(heartbeat.step))
            metrics.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            metrics.flush()
            if step == job.first_step < job.steps - 1:
                accelerator.reset_peak()
            num_done = step + 1
            if job.checkpoint_every and (num_done % job.checkpoint_every == 0 or num_done == job.steps):
                heartbeat.beat("checkpoint")
                shards.save_checkpoint(trainer, num_done, checkpoints_folder(folder))
    return accelerator.read_memory()


def time_step(accelerator: Accelerator, step: Callable[[], float | None]) -> tuple[float | None, float]:
    """Return the loss of a step, and its seconds until the device has finished."""
    losses: list[float | None] = []
    seconds = accelerator.timer.measure_once(lambda: losses.append(step()))
    return losses[0], seconds


def describe_memory(memory: DeviceMemory | None) -> dict[str, Any]:
    """Return the entry of a rank's result file for its device memory."""
    return {"held": None if memory is None else memory._asdict()}


def profile_step(trainer: Trainer) -> dict[str, Any]:
    """Return spans and memory of a profiled step, which is not among the timed ones, and the peak bytes on the host."""
    # without a flush gradients live on between steps, and nothing is dropped before one
    single_step = trainer.job.plan.asynchronous
    prepare_step: Callable[[], object] = (lambda: None) if single_step else trainer.zero_gradients
    prepare_step()
    steps = count(trainer.job.steps)
    result = profile_steps(
        lambda: trainer.step(next(steps)),
        trainer.recorder,
        trainer.accelerator,
        count_resident_bytes(trainer),
        lambda: (p.grad for p in trainer.parameters if p.grad is not None),
        prepare_step=prepare_step,
        single_step=single_step,
    )
    return result | {"host": trainer.host.peak_bytes}


def count_resident_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of this rank that live from step to step, by category.

    Gradients are among them where DistributedDataParallel keeps them in buckets. Other bytes of the device's allocator,
    as those that cuBLAS took, count as buffers.
    """
    buckets = [module for module in trainer.modules.values() if isinstance(module, DistributedDataParallel)]
    state_values = [value for values in trainer.optimizer.state.values() for value in values.values()]
    category_bytes: dict[str, int] = {
        Category.PARAMETERS: nbytes(
            p for n in trainer.networks.values() for p in n.parameters() if not trainer.host.holds(to_local(p.detach()))
        ),
        Category.GRADIENTS: sum(
            to_local(p).numel() * p.element_size() for module in buckets for p in module.parameters()
        ),
        Category.OPTIMIZER: nbytes(value for value in state_values if isinstance(value, Tensor)),
    }
    if (memory := trainer.accelerator.read_memory()) is not None:
        category_bytes[Category.BUFFERS] = max(memory.now - sum(category_bytes.values()), 0)
    return category_bytes


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``; a storage that several tensors share counts once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (to_local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _dump(trainer: Trainer, path: Path) -> None:
    """Write whole gradients and parameters by name, on the first rank of each tensor group."""
    arrays: dict[str, Any] = {}
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.gather_gradients()
    for network in trainer.networks.values():
        for name, parameter in network.model_parameters():
            arrays[f"parameter {name}"] = _gather_tensor(parameter.detach())
            if parameter.grad is not None:
                arrays[f"gradient {name}"] = _gather_tensor(parameter.grad)
    if trainer.mesh[TENSOR].get_local_rank() == 0:
        np.savez(path, **arrays)


def _gather_tensor(tensor: Tensor) -> Any:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()
