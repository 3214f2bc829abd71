"""What every task of a step does: work and bytes of one slot on one class."""

from simulator.collective_kinds import Collective
from simulator.program import Category, Change, Flow, Piece, TaskKind, Work
from strategies.lowering.assemble import Content
from strategies.lowering.buffers import flat_gradients
from strategies.lowering.clipping import norm_ticks
from strategies.lowering.communicator import Communicator, Leg
from strategies.lowering.cuts import Cuts
from strategies.lowering.offload import HOST, STEPS, HostStep, host_bytes, host_ticks
from strategies.lowering.optimizer import optimizer_ticks, updated_parameters
from strategies.lowering.skeleton import Slot
from strategies.lowering.volumes import Volume, Volumes
from strategies.mesh import TENSOR


class Contents:
    """What the tasks of one plan do; slots that do the same share one work."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training
        self._work: dict[tuple[object, ...], Work] = {}

    def of(self, slot: Slot, instance: int) -> Content:
        """Return what the task of a slot does on a rank class or a group class."""
        position, key = slot.site.position, slot.key
        if slot.what in ("pass", "lead", "rest"):
            together = slot.site.kind == TENSOR
            rank_class = self.table.tables[TENSOR].classes[instance][0] if together else instance
            return Content(self._own(slot.what, key, rank_class))
        if slot.what == "optimizer":
            return Content(self._optimizer(position, instance))
        if slot.what == "squares":
            return Content(self._squares(position, instance))
        if slot.what == "host":
            return self._host(STEPS[key[0]], position, instance)
        if slot.what == "collective":
            return self._collective(slot.site.kind, key, instance)
        if slot.what == "send":
            stage, backward = key
            name = "gradients" if backward else "activations"
            communicator = self.machine.communicator(slot.site.kind, instance)
            batch = self.machine.batch(slot.site.kind, instance)
            kind, what = TaskKind.PIPELINE_COMMUNICATION, self.volumes.boundary(stage - backward, batch)
            return self._communication(communicator, kind, stage, 0, what, name)
        communicator = self.machine.communicator(slot.site.kind, instance)
        stage, leg, what, name = self.volumes.at_the_end(slot)
        return self._communication(communicator, TaskKind.DATA_COMMUNICATION, stage, leg, what, name)

    def _own(self, what: str, key: tuple[int, ...], rank_class: int) -> Work:
        stage, variant, index = key
        part = self.cuts.parts(stage, variant, rank_class)[index]
        if what == "pass":
            return part.work
        ticks = part.lead if what == "lead" else part.rest
        name = part.work.pieces[0].operators
        return self._plain((what, key, self.machine.rank(rank_class).key), TaskKind.LAUNCH, stage, ticks, name)

    def _optimizer(self, position: int, rank_class: int) -> Work:
        rank = self.machine.rank(rank_class)
        key = ("optimizer", position, rank.key)
        if key in self._work:
            return self._work[key]
        ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, self.volumes.held(position))
        flat = flat_gradients(self.training, self.plan, self.volumes.held(position).elements)
        if flat:
            changes = (Change(Category.BUFFERS, flat),)  # the copy that was summed is read back
            piece = Piece(TaskKind.OPTIMIZER, "optimizer", 0, ticks, acquired=changes, released=changes)
            self._work[key] = Work(TaskKind.OPTIMIZER, -1, ticks, (piece,))
            return self._work[key]
        return self._plain(key, TaskKind.OPTIMIZER, -1, ticks, "optimizer")

    def _squares(self, position: int, rank_class: int) -> Work:
        rank = self.machine.rank(rank_class)
        ticks = norm_ticks(rank.accelerator, self.training, self.plan, self.volumes.held(position))
        return self._plain(("squares", position, rank.key), TaskKind.OPTIMIZER, -1, ticks, "norm of gradients")

    def _host(self, step: HostStep, position: int, group: int) -> Content:
        """Return one chunk of one stage of the host's update."""
        held = self.volumes.held(position)
        size = host_bytes(self.training, self.plan, held, step.kind)
        (leg,) = self.machine.communicator(step.kind, group).legs(Collective.SEND, size)
        ticks = leg.latency
        if step.kind == HOST and not leg.flow.usage:
            ticks = host_ticks(updated_parameters(self.plan, held.elements, held.experts))
        work = self._plain((step.kind, position, ticks), step.task, -1, ticks, step.name)
        return Content(work, leg.flow if leg.flow.usage else None)

    def _collective(self, kind: str, key: tuple[int, ...], group: int) -> Content:
        """Return one phase of a collective inside a pass; memory changes with the first and the last."""
        stage, variant, index, leg = key
        communicator = self.machine.communicator(kind, group)
        part = self.cuts.parts(stage, variant, self.table.tables[kind].classes[group][0])[index]
        step, piece = part.collective, part.work.pieces[0]
        assert step is not None and step.collective is not None
        found = self._communication(
            communicator, piece.kind, stage, leg, (step.collective, step.size), piece.operators, named=True
        )
        legs = max(len(communicator.legs(step.collective, step.size)), 1)
        acquired, released = piece.acquired if leg == 0 else (), piece.released if leg == legs - 1 else ()
        if not (acquired or released):
            return found
        name = ("memory", *key, found.work.duration, self.machine.batch(kind, group))
        if name not in self._work:
            changed = found.work.pieces[0]._replace(acquired=acquired, released=released)
            self._work[name] = found.work._replace(pieces=(changed,))
        return Content(self._work[name], found.flow)

    def _communication(
        self,
        communicator: Communicator,
        kind: TaskKind,
        stage: int,
        leg: int,
        what: Volume,
        name: str,
        *,
        named: bool = False,
    ) -> Content:
        legs = communicator.legs(*what)
        now = legs[leg] if leg < len(legs) else Leg(0, 0, Flow(()))
        label = name if named else f"{what[0]} {name}"
        work = self._plain((kind, stage, now.latency, label), kind, stage, now.latency, label)
        return Content(work, now.flow if now.flow.usage else None)

    def _plain(self, key: tuple[object, ...], kind: TaskKind, stage: int, ticks: int, name: str) -> Work:
        """Return work of one piece, the same object for the same key."""
        if key not in self._work:
            self._work[key] = Work(kind, stage, ticks, (Piece(kind, name, 0, ticks),))
        return self._work[key]
