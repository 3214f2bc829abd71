"""Pipeline steps without a flush between them: PipeDream with weight stashing, and PipeDream-2BW.

The backward pass of a microbatch uses the weights of its forward pass. PipeDream [1]_ runs forward on the newest
weights of a stage, and updates them after every backward; older versions stay as long as microbatches are in flight on
them. 2BW [2]_ runs the microbatches of step ``t`` on the weights that step ``t - 2`` left, sums their gradients and
updates the newest weights, so two versions suffice. torch's pipeline schedules end every step on all ranks, so this
module runs the passes itself.

References
----------
.. [1] Narayanan et al., "PipeDream", SOSP 2019, section 3.3 (weight stashing, without vertical sync).
.. [2] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1 (2BW).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import record_function

from meshwise.executor.job import Job
from meshwise.executor.model.network import Network
from meshwise.executor.parallel.sharded_states import SplitOptimizer
from meshwise.executor.recording.accelerator import CORE, Accelerator
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.training import data
from meshwise.executor.training.optimizer import set_learning_rate
from meshwise.executor.training.trainer import Trainer
from meshwise.simulator.program import TaskKind
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.schedules.schedule import KINDS, ActionKind

Version = list[nn.Parameter]
"""The weights of a stage, in the order of its modules; a tied weight occurs once for each module that has it."""


class Microbatch(NamedTuple):
    """A microbatch between forward and backward: the input of the stage, its result, and the weights of the forward."""

    source: Tensor
    result: Tensor
    version: Version


def copy_version(version: Version) -> Version:
    """Return a copy of weights, for an update to change while microbatches still need the old ones."""
    copies: dict[int, nn.Parameter] = {}
    for parameter in version:
        if id(parameter) not in copies:
            copy = nn.Parameter(parameter.detach().clone())
            copy.grad_dtype = parameter.grad_dtype
            copies[id(parameter)] = copy
    return [copies[id(parameter)] for parameter in version]


class Weights:
    """The versions of one stage's weights that microbatches still need, by the number of updates that made each."""

    def __init__(self, network: Network) -> None:
        self.sites = [
            (module, name) for module in network.modules() for name, _ in module.named_parameters(recurse=False)
        ]
        self.num_updates = 0
        self.versions: dict[int, Version] = {0: [getattr(module, name) for module, name in self.sites]}

    def install(self, version: Version) -> None:
        """Make the network run on a version of its weights."""
        for (module, name), parameter in zip(self.sites, version, strict=True):
            setattr(module, name, parameter)

    def make_version(self, optimizer: Any, *, in_use: bool, num_older: int) -> Version:
        """Install and return the version that the next update changes; ``num_older`` versions before it stay.

        With ``in_use`` microbatches still need the newest version, so the update changes a copy of it.
        """
        version = self.versions[self.num_updates]
        if in_use:
            copies = copy_version(version)
            hand_over(optimizer, dict(zip(version, copies, strict=True)))
            for parameter in version:
                parameter.grad = None
            version = copies
        self.num_updates += 1
        self.versions[self.num_updates] = version
        for number in [number for number in self.versions if number < self.num_updates - num_older]:
            del self.versions[number]
        self.install(version)
        return version


def hand_over(optimizer: Any, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make an optimizer update other parameters, with the states of the parameters that they replace."""
    if isinstance(optimizer, SplitOptimizer):
        optimizer.hand_over(replacements)
        return
    for group in optimizer.param_groups:
        group["params"] = [replacements[parameter] for parameter in group["params"]]
    for old, new in replacements.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


class UnflushedTrainer(Trainer):
    """Trains one stage a rank without a flush; all steps of a job, the profiled one too, are one long schedule.

    The profiled step begins with microbatches in flight. The profiler sees neither the memory that they hold nor when
    it is freed, so the peak memory that it reports is an estimate.
    """

    def __init__(self, job: Job, recorder: Recorder, accelerator: Accelerator = CORE) -> None:
        super().__init__(job, recorder, accelerator)
        plan = job.plan
        ((self.stage, self.network),) = self.networks.items()
        self.weights = Weights(self.network)
        total = (job.steps + job.profile) * plan.num_microbatches
        self.actions = iter(plan.rule.order(self.position, plan.pipeline, total, plan.chunks).tolist())
        self.total = total
        self.active_microbatches: dict[int, Microbatch] = {}
        self.sends: dict[tuple[ActionKind, int], tuple[Any, Tensor]] = {}
        self.batches: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self.gradients: list[Tensor] | None = None
        self.losses: dict[int, Tensor] = {}
        lines = plan.mesh.rows(PIPELINE).tolist()
        # one group a direction: NCCL runs the messages between two ranks of a group in one order, and the two ranks
        # start theirs in different orders
        self.groups = {kind: _make_group(lines) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)}

    def _replicate(self, stage: int, network: Network) -> nn.Module:
        return network

    def step(self, index: int) -> float | None:
        """Run this rank's passes up to the last backward of step ``index`` and return the loss of that step."""
        plan = self.job.plan
        last = (index + 1) * plan.num_microbatches - 1
        with loss_parallel() if plan.tensor > 1 else nullcontext():
            for _, kind, microbatch in self.actions:
                if KINDS[kind] is ActionKind.FORWARD:
                    self._forward(microbatch)
                    continue
                self._backward(microbatch)
                if plan.rule.updates_every_microbatch or microbatch == last:
                    self._update(index)  # after `_backward` returned: it held the last reference to its version
                if microbatch == last:
                    break
        if last == self.total - 1:
            self._wait_sends(list(self.sends))
        self.batches.pop(index, None)
        return float(self.losses.pop(index)) if self.is_last else None

    def _forward(self, microbatch: int) -> None:
        step, number = divmod(microbatch, self.job.plan.num_microbatches)
        # the rank before has received the gradient of this microbatch, or it could not have sent the input of this pass
        last_arrival = microbatch - (self.job.plan.pipeline - self.position + 1)
        self._wait_sends([key for key in self.sends if key[0] is ActionKind.BACKWARD and key[1] <= last_arrival])
        version = self._find_version(step)
        self.weights.install(version)
        if self.is_first:
            source = self._load_batch(step)[0][number]
        else:
            source = self._receive(ActionKind.FORWARD, microbatch).requires_grad_()
        with self.recorder.span(TaskKind.FORWARD, self.stage, number):
            result = self.network(source)
        if self.is_last:
            result = self._compute_loss(result, self._load_batch(step)[1][number])
            loss = to_local(result.detach())
            self.losses[step] = self.losses[step] + loss if step in self.losses else loss
        else:
            self._send(ActionKind.FORWARD, microbatch, result)
        self.active_microbatches[microbatch] = Microbatch(source, result, version)

    def _backward(self, microbatch: int) -> None:
        plan = self.job.plan
        source, result, version = self.active_microbatches.pop(microbatch)
        gradient = None if self.is_last else self._receive(ActionKind.BACKWARD, microbatch)
        self._wait_sends([key for key in self.sends if key == (ActionKind.FORWARD, microbatch)])
        for parameter in self.weights.versions[self.weights.num_updates]:
            parameter.grad = None  # the gradient of the update before
        self.weights.install(version)  # recomputation reads it
        parameters = list(dict.fromkeys(version))
        scale = float(plan.num_microbatches) if plan.rule.updates_every_microbatch else 1.0
        with self.recorder.span(TaskKind.BACKWARD, self.stage, microbatch % plan.num_microbatches):
            inputs: list[Tensor] = [*parameters] if self.is_first else [source, *parameters]
            gradients = list(torch.autograd.grad(result * scale if self.is_last else result, inputs, gradient))
        if not self.is_first:
            self._send(ActionKind.BACKWARD, microbatch, gradients.pop(0))
        self._add_gradients(gradients, parameters)

    def _add_gradients(self, gradients: list[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        wide_gradients = [g.to(p.grad_dtype or g.dtype) for g, p in zip(gradients, parameters, strict=True)]
        if self.gradients is None:
            self.gradients = wide_gradients
        else:
            for total, gradient in zip(self.gradients, wide_gradients, strict=True):
                total.add_(gradient)

    def _update(self, step: int) -> None:
        """Make the next version of the weights from the newest one and the gradients summed so far."""
        plan, latest_version = self.job.plan, self.weights.versions[self.weights.num_updates]
        is_double = not plan.rule.updates_every_microbatch
        in_use = is_double or any(
            microbatch.version is latest_version for microbatch in self.active_microbatches.values()
        )
        version = self.weights.make_version(self.optimizer, in_use=in_use, num_older=int(is_double))
        assert self.gradients is not None
        for parameter, gradient in zip(dict.fromkeys(version), self.gradients, strict=True):
            parameter.grad = gradient
        self.gradients = None
        self._reduce_gradients(self.stage)
        self._sum_gradients()
        with self.recorder.span(TaskKind.OPTIMIZER):
            set_learning_rate(self.optimizer, self.job.learning_rate.rate_at(step, self.job.training.optimizer))
            self.optimizer.step()

    def _find_version(self, step: int) -> Version:
        """Return the version of the weights on which the microbatches of a step run forward."""
        if self.job.plan.rule.updates_every_microbatch:
            return self.weights.versions[self.weights.num_updates]
        return self.weights.versions[max(step - 1, 0)]

    def _load_batch(self, step: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tokens and targets of every microbatch of a step."""
        if step not in self.batches:
            training, device = self.job.training, self.accelerator.device
            arrays = data.load_share(
                step, training.global_batch, training.sequence, self.data_rank, self.sizes, self.text
            )
            tokens, targets = (
                torch.split(torch.from_numpy(array.copy()).to(device), self.microbatch) for array in arrays
            )
            self.batches[step] = tokens, targets
        return self.batches[step]

    def _send(self, kind: ActionKind, microbatch: int, tensor: Tensor) -> None:
        message = tensor.detach().contiguous()
        with record_function(self._name_message("SEND", kind, microbatch)):
            work = dist.isend(message, group=self.groups[kind], group_dst=self.position + _find_offset(kind))
        self.sends[kind, microbatch] = work, message

    def _receive(self, kind: ActionKind, microbatch: int) -> Tensor:
        plan, training = self.job.plan, self.job.training
        length = training.sequence // (plan.tensor if plan.sequence_parallel else 1)
        shape = self.microbatch, length, self.job.spec.hidden
        message = torch.empty(shape, dtype=self._dtype, device=self.accelerator.device)
        with record_function(self._name_message("RECV", kind, microbatch)):
            work = dist.irecv(message, group=self.groups[kind], group_src=self.position - _find_offset(kind))
        assert work is not None
        work.wait()
        return message

    def _wait_sends(self, keys: list[tuple[ActionKind, int]]) -> None:
        """Wait for sends, which have arrived, and free their tensors."""
        for key in keys:
            self.sends.pop(key)[0].wait()

    def _name_message(self, direction: str, kind: ActionKind, microbatch: int) -> str:
        return f"PP:{self.stage}{direction}_{kind.value}{microbatch % self.job.plan.num_microbatches}"

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def _make_group(lines: list[list[int]]) -> dist.ProcessGroup:
    """Return a new group of the line of ranks that this rank is in; every rank makes the same call."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(lines)  # type: ignore[no-untyped-call]
    return group


def _find_offset(kind: ActionKind) -> int:
    """Return how many pipeline positions ahead the result of a pass goes: 1, or -1 for a backward pass."""
    return 1 if kind is ActionKind.FORWARD else -1
