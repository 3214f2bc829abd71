"""`parallelize`: the step of training of a user's module under a plan, in a loop of his own.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> module = torch.nn.Linear(2, 1)
>>> step = parallelize(module, loss=lambda outputs, batch: outputs.square().mean(), learning_rate=0.01)
>>> losses = [step(torch.ones(4, 2)) for _ in range(20)]
>>> losses[-1] < losses[0]
True
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.embedding_tables.step import TableStep
from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.modules.losses import LossFunction
from meshwise.executor.modules.optimizers import OptimizerFactory, SchedulerFactory, make_adamw
from meshwise.executor.modules.sharding import count_ranks
from meshwise.executor.modules.step import TrainingStep, find_device
from meshwise.executor.stages.pipelined_step import PipelinedStep
from meshwise.executor.stages.supported_modules import find_module_layout, read_plan
from meshwise.executor.starting.construction import Start, make_start
from meshwise.strategies.plan.plan import Plan


def make_step(module: nn.Module | Start, layout: ModuleLayout, **options: Any) -> TrainingStep:
    """Return the step of training of a module under a layout; options are those of `TrainingStep`."""
    if layout.cuts_tables:
        return TableStep(module, layout, **options)
    return (PipelinedStep if layout.pipeline > 1 else TrainingStep)(module, layout, **options)


def parallelize(
    module: nn.Module | Callable[[], nn.Module],
    plan: Plan | ModuleLayout | str | Path | None = None,
    *,
    optimizer: OptimizerFactory | Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
    loss: LossFunction | None = None,
    precision: str = "fp32",
    max_norm: float | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> TrainingStep:
    """Return the step of training of a module under a plan, in a loop of the user's own.

    It is called on every rank that a launcher such as torchrun has started, with the samples of that rank.

    Parameters
    ----------
    module
        Whole and with equal parameters on every rank; its forward takes a batch. Or a function that returns it: a rank
        then has no more of its parameters at a time than its own and one of the others, where ranks share them.
    plan
        A plan or the file of one, words such as ``data=2,zero=3``, or a `ModuleLayout`; by default data parallelism
        over all ranks.
    optimizer
        A function of the module, or an optimizer of its parameters without states; by default AdamW. For a function
        that returns the module it is a function.
    scheduler
        A schedule of the learning rate, or a function of the optimizer that returns one; it is stepped once a step.
    loss
        A function of ``(outputs, batch)``; by default the outputs are the loss, or have it as ``loss``.
    precision
        ``fp32``, ``bf16`` with fp32 main weights, or ``fp64``.
    max_norm
        The norm to which gradients are clipped.
    learning_rate
        That of the default optimizer.
    seed
        The seed of random draws in forward; every rank and step has its own. Also that of a function that returns the
        module, whose draws it names by the parameters that they fill.

    Raises
    ------
    ValueError
        Where the plan cuts the module itself, or has another number of ranks.
    """
    join_ranks()
    layout = plan if isinstance(plan, ModuleLayout) else read_layout(plan)
    return make_step(
        make_start(module, seed),
        layout,
        optimizer=make_adamw(learning_rate) if optimizer is None else optimizer,
        scheduler=scheduler,
        loss=loss,
        precision=precision,
        max_norm=max_norm,
        seed=seed,
    )


def read_layout(plan: Plan | str | Path | None) -> ModuleLayout:
    """Return the layout of a plan, of its file, or of words; by default that of all ranks."""
    if plan is None:
        return ModuleLayout(count_ranks())
    if isinstance(plan, str) and "=" in plan:
        return parse_layout(plan, ModuleLayout(count_ranks()))
    return find_module_layout(plan if isinstance(plan, Plan) else read_plan(Path(plan)))


def join_ranks() -> None:
    """Join the process group that a launcher has set the environment for, unless this process is in one."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = find_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
