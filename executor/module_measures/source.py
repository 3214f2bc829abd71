"""What is measured: a user's module with its first batch, of his file or as it is in his own loop."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.executor.modules.batches import count_samples, to_device, to_double
from meshwise.executor.modules.losses import LossFunction
from meshwise.executor.modules.optimizers import OptimizerFactory, build_optimizer, make_adamw
from meshwise.executor.modules.quiet import turn_to_double
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import next_batch, open_batches, read_batch
from meshwise.executor.user_training.user_file import UserFile

READINGS = 4
"""Batches that are read to know how long one takes."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module that can be built several times, and this rank's samples of its first batch.

    Parameters
    ----------
    build
        Returns the module on the device; each time another one.
    build_optimizer
        Returns the optimizer of such a module, whose parameters may be shards by then.
    batch
        The samples, on the device.
    reading
        Seconds to read a batch.
    read_samples
        Samples that are read in that time: those of this rank, or of all where each reads all.
    """

    build: Callable[[], nn.Module]
    build_optimizer: OptimizerFactory
    loss: LossFunction | None
    precision: str
    device: torch.device
    batch: Any
    reading: float
    read_samples: int


def read_source(job: TrainJob, user_file: UserFile, device: torch.device, rank: int, num_ranks: int) -> ModuleSource:
    """Return what a rank measures of a user's file, of which it reads some batches, or as many as there are."""
    batches = open_batches(job, user_file, rank, num_ranks, 0)
    batch, times = next_batch(batches, user_file, 0), list[float]()
    for number in range(1, READINGS):
        item = read_batch(batches, user_file, number)
        if item.error is not None:
            break
        times.append(item.seconds)
    batch = to_device(batch, device)
    data, is_own = user_file.open_data(rank, num_ranks)
    has_places = hasattr(getattr(data, "dataset", data), "__getitem__") and not isinstance(data, list | tuple)
    own_samples = count_samples(batch)
    factory = user_file.optimizer or make_adamw(job.learning_rate)

    def build() -> nn.Module:
        module = user_file.build_model(job.seed)
        return module.to(device, torch.float64 if job.precision == "fp64" else None)

    return ModuleSource(
        build,
        lambda module: build_optimizer(factory, module, {}),
        user_file.loss,
        job.precision,
        device,
        to_double(batch) if job.precision == "fp64" else batch,
        median(times) if times else 0.0,
        own_samples if has_places or is_own else own_samples * num_ranks,
    )


def copy_source(
    module: nn.Module,
    optimizer: OptimizerFactory | Optimizer,
    loss: LossFunction | None,
    precision: str,
    device: torch.device,
    batch: Any,
) -> ModuleSource:
    """Return what a rank measures of a module in a loop of the user's own: copies of it, which leave it as it is.

    Reading takes no time there, as a step does not read.

    Parameters
    ----------
    optimizer
        A function of the module, or an optimizer of its parameters.
    batch
        The samples of this rank.
    """
    batch = to_device(batch, device)

    def build_own_optimizer(copy: nn.Module) -> Optimizer:
        if not isinstance(optimizer, Optimizer):
            return build_optimizer(optimizer, copy, {})
        return copy_optimizer(optimizer, module, copy)

    return ModuleSource(
        lambda: copy_module(module, precision).to(device),
        build_own_optimizer,
        loss,
        precision,
        device,
        to_double(batch) if precision == "fp64" else batch,
        0.0,
        count_samples(batch),
    )


def copy_module(module: nn.Module, precision: str) -> nn.Module:
    """Return a copy of a module, without gradients.

    Raises
    ------
    UserError
        Where it cannot be copied.
    """
    try:
        copy = deepcopy(module)
    except Exception as error:  # the user's own classes raise anything
        rule = "a module is measured on a copy by copy.deepcopy"
        raise UserError(
            f"search: {rule}, met {type(error).__name__}: {error}; nearest: a plan such as data=N"
        ) from error
    copy.zero_grad(set_to_none=True)
    if precision == "fp64":
        turn_to_double(copy)
    return copy


def copy_optimizer(optimizer: Optimizer, module: nn.Module, copy: nn.Module) -> Optimizer:
    """Return a copy of an optimizer that steps the parameters of a module's copy instead."""
    parameters = dict(copy.named_parameters())
    # what is in the memo is not copied again: each parameter becomes that of the copy
    memo: dict[int, Tensor] = {id(own): parameters[name] for name, own in module.named_parameters()}
    try:
        return deepcopy(optimizer, memo)
    except Exception as error:  # of an optimizer's own class
        rule = "an optimizer is measured on a copy by copy.deepcopy"
        met = f"met {type(optimizer).__name__}, {error}"
        raise UserError(f"search: {rule}, {met}; nearest: a function of the module that returns it") from error
