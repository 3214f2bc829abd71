"""Trains one rank's part of a captured module under a plan, and the module itself in one process.

The passes of a step run in the order of the schedule, and stages send each other the values that cross their
boundaries. The reference in one process runs the user's module on the whole batch at once.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwise.executor.capture.capture import capture, count_samples, name_factory, run_factory
from meshwise.executor.device import require_device
from meshwise.executor.job import metrics_file, result_file, tensors_file
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.operators.collectives import CollectiveRecord, RankMesh
from meshwise.executor.operators.job import OperatorJob, collectives_file, verdict
from meshwise.executor.operators.network import OperatorNetwork, Pass
from meshwise.executor.recording.accelerator import Accelerator, find_accelerator
from meshwise.executor.recording.profiled import profile_steps
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Record, Recorder
from meshwise.executor.recording.trace import Row, TraceEvent, cut_holes
from meshwise.executor.training.measure import describe_memory, nbytes, time_step
from meshwise.executor.training.optimizer import find_optimizer
from meshwise.simulator.program import Category, StreamKind, TaskKind
from meshwise.strategies.plan.mesh import DATA, PASS_AXES, PIPELINE
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.schedules.schedule import ActionKind


class Pipeline:
    """Runs the schedule of a plan on one rank.

    Parameters
    ----------
    network
        The stages of this rank.
    recorder
        Records every pass, and writes the heartbeat.
    """

    def __init__(self, network: OperatorNetwork, plan: Plan, recorder: Recorder) -> None:
        self.network, self.plan, self.recorder = network, plan, recorder
        self.actions = plan.actions.orders[network.ranks.coordinate.get(PIPELINE, 0)]
        self.final = len(plan.stages) - 1
        self.groups = self._make_groups()
        self._sends: list[tuple[dist.Work | None, Tensor]] = []
        self.transfers: list[Row] = []
        self._handovers: dict[tuple[int, int, int], list[Tensor]] = {}

    def _make_groups(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Return a process group for every pair (sending stage, receiving stage), of this rank's line of ranks.

        NCCL runs the messages between two ranks of a group in one order, and the two ranks start theirs in different
        orders, so each direction of each boundary has a group of its own.
        """
        if self.plan.pipeline == 1:
            return {}
        lines = self.plan.mesh.rows(PIPELINE).tolist()
        ends = [(a, b) for a in range(self.final + 1) for b in (a - 1, a + 1) if 0 <= b <= self.final]
        boundaries = [(a, b) for a, b in ends if self.plan.positions[a] != self.plan.positions[b]]
        groups = {}
        for boundary in boundaries:
            groups[boundary], _ = dist.new_subgroups_by_enumeration(lines)  # type: ignore[no-untyped-call]
        return groups

    def step(self, microbatches: Sequence[tuple[Tensor, ...]]) -> float | None:
        """Run all passes of a step and return the mean loss; ``None`` where this rank does not have the last stage.

        ``microbatches`` has the whole inputs of every microbatch.
        """
        passes: dict[tuple[int, int], Pass] = {}
        total: float | None = None
        for action in self.actions:
            stage, microbatch = action.stage, action.microbatch
            if action.kind is ActionKind.FORWARD:
                forward_pass = Pass(self.network, stage, microbatches[microbatch])
                messages = self._receive(stage - 1, stage, microbatch, forward_pass.make_receive_buffers())
                with self.recorder.span(TaskKind.FORWARD, stage, microbatch):
                    outputs = forward_pass.forward(messages)
                passes[stage, microbatch] = forward_pass
                if stage == self.final:
                    total = (total or 0.0) + float(outputs[0]) / len(microbatches)
                else:
                    self._send(stage, stage + 1, microbatch, outputs)
            else:
                backward_pass = passes.pop((stage, microbatch))
                if stage == self.final:
                    messages = [torch.full_like(value, 1 / len(microbatches)) for value in backward_pass.sent_values]
                else:
                    messages = self._receive(stage + 1, stage, microbatch, backward_pass.make_gradient_buffers())
                with self.recorder.span(TaskKind.BACKWARD, stage, microbatch):
                    gradients = backward_pass.backward(messages)
                self._send(stage, stage - 1, microbatch, gradients)
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()
        return total

    def _send(self, stage: int, target: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to another stage; a stage on the same rank gets the tensors themselves."""
        if tensors and self.plan.positions[stage] == self.plan.positions[target]:
            self._handovers[stage, target, microbatch] = list(tensors)
            return
        start, group = self.recorder.read_clock(), self.groups.get((stage, target))
        for tensor, tag in zip(tensors, self._list_tags(stage, target, microbatch), strict=False):
            message = tensor.contiguous()  # kept with its work: the tensor must live until the message has left
            self._sends.append((dist.isend(message, self._find_rank(target), group=group, tag=tag), message))
        if tensors:
            stream = StreamKind.SEND_FORWARD if target > stage else StreamKind.SEND_BACKWARD
            self._note_transfer(stream, stage, microbatch, tensors, start)

    def _receive(self, source: int, stage: int, microbatch: int, empty: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that another stage sends, received into ``empty`` ones."""
        if empty and self.plan.positions[source] == self.plan.positions[stage]:
            return self._handovers.pop((source, stage, microbatch))
        start, group = self.recorder.read_clock(), self.groups.get((source, stage))
        for tensor, tag in zip(empty, self._list_tags(source, stage, microbatch), strict=False):
            dist.recv(tensor, self._find_rank(source), group=group, tag=tag)
        if empty:
            stream = StreamKind.RECEIVE_FORWARD if source < stage else StreamKind.RECEIVE_BACKWARD
            self._note_transfer(stream, source, microbatch, empty, start)
        return list(empty)

    def _note_transfer(
        self, stream: StreamKind, sender: int, microbatch: int, tensors: Sequence[Tensor], start: int
    ) -> None:
        forward = stream in (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD)
        kind, name = TaskKind.PIPELINE_COMMUNICATION, "send activations" if forward else "send gradients"
        size = sum(tensor.nbytes for tensor in tensors)
        self.transfers.append(Row(stream, kind, sender, microbatch, name, start, self.recorder.read_clock(), size))

    def _find_rank(self, stage: int) -> int:
        """Return the rank that runs a stage, at this rank's coordinates along the other axes."""
        return dist.get_global_rank(self.network.ranks.mesh.get_group(PIPELINE), self.plan.positions[stage])

    def _list_tags(self, source: int, target: int, microbatch: int) -> Iterator[int]:
        """Return tags that no other message between the same ranks has in a step."""
        stages, direction = len(self.plan.stages), int(target > source)
        first_tag = ((microbatch * stages + source) * 2 + direction) * _MAX_TENSORS
        return iter(range(first_tag, first_tag + _MAX_TENSORS))


_MAX_TENSORS = 1 << 10
"""The most tensors that cross a boundary."""


@dataclass(frozen=True)
class BuiltModule:
    """The module that a factory builds for a job, and its inputs, cut into microbatches."""

    module: nn.Module
    microbatches: tuple[tuple[Tensor, ...], ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the whole batch."""
        return tuple(torch.cat(parts) for parts in zip(*self.microbatches, strict=True))

    def to_device(self, device: torch.device) -> "BuiltModule":
        """Return the module and its inputs on a device; the module itself is moved."""
        microbatches = tuple(tuple(tensor.to(device) for tensor in inputs) for inputs in self.microbatches)
        return BuiltModule(self.module.to(device), microbatches)


def build_module(job: OperatorJob) -> BuiltModule:
    """Return the module of a job, built with its seed, and its inputs cut into microbatches.

    Raises
    ------
    ValueError
        Where the factory's batch is not that of the plan, or a microbatch has a single sample.
    """
    torch.manual_seed(job.seed)
    module, inputs = run_factory(job.module)
    with name_factory(job.module):
        batch = count_samples(inputs)
    if job.double:
        module = module.double()
        inputs = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    count = job.plan.num_microbatches
    if batch != job.plan.sequences * job.plan.data * count:
        rule = f"microbatch({job.plan.sequences}) * data({job.plan.data}) * microbatches({count})"
        raise ValueError(f"{job.module}: {rule} is the batch of the inputs, met {batch}")
    if batch == count:
        finding = "met microbatch(1) * data(1)"
        raise ValueError(
            f"{job.module}: a microbatch of a captured module has at least 2 samples, {finding}; nearest: 2"
        )
    return BuiltModule(module, tuple(zip(*(tensor.chunk(count) for tensor in inputs), strict=True)))


class OperatorTrainer:
    """Builds the stages of this rank and runs training steps; every rank of the job makes one."""

    def __init__(self, job: OperatorJob, heartbeat: Heartbeat, accelerator: Accelerator) -> None:
        accelerator.settle(exact=job.double)
        self.job, self.accelerator = job, accelerator
        self.recorder = Recorder(heartbeat, accelerator.synchronise)
        self.ranks = RankMesh(build_device_mesh(job.plan, accelerator.device.type), self.recorder.read_clock)
        plan, built_module = job.plan, build_module(job)
        # on the CPU, as the graph of the plan was captured
        captured = capture(built_module.module, built_module.microbatches[0])
        self.built_module = built_module.to_device(accelerator.device)
        self.network = OperatorNetwork(captured, self.built_module.module, plan, self.ranks, accelerator.device)
        self.pipeline = Pipeline(self.network, plan, self.recorder)
        kind, options = find_optimizer(job.optimizer, accelerator.optimizer_options)
        self.optimizer = kind(self.network.parameters(), **options)

    def step(self) -> float | None:
        """Run one training step and return the loss; ``None`` where this rank does not have the last stage."""
        self.optimizer.zero_grad(set_to_none=True)
        self.ranks.records.clear()
        self.pipeline.transfers.clear()
        loss = self.pipeline.step(self.built_module.microbatches)
        self.recorder.heartbeat.beat("gradients")
        self.network.sum_gradients()
        with self.recorder.span(TaskKind.OPTIMIZER):
            self.optimizer.step()
        return loss

    def train(self, folder: Path, rank: int) -> None:
        """Run the job and write this rank's results into ``folder``."""
        self.accelerator.reset_peak()
        dist.barrier()
        with metrics_file(folder, rank).open("w") as metrics:
            for step in range(self.job.steps):
                self.recorder.heartbeat.step = step
                loss, seconds = time_step(self.accelerator, self.step)
                metrics.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
                metrics.flush()
        memory = describe_memory(self.accelerator.read_memory())
        if self.job.dump:
            self._dump(folder, rank)
        if self.job.profile:
            result_file(folder, rank).write_text(json.dumps(self._profile_step() | memory))

    def _profile_step(self) -> dict[str, Any]:
        self._drop_gradients()
        states = (value for values in self.optimizer.state.values() for value in values.values())
        resident = {
            str(Category.PARAMETERS): nbytes(self.network.parameters()),
            str(Category.OPTIMIZER): nbytes(value for value in states if isinstance(value, Tensor)),
        }
        memory = self.accelerator.read_memory()
        if memory is not None:
            resident[str(Category.BUFFERS)] = max(memory.now - sum(resident.values()), 0)
        arguments = self.step, self.recorder, self.accelerator, resident, self._list_gradients
        return profile_steps(*arguments, prepare_step=self._drop_gradients, spans=self._build_spans)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _list_gradients(self) -> Iterator[Tensor]:
        return (part.grad for part in self.network.parameters() if part.grad is not None)

    def _build_spans(self, records: Sequence[Record], _: Sequence[TraceEvent]) -> list[Row]:
        """Return the spans of a step: collectives, transfers, and passes without the collectives inside them."""
        collectives = [_collective_row(record, records) for record in self.ranks.records]
        passes = [piece for record in records for piece in cut_holes(Row(StreamKind.COMPUTE, *record), collectives)]
        return sorted([*passes, *collectives, *self.pipeline.transfers], key=lambda row: (row.start, row.end))

    def _dump(self, folder: Path, rank: int) -> None:
        rows = [[str(record.collective), record.axis, record.size] for record in self.ranks.records]
        collectives_file(folder, rank).write_text(json.dumps(rows))
        arrays: dict[str, Any] = {}
        for name, part in self.network.parts.items():
            arrays[f"parameter {name}"] = self.network.gather_parameter(name, part.detach()).cpu().numpy()
            gradient = torch.zeros_like(part) if part.grad is None else part.grad
            arrays[f"gradient {name}"] = self.network.gather_parameter(name, gradient).cpu().numpy()
        for name, parameter in self.network.list_unread(self.built_module.module).items():
            arrays[f"parameter {name}"] = parameter.detach().cpu().numpy()
            arrays[f"gradient {name}"] = torch.zeros_like(parameter).detach().cpu().numpy()
        for name, stage in self.network.buffers_of.items():
            arrays[f"buffer {name}"] = stage.gather_buffer(name).cpu().numpy()
        np.savez(tensors_file(folder, rank), **arrays)


def agrees(job: OperatorJob, folder: Path, device: torch.device) -> bool:
    """Return whether the ranks of a finished job computed what one process does; rank 0 compares for all."""
    dist.barrier()  # every rank has written its tensors
    equal = torch.zeros(1, device=device)
    if dist.get_rank() == 0:
        equal[0] = float(verdict(job, folder).equal)
    dist.broadcast(equal, 0)
    return bool(equal.item())


def _collective_row(record: CollectiveRecord, records: Sequence[Record]) -> Row:
    """Return a collective as a span of the pass that runs it; outside of passes collectives sum gradients."""
    stage_microbatch = next(((r.stage, r.microbatch) for r in records if r.start <= record.start <= r.end), (-1, -1))
    stream, kind = StreamKind.DATA, TaskKind.DATA_COMMUNICATION
    if stage_microbatch[0] >= 0 and record.axis != DATA:
        stream, kind = StreamKind.TENSOR, PASS_AXES[record.axis].task
    return Row(stream, kind, *stage_microbatch, str(record.collective), record.start, record.end, record.size)


def run_jobs(paths: list[Path], rank: int) -> None:
    """Run the job of the first file, before it the check of the second where there is one: no job runs that differs."""
    heartbeat = Heartbeat(paths[0].parent, rank)
    heartbeat.beat("start")
    jobs = [OperatorJob.read(path) for path in paths]  # the run is the first one: its folder has the signs of life
    device = jobs[0].device
    require_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    accelerator = find_accelerator(device)
    with join_process_group(paths[0].parent, max(job.timeout for job in jobs), accelerator):
        for path, job in reversed(list(zip(paths, jobs, strict=True))):
            heartbeat.beat("capture")
            OperatorTrainer(job, heartbeat, accelerator).train(path.parent, rank)
            if job.double and not agrees(job, path.parent, accelerator.device):
                return


def build_device_mesh(plan: Plan, kind: str) -> dist.device_mesh.DeviceMesh:
    """Return the device mesh of a plan, without axes of one rank; the process group must exist."""
    axes = [axis for axis in plan.mesh.axes if axis.size > 1] or list(plan.mesh.axes[:1])
    return init_device_mesh(kind, tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))


def train(job: OperatorJob) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the losses and, as arrays by name, the last gradients, the parameters and the buffers that changed.

    Nothing of the plan is used, neither its microbatches nor the captured program.
    """
    built_module = build_module(job)
    kind, options = find_optimizer(job.optimizer)
    module = built_module.module.train()
    initial_buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    optimizer = kind(module.parameters(), **options)
    losses = []
    for _ in range(job.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = module(*(tensor.clone() for tensor in built_module.inputs)).reshape(())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        arrays[f"parameter {name}"] = parameter.detach().numpy()
        arrays[f"gradient {name}"] = (parameter.grad if parameter.grad is not None else parameter * 0).detach().numpy()
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, initial_buffers[name]):
            arrays[f"buffer {name}"] = buffer.numpy()
    return tuple(losses), arrays
