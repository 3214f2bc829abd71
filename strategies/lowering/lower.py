"""The whole lowering: actions in schedule order, then gradients, optimizer and parameters."""

from collections.abc import Sequence

from simulator.program import MemoryChange, Origin, Program, StreamKind
from strategies.lowering.classes import ClassTable, unfolded
from strategies.lowering.data import Bucket, buckets, gradient_step, overlaps, parameter_step
from strategies.lowering.emitter import Emitter
from strategies.lowering.memory import resident
from strategies.lowering.operator import GroupShape, Step
from strategies.lowering.optimizer import optimizer_step
from strategies.lowering.pieces import Granularity, Piece, pieces, split
from strategies.lowering.pipeline import gather_step, in_order, send_step
from strategies.lowering.stage import StageCost, StageCosts
from strategies.lowering.tied import tied_parameters, tied_step
from strategies.mesh import DATA, TENSOR
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.schedule import Action, ActionKind


def lower(
    problem: Problem,
    plan: Plan,
    granularity: str = Granularity.OPERATOR,
    *,
    costs: StageCosts | None = None,
    folded: bool = True,
) -> Program:
    """Return the program of one training step under ``plan``.

    Parameters
    ----------
    granularity
        What becomes one task: an ``operator``, a ``segment`` of compute, a whole ``action``.
    costs
        Block and stage costs already known for the problem.
    folded
        Whether equal ranks are simulated once; ``False`` simulates every rank.

    Raises
    ------
    ValueError
        Where the schedule's orders cannot finish.
    """
    costs = costs or StageCosts(problem)
    table = costs.classes(plan.mesh) if folded else unfolded(problem.cluster, plan.mesh)
    return _Lowering(costs, plan, table, Granularity(granularity)).run()


class _Lowering:
    """One plan on its way to a program."""

    def __init__(self, costs: StageCosts, plan: Plan, table: ClassTable, granularity: Granularity) -> None:
        self.costs, self.problem, self.plan, self.table = costs, costs.problem, plan, table
        self.cluster, self.training = costs.problem.cluster, costs.problem.training
        self.granularity, self.overlaps = granularity, overlaps(self.cluster, plan)
        self.emitter = Emitter(self.cluster, table.rank_classes(len(plan.stages)))
        self.shape = [table.shape(index, TENSOR) for index in range(len(table.members))]
        self.data_shape = [table.shape(index, DATA) for index in range(len(table.members))]
        self.units = self._units()
        self.arrived: dict[tuple[int, Action], int] = {}
        self.reductions: dict[int, list[int]] = {index: [] for index in range(len(table.members))}
        self.pending: dict[tuple[tuple[int, ...], int, int], dict[int, int]] = {}
        self.gathers: dict[tuple[int, int, ActionKind], tuple[Piece, ...]] = {}
        self.sends: dict[tuple[int, int, ActionKind], tuple[Step, int]] = {}
        self.templates: dict[tuple[int, ActionKind, GroupShape, bool], tuple[Piece, ...]] = {}

    def _units(self) -> list[list[tuple[int, ...]]]:
        """Return per pipeline rank the sets of classes whose ranks form tensor groups."""
        result = []
        for position in range(self.plan.pipeline):
            found = {self.table.group_classes(index, TENSOR): None for index in self.table.on_pipeline_rank(position)}
            result.append(list(found))
        return result

    def run(self) -> Program:
        schedule = self.plan.schedule
        for action in in_order(schedule):
            for unit in self.units[schedule.rank_of(action.stage)]:
                self._action(unit, action)
        if self.plan.data > 1 and not self.overlaps:
            self._reduce_all()
        self._finish()
        return self.emitter.program(self._resident())

    def stage(self, index: int, stage: int) -> StageCost:
        """Return the cost of a stage on a class."""
        return self.costs.stage(self.plan, stage, self.shape[index])

    def _action(self, unit: tuple[int, ...], action: Action) -> None:
        last = action.kind is ActionKind.BACKWARD and action.microbatch == self.plan.num_microbatches - 1
        early = last and self.overlaps
        parts = self._parts(unit[0], action, early)
        arrivals = [self.arrived.pop((index, action)) for index in unit if (index, action) in self.arrived]
        gather = self._gather(unit[0], action) if arrivals else ()
        ends = self.emitter.action(unit, (*gather, *parts), Origin(action.stage, action.microbatch, ""), arrivals)
        if early:
            self._reduce_early(unit, action.stage, parts, ends[len(gather) :])
        for index in unit:
            self._send(index, action)

    def _parts(self, index: int, action: Action, early: bool) -> tuple[Piece, ...]:
        key = (action.stage, action.kind, self.shape[index], early)
        if key not in self.templates:
            stage = self.stage(index, action.stage)
            if early:
                ends = [bucket.blocks[-1] for bucket in self._buckets(index, action.stage)]
                self.templates[key] = split(stage, self.granularity, ends)
            else:
                self.templates[key] = pieces(stage, action.kind, self.granularity)
        return self.templates[key]

    def _gather(self, index: int, action: Action) -> tuple[Piece, ...]:
        key = (index, action.stage, action.kind)
        if key not in self.gathers:
            step = gather_step(self.problem, self.plan, self.shape[index], self._boundary(action), "boundary")
            self.gathers[key] = (Piece(step),) if step else ()
        return self.gathers[key]

    def _boundary(self, action: Action) -> int:
        """Return the bytes that reach an action from the stage it waits for."""
        source = action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage
        return self.costs.boundary_bytes(self.plan, source)

    def _send(self, index: int, action: Action) -> None:
        """Send what an action made to the stage that waits for it."""
        forward = action.kind is ActionKind.FORWARD
        stage = action.stage + (1 if forward else -1)
        if not 0 <= stage < len(self.plan.stages) or self.plan.pipeline == 1:
            return
        following = Action(stage, action.kind, action.microbatch)
        key = (index, action.stage, action.kind)
        if key not in self.sends:
            rank, other = self.table.neighbour(index, 1 if forward else -1)
            shape = self.table.pair_shape(index, rank)
            what = "activations" if forward else "gradients"
            self.sends[key] = send_step(self.problem, self.plan, shape, self._boundary(following), what), other
        step, other = self.sends[key]
        out, into = _STREAMS[action.kind]
        tail = self.emitter.tail[index]
        origin = Origin(action.stage, action.microbatch, "")
        ends = ((index, out), (other, into))
        sent = self.emitter.communication(step, ends, (index, other), [tail] if tail is not None else [], origin)
        self.arrived[other, following] = sent

    def _buckets(self, index: int, stage: int) -> tuple[Bucket, ...]:
        return buckets(self.stage(index, stage), self.training.gradient_bytes)

    def _reduce_early(self, unit: tuple[int, ...], stage: int, parts: Sequence[Piece], ends: Sequence[int]) -> None:
        """Reduce each bucket of a stage when the blocks that fill it have run backward."""
        finished = {name: end for part, end in zip(parts, ends, strict=True) for name in part.completes}
        for index in unit:
            for number, bucket in enumerate(self._buckets(index, stage)):
                what = f"{bucket.blocks[-1]} .. {bucket.blocks[0]}"
                self._reduce(index, stage, number, finished[bucket.blocks[-1]], bucket.parameters, what)

    def _reduce_all(self) -> None:
        for index in range(len(self.table.members)):
            tail = self.emitter.tail[index]
            if tail is not None:
                self._reduce(index, -1, 0, tail, self._parameters(index), "all blocks")

    def _reduce(self, index: int, stage: int, number: int, ready: int, parameters: int, what: str) -> None:
        """Note that a class is ready for a reduction; emit it when all classes of its group are."""
        group = self.table.group_classes(index, DATA)
        members = self.pending.setdefault((group, stage, number), {})
        members[index] = ready
        if len(members) < len(group):
            return
        step = gradient_step(self.cluster, self.training, self.plan, self.data_shape[index], parameters, what)
        ends = [(member, StreamKind.DATA) for member in group]
        task = self.emitter.communication(step, ends, None, members.values(), Origin(stage, -1, ""))
        for member in group:
            self.reductions[member].append(task)

    def _finish(self) -> None:
        """Sum tied gradients, step the optimizer, and gather what ZeRO shares."""
        for first, second, elements in tied_parameters(self.costs, self.plan, self.table):
            self._sum_tied(first, second, elements)
        origin = Origin(-1, -1, "")
        optimized: dict[int, int] = {}
        for index in range(len(self.table.members)):
            step = self._optimizer(index)
            self.emitter.action((index,), (Piece(step),), origin, self.reductions[index])
            optimized[index] = len(self.emitter.tasks) - 1
        if self.plan.zero and self.plan.data > 1:
            self._gather_parameters(optimized)

    def _optimizer(self, index: int) -> Step:
        stages = self.emitter.rank_classes[index].stages
        tensors = sum(self.stage(index, stage).parameter_tensors for stage in stages)
        return optimizer_step(self.cluster, self.training, self.plan, self._parameters(index), tensors)

    def _gather_parameters(self, optimized: dict[int, int]) -> None:
        groups = {self.table.group_classes(index, DATA): index for index in optimized}
        for group, index in groups.items():
            step = parameter_step(self.cluster, self.training, self.data_shape[index], self._parameters(index))
            ends = [(member, StreamKind.DATA) for member in group]
            before = [optimized[member] for member in group]
            self.emitter.communication(step, ends, None, before, Origin(-1, -1, ""))

    def _sum_tied(self, first: int, second: int, elements: int) -> None:
        rank = self.table.members[second][0]
        shape = self.table.pair_shape(first, rank)
        step = tied_step(self.cluster, self.training, shape, elements)
        before = [task for index in (first, second) for task in self.reductions[index][-1:]]
        before += [tail for index in (first, second) if (tail := self.emitter.tail[index]) is not None]
        ends = [(first, StreamKind.DATA), (second, StreamKind.DATA)]
        task = self.emitter.communication(step, ends, None, before, Origin(-1, -1, ""))
        for index in (first, second):
            self.reductions[index].append(task)

    def _parameters(self, index: int) -> int:
        position = self.emitter.rank_classes[index].stages[0] % self.plan.pipeline
        return self.costs.rank_parameters(self.plan, position, self.shape[index])

    def _resident(self) -> tuple[MemoryChange, ...]:
        accelerator = self.cluster.accelerator
        changes: list[MemoryChange] = []
        for index in range(len(self.table.members)):
            changes += resident(accelerator, self.training, self.plan, self._parameters(index), index)
        return tuple(changes)


_STREAMS = {
    ActionKind.FORWARD: (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD),
    ActionKind.BACKWARD: (StreamKind.SEND_BACKWARD, StreamKind.RECEIVE_BACKWARD),
}
