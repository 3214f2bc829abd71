"""One rank's share of a captured module under a plan, stepped."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from executor.accelerator import Accelerator
from executor.capture.capture import capture, num_samples
from executor.capture.factory import made, naming
from executor.heartbeat import Heartbeat
from executor.job import metrics_file, result_file, tensors_file
from executor.measure import described, nbytes, timed
from executor.operators.collectives import Ran, Ranks
from executor.operators.job import OperatorJob, collectives_file
from executor.operators.network import OperatorNetwork
from executor.operators.pipeline import Pipeline
from executor.operators.verification import verdict
from executor.optimizer import kind_of
from executor.profiled import profiled
from executor.recorder import Record, Recorder
from executor.trace import Row, TraceEvent, without
from simulator.program import Category, StreamKind, TaskKind
from strategies.mesh import COMMUNICATION, DATA
from strategies.plan import Plan


@dataclass(frozen=True)
class Made:
    """What a factory makes for a job: the module, and its inputs microbatch by microbatch."""

    module: nn.Module
    microbatches: tuple[tuple[Tensor, ...], ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the whole batch."""
        return tuple(torch.cat(parts) for parts in zip(*self.microbatches, strict=True))

    def on(self, device: torch.device) -> "Made":
        """Return the module, which goes there, and its inputs on a device."""
        moved = tuple(tuple(tensor.to(device) for tensor in inputs) for inputs in self.microbatches)
        return Made(self.module.to(device), moved)


def make(job: OperatorJob) -> Made:
    """Return the module of a job, seeded, and its inputs cut along their batch.

    Raises
    ------
    ValueError
        Where the plan does not train on the batch that the factory makes, or on single samples.
    """
    torch.manual_seed(job.seed)
    module, inputs = made(job.module)
    with naming(job.module):
        batch = num_samples(inputs)
    if job.double:
        module = module.double()
        inputs = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    count = job.plan.num_microbatches
    if batch != job.plan.sequences * job.plan.data * count:
        held = f"microbatch({job.plan.sequences}) * data({job.plan.data}) * microbatches({count})"
        raise ValueError(f"{job.module}: {held} is the batch of the inputs, met {batch}")
    if batch == count:
        met = "met microbatch(1) * data(1)"
        raise ValueError(f"{job.module}: a microbatch of a captured module has at least 2 samples, {met}; nearest: 2")
    return Made(module, tuple(zip(*(tensor.chunk(count) for tensor in inputs), strict=True)))


class OperatorTrainer:
    """Builds the stages of this rank and runs steps; every rank of the job makes one."""

    def __init__(self, job: OperatorJob, heartbeat: Heartbeat, accelerator: Accelerator) -> None:
        accelerator.settle(exact=job.double)
        self.job, self.accelerator = job, accelerator
        self.recorder = Recorder(heartbeat, accelerator.synchronise)
        self.ranks = Ranks(device_mesh(job.plan, accelerator.device.type), self.recorder.now)
        plan, made = job.plan, make(job)
        captured = capture(made.module, made.microbatches[0])  # on a core, as the graph of the plan was
        self.made = made.on(accelerator.device)
        self.network = OperatorNetwork(captured, self.made.module, plan, self.ranks, accelerator.device)
        self.pipeline = Pipeline(self.network, plan, self.recorder)
        kind, options = kind_of(job.optimizer, accelerator.optimizer_options)
        self.optimizer = kind(self.network.parameters(), **options)

    def step(self) -> float | None:
        """Run one training step and return the loss; ``None`` off the last stage."""
        self.optimizer.zero_grad(set_to_none=True)
        self.ranks.ran.clear()
        self.pipeline.transfers.clear()
        loss = self.pipeline.step(self.made.microbatches)
        self.recorder.heartbeat.beat("gradients")
        self.network.sum_gradients()
        with self.recorder.span(TaskKind.OPTIMIZER):
            self.optimizer.step()
        return loss

    def train(self, folder: Path, rank: int) -> None:
        """Run the job and leave this rank's results in ``folder``."""
        self.accelerator.reset_peak()
        dist.barrier()
        with metrics_file(folder, rank).open("w") as metrics:
            for step in range(self.job.steps):
                self.recorder.heartbeat.step = step
                loss, seconds = timed(self.accelerator, self.step)
                metrics.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
                metrics.flush()
        held = described(self.accelerator.held())
        if self.job.dump:
            self._dump(folder, rank)
        if self.job.profile:
            result_file(folder, rank).write_text(json.dumps(self._profiled_step() | held))

    def _profiled_step(self) -> dict[str, Any]:
        self._drop_gradients()
        states = (value for values in self.optimizer.state.values() for value in values.values())
        resident = {
            str(Category.PARAMETERS): nbytes(self.network.parameters()),
            str(Category.OPTIMIZER): nbytes(value for value in states if isinstance(value, Tensor)),
        }
        held = self.accelerator.held()
        if held is not None:
            resident[str(Category.BUFFERS)] = max(held.now - sum(resident.values()), 0)
        before, gradients = self._drop_gradients, self._gradients
        return profiled(
            self.step, self.recorder, self.accelerator, resident, gradients, before=before, spans=self._spans
        )

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self) -> Iterator[Tensor]:
        return (part.grad for part in self.network.parameters() if part.grad is not None)

    def _spans(self, records: Sequence[Record], _: Sequence[TraceEvent]) -> list[Row]:
        """Return the spans of a step: passes without the collectives inside them, these, and transfers."""
        inside = [_collective(each, records) for each in self.ranks.ran]
        passes = [piece for each in records for piece in without(Row(StreamKind.COMPUTE, *each), inside)]
        return sorted([*passes, *inside, *self.pipeline.transfers], key=lambda row: (row.start, row.end))

    def _dump(self, folder: Path, rank: int) -> None:
        ran = [[str(each.collective), each.axis, each.size] for each in self.ranks.ran]
        collectives_file(folder, rank).write_text(json.dumps(ran))
        arrays: dict[str, Any] = {}
        for root, part in self.network.parts.items():
            name = self.network.names[root]
            arrays[f"parameter {name}"] = self.network.whole(root, part.detach()).cpu().numpy()
            gradient = torch.zeros_like(part) if part.grad is None else part.grad
            arrays[f"gradient {name}"] = self.network.whole(root, gradient).cpu().numpy()
        for name, parameter in self.network.unread(self.made.module).items():
            arrays[f"parameter {name}"] = parameter.detach().cpu().numpy()
            arrays[f"gradient {name}"] = torch.zeros_like(parameter).detach().cpu().numpy()
        for name in self.network.renewed.updates:
            arrays[f"buffer {name}"] = self.network.renewed.whole(name).cpu().numpy()
        np.savez(tensors_file(folder, rank), **arrays)


def agrees(job: OperatorJob, folder: Path, device: torch.device) -> bool:
    """Return whether the ranks of a job that has run computed what one process does: the first one tells all."""
    dist.barrier()  # all have left what they computed
    equal = torch.zeros(1, device=device)
    if dist.get_rank() == 0:
        equal[0] = float(verdict(job, folder).equal)
    dist.broadcast(equal, 0)
    return bool(equal.item())


def _collective(ran: Ran, records: Sequence[Record]) -> Row:
    """Return a collective as a span of the pass that runs it; after all passes it sums gradients."""
    where = next(((r.stage, r.microbatch) for r in records if r.start <= ran.start <= r.end), (-1, -1))
    name = str(ran.collective)
    if where[0] < 0 or ran.axis == DATA:
        return Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, *where, name, ran.start, ran.end, ran.size)
    return Row(StreamKind.TENSOR, COMMUNICATION[ran.axis], *where, name, ran.start, ran.end, ran.size)


def device_mesh(plan: Plan, kind: str) -> dist.device_mesh.DeviceMesh:
    """Return the mesh of a plan without axes of one rank, of processes that have joined."""
    axes = [axis for axis in plan.mesh.axes if axis.size > 1] or list(plan.mesh.axes[:1])
    return init_device_mesh(kind, tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
