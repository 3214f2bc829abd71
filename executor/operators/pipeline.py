"""The passes of a step in the order of its schedule, and what stages send each other."""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from executor.operators.network import OperatorNetwork, Pass
from executor.recorder import Recorder
from executor.trace import Row
from simulator.program import StreamKind, TaskKind
from strategies.mesh import PIPELINE
from strategies.plan import Plan
from strategies.schedule import ActionKind


class Pipeline:
    """Runs the schedule of a plan on one rank.

    Parameters
    ----------
    network
        The stages of this rank.
    recorder
        Notes every pass, and tells the launcher of it.
    """

    def __init__(self, network: OperatorNetwork, plan: Plan, recorder: Recorder) -> None:
        self.network, self.plan, self.recorder = network, plan, recorder
        self.actions = plan.schedule.orders[network.ranks.coordinate.get(PIPELINE, 0)]
        self.final = len(plan.stages) - 1
        self.groups = self._boundaries()
        self._sends: list[tuple[dist.Work | None, Tensor]] = []
        self.transfers: list[Row] = []
        self._handed: dict[tuple[int, int, int], list[Tensor]] = {}

    def _boundaries(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Return a group for the messages of each stage to the next or the one before, of this rank's line of ranks.

        NCCL runs what two ranks send each other in a group in one order, which theirs is not.
        """
        if self.plan.pipeline == 1:
            return {}
        lines = self.plan.mesh.rows(PIPELINE).tolist()
        ends = [(a, b) for a in range(self.final + 1) for b in (a - 1, a + 1) if 0 <= b <= self.final]
        apart = [(a, b) for a, b in ends if self.plan.positions[a] != self.plan.positions[b]]
        groups = {}
        for boundary in apart:
            groups[boundary], _ = dist.new_subgroups_by_enumeration(lines)  # type: ignore[no-untyped-call]
        return groups

    def step(self, microbatches: Sequence[tuple[Tensor, ...]]) -> float | None:
        """Run all passes of a step and return the mean loss; ``None`` where this rank has not the last stage.

        ``microbatches`` has the inputs of every microbatch, whole.
        """
        passes: dict[tuple[int, int], tuple[Pass, Tensor | None]] = {}
        total: float | None = None
        for action in self.actions:
            stage, microbatch = action.stage, action.microbatch
            if action.kind is ActionKind.FORWARD:
                begun = Pass(self.network, self.network.programs[stage], microbatches[microbatch])
                received = self._receive(stage - 1, stage, microbatch, begun.empty_received())
                with self.recorder.span(TaskKind.FORWARD, stage, microbatch):
                    sent = begun.forward(received)
                    loss = begun.loss() / len(microbatches) if stage == self.final else None
                self._send(stage, stage + 1, microbatch, sent)
                passes[stage, microbatch] = begun, loss
                total = total if loss is None else (total or 0.0) + float(loss.detach())
            else:
                ended, loss = passes.pop((stage, microbatch))
                received = self._receive(stage + 1, stage, microbatch, ended.empty_gradients())
                with self.recorder.span(TaskKind.BACKWARD, stage, microbatch):
                    gradients = ended.backward(received, loss)
                self._send(stage, stage - 1, microbatch, gradients)
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()
        return total

    def _send(self, stage: int, to: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to another stage; one on the same rank gets them as they are."""
        if tensors and self.plan.positions[stage] == self.plan.positions[to]:
            self._handed[stage, to, microbatch] = list(tensors)
            return
        start, group = self.recorder.now(), self.groups.get((stage, to))
        for tensor, tag in zip(tensors, self._tags(stage, to, microbatch), strict=False):
            whole = tensor.contiguous()
            self._sends.append((dist.isend(whole, self._rank(to), group=group, tag=tag), whole))
        if tensors:
            stream = StreamKind.SEND_FORWARD if to > stage else StreamKind.SEND_BACKWARD
            self._note(stream, stage, microbatch, tensors, start)

    def _receive(self, source: int, stage: int, microbatch: int, empty: Sequence[Tensor]) -> list[Tensor]:
        """Return what another stage sends, received into ``empty`` tensors."""
        if empty and self.plan.positions[source] == self.plan.positions[stage]:
            return self._handed.pop((source, stage, microbatch))
        start, group = self.recorder.now(), self.groups.get((source, stage))
        for tensor, tag in zip(empty, self._tags(source, stage, microbatch), strict=False):
            dist.recv(tensor, self._rank(source), group=group, tag=tag)
        if empty:
            stream = StreamKind.RECEIVE_FORWARD if source < stage else StreamKind.RECEIVE_BACKWARD
            self._note(stream, source, microbatch, empty, start)
        return list(empty)

    def _note(self, stream: StreamKind, sender: int, microbatch: int, tensors: Sequence[Tensor], start: int) -> None:
        forward = stream in (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD)
        kind, name = TaskKind.PIPELINE_COMMUNICATION, "send activations" if forward else "send gradients"
        size = sum(tensor.nbytes for tensor in tensors)
        self.transfers.append(Row(stream, kind, sender, microbatch, name, start, self.recorder.now(), size))

    def _rank(self, stage: int) -> int:
        """Return the rank that runs another stage at the same place of the other axes."""
        return dist.get_global_rank(self.network.ranks.mesh.get_group(PIPELINE), self.plan.positions[stage])

    def _tags(self, source: int, to: int, microbatch: int) -> Iterator[int]:
        """Yield tags that no other message between two ranks has."""
        stages, direction = len(self.plan.stages), int(to > source)
        first = ((microbatch * stages + source) * 2 + direction) * _MOST
        return iter(range(first, first + _MOST))


_MOST = 1 << 10
"""Tensors that cross a boundary at most."""
