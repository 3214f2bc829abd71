"""Faults of ranks under a plan, as patches of the product that the reference in one process does not see."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.modules import batch_norms, blocks
from meshwise.executor.modules import step as step_module
from meshwise.executor.modules.losses import StepLoss, WeightedLoss
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.stages.pipelined_step import PipelinedStep
from meshwise.executor.stages.stage import Stage
from meshwise.executor.stages.tied import TiedParameters
from meshwise.executor.user_training import training
from meshwise.executor.user_training.job import TrainJob

Patch = AbstractContextManager[Any]
MOST_RANK = 1


@dataclass(frozen=True)
class Fault:
    """A fault of a kind of module under a layout; ``is_narrow`` ones are there in bf16 alone.

    Gradients are clipped to ``max_norm``, which would hide that all of them are scaled.
    """

    kind: str
    words: str
    make: Callable[[int], Sequence[Patch]]
    is_narrow: bool = False
    max_norm: float | None = None

    def is_active(self, job: TrainJob) -> bool:
        """Return whether a run of a job has the fault."""
        return not self.is_narrow or job.precision == "bf16"

    def list_patches(self, rank: int, job: TrainJob) -> Sequence[Patch]:
        """Return the patches of a rank."""
        return self.make(rank) if self.is_active(job) else ()


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Have a function called as the first argument of another one."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return patch.object(owner, name, call)


def list_gradients(step: TrainingStep) -> list[Tensor]:
    return [to_local(parameter.grad) for parameter in step.module.parameters() if parameter.grad is not None]


def list_values(step: TrainingStep) -> list[Tensor]:
    return [to_local(parameter.detach()) for parameter in step.module.parameters()]


def change_gradients(change: Callable[[TrainingStep], None]) -> Callable[[int], list[Patch]]:
    """Return a fault of gradients as they are before they are scaled and clipped."""

    def finish(original: Any, step: TrainingStep, factor: float) -> None:
        change(step)
        original(step, factor)

    return lambda rank: [wrap(TrainingStep, "_finish_gradients", finish)]


def scale_gradients(factor: float) -> Callable[[int], list[Patch]]:
    return change_gradients(lambda step: [gradient.mul_(factor) for gradient in list_gradients(step)] and None)


def reduce_again(step: TrainingStep) -> None:
    for gradient in list_gradients(step):
        dist.all_reduce(gradient)


def keep_stale_gradients(rank: int) -> list[Patch]:
    last: list[Tensor] = []

    def change(step: TrainingStep) -> None:
        new = [gradient.clone() for gradient in list_gradients(step)]
        for gradient, old in zip(list_gradients(step), last, strict=False):
            gradient.copy_(old)
        last[:] = new

    return list(change_gradients(change)(rank))


def miss_bucket(rank: int) -> list[Patch]:
    """Leave the gradient of one parameter as this rank has made it."""
    local: dict[str, Tensor] = {}

    def begin(original: Any, step: TrainingStep, batch: Any) -> Any:
        parameter = max(step.module.parameters(), key=Tensor.numel)
        parameter.register_hook(lambda gradient: local.update(gradient=gradient.clone()))
        return original(step, batch)

    def change(step: TrainingStep) -> None:
        parameter = max(step.module.parameters(), key=Tensor.numel)
        assert parameter.grad is not None
        parameter.grad.copy_(local["gradient"])

    return [wrap(TrainingStep, "_begin", begin), *change_gradients(change)(rank)]


def reduce_nothing(rank: int) -> list[Patch]:
    def accumulate(original: Any, module: Any, layout: Any, *, is_last: bool) -> Any:
        return original(module, layout, is_last=False)

    return [wrap(step_module, "accumulate_gradients", accumulate)]


def lose_rank(rank: int) -> list[Patch]:
    """Have the last rank add nothing to the gradients."""
    return [wrap(StepLoss, "add", lambda original, *args: original(*args) * float(rank < MOST_RANK))]


def change_steps(change: Callable[[Any, TrainingStep], None], *, is_of_last_rank: bool = False) -> Any:
    """Return a fault of the optimizer's step: ``change`` gets the function that makes the step."""

    def build(original: Any, step: TrainingStep) -> Any:
        optimizer, scheduler = original(step)
        own_step = optimizer.step
        # a checkpoint makes states that are missing by a step with an argument
        optimizer.step = lambda *args, **options: own_step(**options) if options else change(own_step, step)
        return optimizer, scheduler

    return lambda rank: [wrap(TrainingStep, "_build_optimizer", build)] if not is_of_last_rank or rank else []


def skip_step(number: int) -> Callable[[Any, TrainingStep], None]:
    return lambda own_step, step: None if step.step_number == number else own_step()


def forget_state(own_step: Any, step: TrainingStep) -> None:
    if step.step_number == 1:
        for states in step.optimizer_states:
            states["exp_avg"].zero_()
    own_step()


def step_twice_as_far(own_step: Any, step: TrainingStep) -> None:
    before = [value.clone() for value in list_values(step)]
    own_step()
    for value, old in zip(list_values(step), before, strict=True):
        value.add_(value - old)


def round_weights(own_step: Any, step: TrainingStep) -> None:
    own_step()
    for value in list_values(step):
        value.copy_(value.bfloat16())


def leave_one(own_step: Any, step: TrainingStep) -> None:
    value = max(list_values(step), key=Tensor.numel)
    before = value.clone()
    own_step()
    value.copy_(before)


def step_schedule_twice(rank: int) -> list[Patch]:
    def call(original: Any, step: TrainingStep, batch: Any) -> Any:
        loss = original(step, batch)
        assert step._trained is not None and step._trained[1] is not None
        step._trained[1].step()
        return loss

    return [wrap(TrainingStep, "__call__", call)]


def change_passes(change: Callable[[list[Any], int], list[Any]], owner: Any = TrainingStep) -> Any:
    """Return a fault of the microbatches that a rank runs."""

    def run(rank: int, original: Any, step: TrainingStep, microbatches: Any, *rest: Any) -> None:
        original(step, change(list(microbatches), rank), *rest)

    return lambda rank: [wrap(owner, "_run_passes", partial(run, rank))]


def shift_labels(microbatches: list[Any], rank: int) -> list[Any]:
    labels = [microbatch["labels"] for microbatch in microbatches]
    shifted = [labels[-1], *labels[:-1]]
    return [microbatch | {"labels": own} for microbatch, own in zip(microbatches, shifted, strict=True)]


def compute_with_stale_parameters(rank: int) -> list[Patch]:
    last: list[Tensor] = []

    def run(original: Any, step: TrainingStep, *rest: Any) -> None:
        now = [value.clone() for value in list_values(step)]
        for value, old in zip(list_values(step), last, strict=False):
            value.copy_(old)
        original(step, *rest)
        for value, own in zip(list_values(step), now, strict=True):
            value.copy_(own)
        last[:] = now

    return [wrap(TrainingStep, "_run_passes", run)]


def keep_last_microbatch(rank: int) -> list[Patch]:
    """Drop the gradients of all microbatches but the last."""

    def add(original: Any, step_loss: StepLoss, loss: WeightedLoss) -> Tensor:
        is_first = step_loss.total is None
        part: Tensor = original(step_loss, loss)
        return part * 0.0 if is_first else part

    return [wrap(StepLoss, "add", add)]


def clip_locally(rank: int) -> list[Patch]:
    def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
        parts = [to_local(gradient) for gradient in gradients]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    return [patch.object(step_module, "clip_gradients", clip)]


def change_loss(change: Callable[[StepLoss, float, float], tuple[float, float]]) -> Callable[[int], list[Patch]]:
    """Return a fault of the loss of a step and the factor of its gradients."""
    return lambda rank: [wrap(StepLoss, "reduce", lambda original, loss: change(loss, *original(loss)))]


def divide_by_own_weight(step_loss: StepLoss, loss: float, factor: float) -> tuple[float, float]:
    assert step_loss.weight is not None
    return loss, 1 / float(step_loss.weight)


def take_own_statistics(rank: int) -> list[Patch]:
    return [patch.object(batch_norms, "sum_over_ranks", lambda x: x)]


def renew_no_statistics(ranks: Sequence[int]) -> Callable[[int], list[Patch]]:
    return lambda rank: [patch.object(batch_norms, "_update_statistics", lambda *args: None)] if rank in ranks else []


def draw_again(rank: int) -> list[Patch]:
    return [patch.object(blocks, "checkpoint", partial(blocks.checkpoint, preserve_rng_state=False))]


def renew_statistics_twice(rank: int) -> list[Patch]:
    return [patch.object(blocks, "_note_renewed", lambda block, context, renewed: context)]


def read_samples_of_first_rank(rank: int) -> list[Patch]:
    def open_first(original: Any, job: Any, user_file: Any, own_rank: int, *rest: Any) -> Iterator[Any]:
        result: Iterator[Any] = original(job, user_file, 0, *rest)
        return result

    return [wrap(training, "open_batches", open_first)]


def read_one_batch(rank: int) -> list[Patch]:
    batches: list[Any] = []

    def read(original: Any, *args: Any) -> Any:
        batches.append(original(*args))
        return batches[0]

    return [wrap(training, "next_batch", read)]


def change_boundary(change: Callable[[Tensor, list[Tensor]], Tensor]) -> Callable[[int], list[Patch]]:
    """Return a fault of the gradients that come to the first stage from the second; ``change`` gets earlier ones."""

    def make(rank: int) -> list[Patch]:
        earlier: list[Tensor] = []

        def receive(gradient: Tensor) -> Tensor:
            result = change(gradient, earlier)
            earlier.append(gradient.clone())
            return result

        def finish(original: Any, stage: Stage, values: Any) -> Any:
            results = original(stage, values)
            for result in results:
                if stage.sent and result.is_floating_point() and result.requires_grad:
                    result.register_hook(receive)
            return results

        return [wrap(Stage, "_finish", finish)]

    return make


def send_stale_activations(rank: int) -> list[Patch]:
    earlier: list[Tensor] = []

    def finish(original: Any, stage: Stage, values: Any) -> Any:
        results = original(stage, values)
        if not stage.sent:
            return results
        first = results[0]
        changed = first if not earlier else first + (earlier[-1] - first).detach()
        earlier.append(first.detach().clone())
        return changed, *results[1:]

    return [wrap(Stage, "_finish", finish)]


def sum_no_copies(rank: int) -> list[Patch]:
    return [patch.object(TiedParameters, "sum_gradients", lambda self, parameters: None)]


def count_copies_twice(rank: int) -> list[Patch]:
    return [patch.object(TiedParameters, "is_counted", lambda self, name: True)]


def measure_own_norm(rank: int) -> list[Patch]:
    def measure(original: Any, step: PipelinedStep, gradients: Mapping[str, Tensor]) -> float:
        return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())

    return [wrap(PipelinedStep, "_measure_norm", measure)]


DATA, WEIGHTED, NORMS = ("tied", "data=2"), ("weighted", "data=2,num_microbatches=2"), ("convolutions", "data=2")
SHARDS, PARTS = ("tied", "data=2,zero=3,recompute=full"), ("tied", "data=2,zero=2,num_microbatches=2")
NORM_BLOCKS = ("residual", "data=2,zero=1,recompute=full")
STAGES = ("tied", "pipeline=2,num_microbatches=2")


def stuck(own_step: Any, step: TrainingStep) -> None:
    """Step nothing."""


def change_stage_gradients(factor: float) -> Callable[[int], list[Patch]]:
    def finish(original: Any, step: PipelinedStep, own_factor: float) -> None:
        original(step, own_factor)
        for gradient in list_gradients(step):
            gradient.mul_(factor)

    return lambda rank: [wrap(PipelinedStep, "_finish_gradients", finish)]


FAULTS = {
    "the gradients of a rank are left out": Fault(*DATA, lose_rank),
    "gradients are not reduced": Fault(*DATA, reduce_nothing),
    "gradients are reduced twice": Fault(*DATA, change_gradients(reduce_again)),
    "gradients are divided by too many ranks": Fault(*DATA, scale_gradients(0.5)),
    "a bucket is not reduced": Fault(*DATA, miss_bucket),
    "gradients are of the step before": Fault(*DATA, keep_stale_gradients),
    "all ranks read the samples of one": Fault(*DATA, read_samples_of_first_rank),
    "all steps read the first batch": Fault(*DATA, read_one_batch),
    "the loss is that of a rank": Fault(*DATA, change_loss(lambda own, loss, factor: (float(own.total or 0), factor))),
    "an update is skipped": Fault(*DATA, change_steps(skip_step(1))),
    "a rank skips the last update": Fault(*DATA, change_steps(skip_step(2), is_of_last_rank=True)),
    "the schedule is stepped twice": Fault(*DATA, step_schedule_twice),
    "one parameter is not stepped": Fault(*DATA, change_steps(leave_one)),
    "weights of losses are of one rank": Fault(*WEIGHTED, change_loss(divide_by_own_weight)),
    "weights of losses are left out": Fault(*WEIGHTED, change_loss(lambda own, loss, factor: (loss, 1.0))),
    "a microbatch is skipped": Fault(*WEIGHTED, change_passes(lambda parts, rank: parts[:-1])),
    "a microbatch is counted twice": Fault(*WEIGHTED, change_passes(lambda parts, rank: [*parts, parts[0]])),
    "labels are of other microbatches": Fault(*WEIGHTED, change_passes(shift_labels)),
    "statistics are of one rank": Fault(*NORMS, take_own_statistics),
    "buffers are not renewed": Fault(*NORMS, renew_no_statistics((0, 1))),
    "a rank does not renew its buffers": Fault(*NORMS, renew_no_statistics((1,))),
    "blocks are computed again with other draws": Fault(*SHARDS, draw_again),
    "a shard is not stepped": Fault(*SHARDS, change_steps(stuck, is_of_last_rank=True)),
    "a shard skips the last update": Fault(*SHARDS, change_steps(skip_step(2), is_of_last_rank=True)),
    "gradients are clipped by the norm of a shard": Fault(*SHARDS, clip_locally, max_norm=0.1),
    "gathered parameters are stale": Fault(*SHARDS, compute_with_stale_parameters),
    "blocks renew statistics twice": Fault(*NORM_BLOCKS, renew_statistics_twice),
    "the states of a shard are reset": Fault(*PARTS, change_steps(forget_state, is_of_last_rank=True)),
    "only the last microbatch has gradients": Fault(*PARTS, keep_last_microbatch),
    "the gradient of a boundary is dropped": Fault(*STAGES, change_boundary(lambda g, earlier: g * 0)),
    "the gradient of a boundary is scaled": Fault(*STAGES, change_boundary(lambda g, earlier: g * 1.01)),
    "the gradient of a boundary is stale": Fault(*STAGES, change_boundary(lambda g, earlier: [g, *earlier][-1])),
    "activations are of the microbatch before": Fault(*STAGES, send_stale_activations),
    "stages run microbatches in other orders": Fault(
        *STAGES, change_passes(lambda parts, rank: parts[::-1] if rank else parts, PipelinedStep)
    ),
    "tied copies are not summed": Fault(*STAGES, sum_no_copies),
    "a norm counts copies twice": Fault(*STAGES, count_copies_twice, max_norm=0.1),
    "gradients are clipped by the norm of a stage": Fault(*STAGES, measure_own_norm, max_norm=0.1),
    "a stage is not stepped": Fault(*STAGES, change_steps(stuck, is_of_last_rank=True)),
    "parameters are stuck in bf16": Fault(*DATA, change_steps(stuck), is_narrow=True),
    "an update is skipped in bf16": Fault(*SHARDS, change_steps(skip_step(1)), is_narrow=True),
    "the last update is skipped in bf16": Fault(*STAGES, change_steps(skip_step(2)), is_narrow=True),
    "steps are twice as far in bf16": Fault(*SHARDS, change_steps(step_twice_as_far), is_narrow=True),
    "gradients are not scaled in bf16": Fault(*SHARDS, scale_gradients(2.0), is_narrow=True),
    "gradients of stages are not scaled in bf16": Fault(*STAGES, change_stage_gradients(2.0), is_narrow=True),
    "gradients are stale in bf16": Fault(*DATA, keep_stale_gradients, is_narrow=True),
    "gradients are not reduced in bf16": Fault(*DATA, reduce_nothing, is_narrow=True),
    "main weights are rounded to bf16": Fault(*DATA, change_steps(round_weights), is_narrow=True),
    "one parameter is stuck in bf16": Fault(*STAGES, change_steps(leave_one), is_narrow=True),
    "a shard is stuck in bf16": Fault(*SHARDS, change_steps(stuck, is_of_last_rank=True), is_narrow=True),
    "the schedule is stepped twice in bf16": Fault(*STAGES, step_schedule_twice, is_narrow=True),
    "all ranks read the samples of one in bf16": Fault(*DATA, read_samples_of_first_rank, is_narrow=True),
}
