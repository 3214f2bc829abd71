"""The abstract tasks of one training step: its passes, and what ends it.

Skeletons depend on the schedule and on how passes are cut alone, so that one serves many plans; they are kept.
"""

from functools import lru_cache

from simulator.program import StreamKind
from strategies.in_order import in_order
from strategies.lowering.offload import SQUARES_ON_HOST
from strategies.lowering.passes import Passes
from strategies.lowering.placed import NORM, tied_kind
from strategies.lowering.skeleton import RANK, Site, Skeleton
from strategies.lowering.step_shape import StepShape
from strategies.lowering.task_list import Streams
from strategies.mesh import REPLICA
from strategies.offloading import CHUNKS, HOST, STEPS


@lru_cache(maxsize=256)
def one_step(shape: StepShape) -> Skeleton:
    """Return the abstract tasks of one training step."""
    return Step(shape).build()


class Step(Passes):
    """Abstract tasks of a step while they are collected."""

    def build(self) -> Skeleton:
        """Return the abstract tasks of the whole step."""
        for together in in_order(self.order):
            self.add_actions(together)
        for position in range(self.shape.ranks):
            self._sum(position)
        for number, (first, second, legs) in enumerate(self.shape.tied):
            streams = ((first, StreamKind.DATA), (second, StreamKind.DATA))
            self._chain(Site(tied_kind(first, second), first), "tied", (number,), streams, legs)
        if self.shape.norm is not None:
            self._clip(self.shape.norm)
        for position in range(self.shape.ranks):
            self._update(position)
        for position in range(self.shape.ranks):
            self._gather(position)
        return self.skeleton()

    def _chain(self, site: Site, what: str, key: tuple[int, ...], streams: Streams, legs: int) -> None:
        """Add the phases of a communication at the end of the step; the streams keep them in order."""
        positions = [position for position, _ in streams]
        for leg in range(legs):
            waits = (
                [(task, p) for p in positions for task in (*self.chain[p].ends, self.leaving[p])] if leg == 0 else []
            )
            number = self.add(site, what, (*key, leg), streams, -1, waits)
        if legs:
            for position in positions:
                self.leaving[position] = number

    def _sum(self, position: int) -> None:
        """Reduce all gradients of a position that were not reduced as they were made, then those in parts."""
        own = ((position, StreamKind.DATA),)
        for kind, legs in self.shape.reductions[position]:
            self._chain(Site(kind, position), "reduce", (-1, 0), own, legs)
        for number, legs in self.shape.replicas[position]:
            over = ((position, StreamKind.REPLICA),)
            self._chain(Site(REPLICA, position), "reduce", (-1, number), over, legs)
        for axis, legs in self.shape.replicated[position]:
            self._chain(Site(axis, position), "replicated", (), own, legs)

    def _gather(self, position: int) -> None:
        """Gather the parameters of a position that its optimizer has updated as shards."""
        for kind, legs in self.shape.gathers[position]:
            self._chain(Site(kind, position), "gather", (), ((position, StreamKind.DATA),), legs)

    def _clip(self, legs: int) -> None:
        """Read the gradients of every rank, and sum what their norm needs over the ranks of all positions."""
        for position in range(self.shape.ranks):
            chain, own = self.chain[position], ((position, StreamKind.COMPUTE),)
            waits = [(task, position) for task in (self.leaving[position], *chain.ends)]
            chain.tail, chain.joined = self.add(Site(RANK, position), "squares", (), own, -1, waits), None
            if self.shape.updates[position].gradients:
                waits.append((self.summed[position], position))
                chain.joined = self.copy(HOST, position, SQUARES_ON_HOST, (), -1, waits)
        streams = tuple((position, StreamKind.DATA) for position in range(self.shape.ranks))
        self._chain(Site(NORM, 0), "norm", (), streams, legs)

    def _update(self, position: int) -> None:
        """Update the parameters: those whose states are on the device there, and others chunk by chunk."""
        chain, update = self.chain[position], self.shape.updates[position]
        waits = [(task, position) for task in (self.leaving[position], self.summed[position], *chain.ends)]
        if update.device:
            streams = ((position, StreamKind.COMPUTE),)
            chain.tail, chain.joined = self.add(Site(RANK, position), "optimizer", (), streams, -1, waits), None
        ended: list[int] = []
        for chunk in range(CHUNKS if update.steps else 0):
            before = waits if chunk == 0 else []
            if update.streamed and chunk > 1:  # both buffers are in use until then
                before = [(ended[chunk - 2], position)]
            for number in update.steps:
                step, end = STEPS[number], ((chunk == CHUNKS - 1) - (chunk == 0)) * update.streamed
                streams, site = ((position, step.stream),), Site(step.kind or RANK, position)
                task = self.add(site, "update", (number, end), streams, -1, before)
                before = [(task, position)]
            ended.append(task)
        if ended:
            chain.joined, chain.tail = chain.tail if update.device else None, ended[-1]
