"""Contents: the work and bytes of every task, one template on one class.

Collectives that are no tasks of their own put their bytes on links beside the tasks.

**Copies between ranks and their hosts.** Activations of a block leave when its forward has ended and return before its
backward, through two buffers on the device, each as large as the most that one block keeps [1]_. A forward fills a
buffer, which is free again when its copy has ended; a backward reads a buffer, which is free again when the backward
has ended; the copy for it starts when a buffer is free. So a block's forward waits for the copy of the block before
the previous one, and a block's activations arrive while the previous block computes. Where a microbatch's backward
follows its forward at once, its last two blocks are still in the buffers and are not copied: Megatron-LM too offloads
fewer layers than there are [2]_.

Parameters of a block arrive before its forward and again before its backward, its shard before the gather where ZeRO 3
shares them. Its gradients leave when they are made, or reduced, all at the moments that
`meshwise.strategies.lowering.tasks.fully_sharded` says [3]_ [4]_. The host adds gradients of a later microbatch to
those it has: it reads two values and writes one.

References
----------
.. [1] TransformerEngine, ``pytorch/cpu_offload.py``, ``AsyncDoubleBufferGroupOffloadHandler`` (two buffers in turns, a
   stream for either direction, one group ahead).
.. [2] Megatron-LM, ``cpu_offloading_num_layers``.
.. [3] Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1 (activations, parameters and gradients in host memory).
.. [4] PyTorch 2, ``CPUOffloadPolicy`` (shards are copied before the gather, reduced gradients after it).
"""

from collections import Counter
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import Category, Change, Flow, Piece, TaskKind, Work
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.memory import flat_gradients
from meshwise.strategies.lowering.costs.offload import (
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    SQUARES_ON_HOST,
    SUM,
    chunk_buffer,
    host_elements,
    host_ticks,
    update_bytes,
)
from meshwise.strategies.lowering.costs.optimizer import begin_in_step, norm_ticks, optimizer_ticks, updated_parameters
from meshwise.strategies.lowering.costs.stage import Run
from meshwise.strategies.lowering.rank_classes.machine import INSIDE, Communicator, Leg, Rank
from meshwise.strategies.lowering.rank_classes.placement import HOST_KINDS
from meshwise.strategies.lowering.tasks.cuts import Cuts, Granularity, Passes
from meshwise.strategies.lowering.tasks.data_parallel import Bucket
from meshwise.strategies.lowering.tasks.program import Content
from meshwise.strategies.lowering.tasks.residents import updates_parameters
from meshwise.strategies.lowering.tasks.shape import Volume, Volumes
from meshwise.strategies.lowering.tasks.skeleton import Slot
from meshwise.strategies.lowering.tasks.variants import BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD, kind_of, variant_of
from meshwise.strategies.plan.mesh import EXPERT_DATA, REPLICA, TENSOR
from meshwise.strategies.plan.offloading import CHUNKS, HOST, STEPS, STEPS_ON_DEVICE, STEPS_ON_HOST, TO_HOST
from meshwise.strategies.plan.plan import Plan


class HostCopy(NamedTuple):
    """A copy's bytes and name, and the changes of host memory at its start and at its end."""

    size: float
    name: str
    stage: int
    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()


def host_copy(cuts: Cuts, slot: Slot, rank: Rank) -> HostCopy:
    """Return what the task of a template copies for a rank, or what its host reads and writes."""
    training = cuts.training
    if slot.what == SQUARES_ON_HOST:
        elements = cuts.on_host[slot.site.position].parameters
        return HostCopy(elements * training.gradient_bytes, "norm of gradients on host", -1)
    stage, number = slot.key
    names = cuts.plan.stages[stage].blocks
    if slot.what == ACTIVATIONS:
        away = cuts.costs.stage(cuts.plan, stage, rank).blocks[number].away
        held = (Change(Category.ACTIVATIONS, away, host=True),)
        if slot.site.kind == TO_HOST:
            return HostCopy(away, f"activations of {names[number]} to host", stage, acquired=held)
        return HostCopy(away, f"activations of {names[number]} from host", stage, released=held)
    if slot.what == PARAMETERS:
        block = cuts.plan_costs.stages[stage].blocks[number]
        shard = updated_parameters(cuts.plan, block.parameters, block.experts)
        return HostCopy(shard * training.shard_bytes, f"parameters of {names[number]} from host", stage)
    assert slot.what in (GRADIENTS, SUM)
    bucket = cuts.buckets(stage)[number]
    size = _shard(cuts, bucket) * training.gradient_bytes
    if slot.what == SUM:
        # The host reads two summands and writes their sum.
        return HostCopy(3 * size, f"gradients of {bucket.last} added on host", stage)
    return HostCopy(size, f"gradients of {bucket.last} to host", stage)


def _shard(cuts: Cuts, bucket: Bucket) -> int:
    """Return the elements of a rank's share of the gradients of a bucket."""
    return updated_parameters(cuts.plan, bucket.parameters, bucket.parameters if bucket.kind == EXPERT_DATA else 0)


class Contents:
    """The contents of the tasks of one plan; templates that do the same share one work."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training
        self._work: dict[tuple[object, ...], Work] = {}
        self._passes: dict[tuple[str, int, int, int], tuple[Content, ...]] = {}

    def of(self, slot: Slot, instance: int) -> Content:
        """Return the content of a template's task on a rank class or a group class."""
        position, key = slot.site.position, slot.key
        if slot.what in ("pass", "lead", "rest"):
            together = slot.site.kind == TENSOR
            rank_class = self.table.tables[TENSOR].classes[instance][0] if together else instance
            stage, variant, index = key
            return self._own(slot.what, stage, variant, rank_class)[index]
        if slot.what == "optimizer":
            return Content(self._optimizer(position, instance))
        if slot.what == "squares":
            return Content(self._squares(position, instance))
        if slot.what == "update":
            return self._update(key[0], key[1], position, instance)
        if slot.site.kind in HOST_KINDS:
            return self._host_copy(slot, instance)
        if slot.what == "collective":
            return self._collective(slot.site.kind, key, instance)
        if slot.what == "send":
            stage, backward = key
            name = "gradients" if backward else "activations"
            communicator = self.machine.communicator(slot.site.kind, instance)
            batch = self.machine.batch(slot.site.kind, instance)
            kind, what = TaskKind.PIPELINE_COMMUNICATION, self.volumes.boundary(stage - backward, batch)
            return self._communication(communicator, kind, stage, 0, what, f"{what[0]} {name}")
        communicator = self.machine.communicator(slot.site.kind, instance)
        stage, leg, what, name = self.volumes.at_the_end(slot)
        besides = self._units(slot, instance, communicator, what[0]) if leg == 0 else 0
        label = f"{what[0]} {name}"
        return self._communication(communicator, TaskKind.DATA_COMMUNICATION, stage, leg, what, label, besides)

    def _units(self, slot: Slot, group: int, communicator: Communicator, collective: Collective) -> int:
        """Return the ticks that the framework takes besides for the units that a communication gathers or reduces.

        Where it takes any, each unit is a message of its own.
        """
        if not self.cuts.sharing.gradients or slot.site.kind == REPLICA:
            return 0
        if slot.what == "unshard":
            count = 1
        elif slot.what == "reduce":
            stage, bucket, _ = slot.key
            count = len(self.cuts.buckets(stage)[bucket].blocks)
        elif slot.what == "gather":
            count = sum(len(self.plan.stages[stage].blocks) for stage in self.plan.stages_at(slot.site.position))
        else:
            return 0
        rank = self.machine.rank(self.table.tables[slot.site.kind].classes[group][0])
        launch = rank.accelerator.unit_launch
        # Every message but the first, which the communication counts itself, costs its latency too.
        return to_ticks(count * launch) + (count - 1) * communicator.ticks(collective, 1) if launch else 0

    def _own(self, what: str, stage: int, variant: int, rank_class: int) -> tuple[Content, ...]:
        """Return the contents of the parts of a pass, or of the launches before or during each of them."""
        key = (what, stage, variant, rank_class)
        if key not in self._passes:
            parts = self.cuts.parts(stage, variant, rank_class)
            if what == "pass":
                self._passes[key] = tuple(Content(part.work) for part in parts)
            else:
                launched = ((part.lead if what == "lead" else part.rest, part.name) for part in parts)
                self._passes[key] = tuple(self._launch(stage, *each) for each in launched)
        return self._passes[key]

    def _launch(self, stage: int, ticks: int, name: str) -> Content:
        piece = Piece(TaskKind.LAUNCH, name, 0, ticks)
        return Content(self._work_of((TaskKind.LAUNCH, stage, ticks, name), stage, piece))

    def _optimizer(self, position: int, rank_class: int) -> Work:
        """Return the work of the optimizer's step on the device."""
        rank = self.machine.rank(rank_class)
        held, rest = self.volumes.held(position), 1 - self.cuts.on_host[position].optimizer
        ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, held, rest)
        flat, serves = self._flat(position), updates_parameters(self.machine, self.plan, rank_class)
        own = begin_in_step(self.training, self.plan) and not serves  # the server's are the sums
        gone = (Change(Category.GRADIENTS, held.elements * self.training.gradient_bytes),) if own else ()
        key = ("optimizer", position, rank.key, serves)
        piece = Piece(TaskKind.OPTIMIZER, "optimizer", 0, ticks, acquired=flat, released=(*flat, *gone))
        return self._work_of(key, -1, piece)

    def _flat(self, position: int) -> tuple[Change, ...]:
        """Return the flat gradient buffer that was summed and that the update reads, as a change of memory."""
        flat = flat_gradients(self.training, self.plan, self.volumes.held(position).elements)
        return (Change(Category.BUFFERS, flat),) if flat else ()

    def _squares(self, position: int, rank_class: int) -> Work:
        """Return the work of reading gradients for their norm."""
        rank = self.machine.rank(rank_class)
        held, on_host = self.volumes.held(position), self.cuts.on_host[position]
        ticks = norm_ticks(rank.accelerator, self.training, self.plan, held, on_host.parameters)
        piece = Piece(TaskKind.OPTIMIZER, "norm of gradients", 0, ticks)
        return self._work_of(("squares", position, rank.key), -1, piece)

    def _update(self, number: int, end: int, position: int, instance: int) -> Content:
        """Return one chunk of one stage of an update whose states are on the host."""
        step, held, on_host = STEPS[number], self.volumes.held(position), self.cuts.on_host[position]
        changes = self._update_changes(number, end, position)
        if not step.kind:
            rank = self.machine.rank(instance)
            part = on_host.optimizer / CHUNKS
            ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, held, part)
            piece = Piece(step.task, step.name, 0, ticks, None, *changes)
            return Content(self._work_of(("update", position, rank.key), -1, piece))
        size = update_bytes(self.training, self.plan, held, on_host, number)
        (leg,) = self.machine.communicator(step.kind, instance).legs(Collective.SEND, size)
        ticks = leg.latency
        if step.kind == HOST and not leg.flow.usage:
            ticks = host_ticks(host_elements(self.plan, held, on_host))
        if any(changes) and not leg.flow.usage:
            ticks = max(ticks, 1)  # also where copies take no time there is a moment at which it holds them
        moved = size if step.task is TaskKind.HOST_COPY else 0.0
        piece = Piece(step.task, step.name, 0, ticks, None, *changes, bytes=moved)
        work = self._work_of((number, end, position, ticks), -1, piece)
        return Content(work, leg.flow if leg.flow.usage else None)

    def _update_changes(self, number: int, end: int, position: int) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Return what the device takes and gives back with a chunk of one stage of an update.

        It holds two chunks of states from the start of the first chunk, where ``end`` is -1, to the end of the last
        one, where it is 1; and the flat gradient buffer while it is read, where no other update holds it.
        """
        held, on_host = self.volumes.held(position), self.cuts.on_host[position]
        first, update, last = STEPS_ON_DEVICE
        if number in (STEPS_ON_HOST[0], update) and on_host.optimizer == 1:
            return (self._flat(position),) * 2
        buffers = (Change(Category.OPTIMIZER, 2 * chunk_buffer(self.training, self.plan, held, on_host)),)
        return buffers if (number, end) == (first, -1) else (), buffers if (number, end) == (last, 1) else ()

    def _host_copy(self, slot: Slot, instance: int) -> Content:
        """Return a copy between a rank and its host while passes run."""
        rank = self.machine.rank(self.table.tables[slot.site.kind].classes[instance][0])
        copy = host_copy(self.cuts, slot, rank)
        legs = self.machine.communicator(slot.site.kind, instance).legs(Collective.SEND, copy.size)
        (leg,) = legs or (Leg(0, 0, Flow(())),)
        key = (slot.site, slot.what, *slot.key, leg.latency, rank.batch)
        piece = Piece(TaskKind.HOST_COPY, copy.name, 0, leg.latency, None, copy.acquired, copy.released, copy.size)
        work = self._work_of(key, copy.stage, piece)
        return Content(work, leg.flow if leg.flow.usage else None)

    def _collective(self, kind: str, key: tuple[int, ...], group: int) -> Content:
        """Return one phase of a collective inside a pass; memory changes with the first and the last phase."""
        stage, variant, index, leg = key
        communicator = self.machine.communicator(kind, group)
        part = self.cuts.parts(stage, variant, self.table.tables[kind].classes[group][0])[index]
        step, piece = part.collective, part.work.pieces[0]
        assert step is not None and step.collective is not None
        found = self._communication(communicator, piece.kind, stage, leg, (step.collective, step.size), piece.operators)
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
        label: str,
        besides: int = 0,
    ) -> Content:
        """Return one phase of a communication; the first takes ticks ``besides`` and carries the bytes."""
        legs = communicator.legs(*what)
        now = legs[leg] if leg < len(legs) else Leg(0, 0, Flow(()))
        moved, ticks = what[1] if leg == 0 else 0.0, now.latency + besides
        piece = Piece(kind, label, 0, ticks, bytes=moved)
        work = self._work_of((kind, stage, ticks, label, moved), stage, piece)
        return Content(work, now.flow if now.flow.usage else None)

    def _work_of(self, key: tuple[object, ...], stage: int, piece: Piece) -> Work:
        """Return work of one piece, the same object for the same key."""
        if key not in self._work:
            self._work[key] = Work(piece.kind, stage, piece.end, (piece,))
        return self._work[key]


def traffic(cuts: Cuts, plan: Plan) -> tuple[float, ...]:
    """Return the bytes that collectives inside parts of ranks put on every link class in a step of ``plan``."""
    machine = cuts.machine
    total = [0.0] * len(machine.table.first_link)
    # Then every collective is a task, and its flow counts.
    if cuts.granularity is Granularity.OPERATOR:
        return tuple(total)
    hidden: dict[tuple[object, ...], Counter[Run]] = {}
    for kind in (kind for kind in INSIDE if kind in machine.table.tables):
        for group, members in enumerate(machine.table.tables[kind].classes):
            position, rank = machine.table.positions[members[0]], machine.rank(members[0])
            if cuts.passes[position] is Passes.APART:
                continue
            key = (position, rank.key)
            if key not in hidden:
                hidden[key] = _hidden(cuts, plan, position, rank)
            communicator = machine.communicator(kind, group)
            for (axis, collective, size), count in hidden[key].items():
                for leg in communicator.legs(collective, size) if axis == kind else ():
                    for link, moved in leg.flow.usage:
                        total[link] += moved * count
    return tuple(total)


def _hidden(cuts: Cuts, plan: Plan, position: int, rank: Rank) -> Counter[Run]:
    """Return how often a step runs each collective inside parts of a rank."""
    found = Counter[Run]()
    for stage in plan.stages_at(position):
        collectives = cuts.costs.stage(plan, stage, rank).collectives
        for variant, count in passes_of(plan, stage):
            if cuts.cut(stage, variant).every:
                continue
            for run, times in collectives[kind_of(variant)].items():
                found[run] += times * count
            for step in cuts.before(stage, variant, rank):
                if step.collective is not None:
                    found[step.axis, step.collective, step.size] += count
    return found


def passes_of(plan: Plan, stage: int) -> tuple[tuple[int, int], ...]:
    """Return how often a step runs each variant of a stage's passes."""
    every = plan.num_microbatches
    if not plan.splits_backward:
        return (FORWARD_PASS, every), (BACKWARD_PASS, every - 1), (LAST_BACKWARD, 1)
    order = plan.actions.orders[plan.positions[stage]]
    last = plan.actions.last_gradient(stage)
    return tuple(Counter(variant_of(a, a == last) for a in order if a.stage == stage).items())
