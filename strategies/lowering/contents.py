"""Contents: the work and bytes of every task, one template on one class.

Collectives that are no tasks of their own put their bytes on links beside the tasks.
"""

from collections import Counter
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import Category, Change, Flow, Piece, TaskKind, Work
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.offload import chunk_buffer, host_elements, update_bytes
from meshwise.strategies.lowering.costs.optimizer import (
    allocates_gradients,
    count_updated_parameters,
    flat_gradient_bytes,
    step_temporary_bytes,
)
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.pass_modes import PassMode
from meshwise.strategies.lowering.program import TaskContent
from meshwise.strategies.lowering.rank_classes.machine import Communicator, RankProfile, TimedPhase
from meshwise.strategies.lowering.residents import updates_parameters
from meshwise.strategies.lowering.stage_costs import PassCollective
from meshwise.strategies.lowering.tasks.data_parallel import Bucket
from meshwise.strategies.lowering.tasks.skeleton import Role, TaskTemplate
from meshwise.strategies.lowering.tasks.variants import BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD, kind_of, variant_of
from meshwise.strategies.lowering.timing import host_ticks, norm_ticks, optimizer_ticks
from meshwise.strategies.lowering.volumes import Volume, Volumes
from meshwise.strategies.plan.mesh import EXPERT_DATA, PASS_AXES, REPLICA, TENSOR
from meshwise.strategies.plan.offloading import (
    HOST,
    HOST_KINDS,
    STEPS,
    STEPS_ON_DEVICE,
    STEPS_ON_HOST,
    TO_HOST,
    UPDATE_CHUNKS,
)
from meshwise.strategies.plan.plan import Plan


class HostCopy(NamedTuple):
    """A copy's bytes and name, and the changes of host memory at its start and at its end."""

    size: float
    name: str
    stage: int
    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()


def describe_host_copy(cuts: Cuts, template: TaskTemplate, rank: RankProfile) -> HostCopy:
    """Return what the task of a template copies for a rank, or what its host reads and writes."""
    training = cuts.training
    if template.role == Role.SQUARES_ON_HOST:
        elements = cuts.host_shares[template.site.position].parameters
        return HostCopy(elements * training.gradient_bytes, "norm of gradients on host", -1)
    stage, number = template.key
    names = cuts.plan.stages[stage].blocks
    if template.role == Role.ACTIVATIONS:
        offloaded_bytes = cuts.costs.stage_cost(cuts.plan, stage, rank).blocks[number].offloaded_bytes
        host_changes = (Change(Category.ACTIVATIONS, offloaded_bytes, host=True),)
        if template.site.kind == TO_HOST:
            return HostCopy(offloaded_bytes, f"activations of {names[number]} to host", stage, acquired=host_changes)
        return HostCopy(offloaded_bytes, f"activations of {names[number]} from host", stage, released=host_changes)
    if template.role == Role.PARAMETERS:
        block = cuts.plan_costs.stages[stage].blocks[number]
        shard = count_updated_parameters(cuts.plan, block.parameters, block.expert_parameters)
        return HostCopy(shard * training.shard_bytes, f"parameters of {names[number]} from host", stage)
    assert template.role in (Role.GRADIENTS, Role.SUM_ON_HOST)
    bucket = cuts.buckets(stage)[number]
    size = _count_shard_elements(cuts, bucket) * training.gradient_bytes
    if template.role == Role.SUM_ON_HOST:
        # The host reads two summands and writes their sum.
        return HostCopy(3 * size, f"gradients of {bucket.last_block} added on host", stage)
    return HostCopy(size, f"gradients of {bucket.last_block} to host", stage)


def _count_shard_elements(cuts: Cuts, bucket: Bucket) -> int:
    """Return the elements of a rank's share of the gradients of a bucket."""
    return count_updated_parameters(
        cuts.plan, bucket.parameters, bucket.parameters if bucket.kind == EXPERT_DATA else 0
    )


class Contents:
    """The contents of the tasks of one plan; templates that do the same share one work."""

    def __init__(self, cuts: Cuts, volumes: Volumes) -> None:
        self.cuts, self.volumes, self.plan = cuts, volumes, cuts.plan
        self.machine, self.table, self.training = cuts.machine, cuts.machine.table, cuts.training

    def describe_task(self, template: TaskTemplate, instance: int) -> TaskContent:
        """Return the content of a template's task on a rank class or a group class."""
        position, key = template.site.position, template.key
        if template.role in (Role.PASS, Role.LEAD, Role.REST):
            runs_as_group = template.site.kind == TENSOR
            rank_class = self.table.tables[TENSOR].classes[instance][0] if runs_as_group else instance
            stage, variant, index = key
            return self._list_pass_contents(template.role, stage, variant, rank_class)[index]
        if template.role == Role.OPTIMIZER:
            return TaskContent(self._build_optimizer(position, instance))
        if template.role == Role.SQUARES:
            return TaskContent(self._build_squares(position, instance))
        if template.role == Role.UPDATE:
            return self._build_update(key[0], key[1], position, instance)
        if template.role == Role.COLLECTIVE:
            return self._build_collective(template.site.kind, key, instance)
        if template.role == Role.ROWS:
            return self._build_table_move(template, instance)
        if template.site.kind in HOST_KINDS:
            return self._build_host_copy(template, instance)
        if template.role == Role.SEND:
            stage, backward = key
            name = "gradients" if backward else "activations"
            communicator = self.machine.communicator(template.site.kind, instance)
            batch = self.machine.batch(template.site.kind, instance)
            kind, volume = TaskKind.PIPELINE_COMMUNICATION, self.volumes.boundary_send(stage - backward, batch)
            return self._build_communication(communicator, kind, stage, 0, volume, f"{volume[0]} {name}")
        communicator = self.machine.communicator(template.site.kind, instance)
        stage, phase, volume, name = self.volumes.describe_communication(template)
        extra_ticks = self._count_unit_ticks(template, instance, communicator, volume[0]) if phase == 0 else 0
        label = f"{volume[0]} {name}"
        return self._build_communication(
            communicator, TaskKind.DATA_COMMUNICATION, stage, phase, volume, label, extra_ticks
        )

    def _count_unit_ticks(
        self, template: TaskTemplate, group: int, communicator: Communicator, collective: Collective
    ) -> int:
        """Return the ticks that the framework takes besides for the units that a communication gathers or reduces.

        Where it takes any, each unit is a message of its own.
        """
        if not self.cuts.sharing.gradients or template.site.kind == REPLICA:
            return 0
        if template.role == Role.UNSHARD:
            count = 1
        elif template.role == Role.REDUCE:
            stage, bucket, _ = template.key
            count = len(self.cuts.buckets(stage)[bucket].blocks)
        elif template.role == Role.GATHER:
            count = sum(len(self.plan.stages[stage].blocks) for stage in self.plan.stages_at(template.site.position))
        else:
            return 0
        rank = self.machine.rank(self.table.tables[template.site.kind].classes[group][0])
        launch = rank.accelerator.unit_launch
        # Every message but the first, which the communication counts itself, costs its latency too.
        return to_ticks(count * launch) + (count - 1) * communicator.ticks(collective, 1) if launch else 0

    @memoise
    def _list_pass_contents(self, role: str, stage: int, variant: int, rank_class: int) -> tuple[TaskContent, ...]:
        """Return the contents of the parts of a pass, or of the launches before or during each of them."""
        parts = self.cuts.list_parts(stage, variant, rank_class)
        if role == Role.PASS:
            return tuple(TaskContent(part.work) for part in parts)
        launches = ((part.launch_lead if role == Role.LEAD else part.launch_tail, part.name) for part in parts)
        return tuple(self._build_launch(stage, *launch) for launch in launches)

    def _build_launch(self, stage: int, ticks: int, name: str) -> TaskContent:
        piece = Piece(TaskKind.LAUNCH, name, 0, ticks)
        return TaskContent(self._build_work(stage, piece))

    def _build_optimizer(self, position: int, rank_class: int) -> Work:
        """Return the work of the optimizer's step on the device."""
        rank = self.machine.rank(rank_class)
        parameters, device_fraction = (
            self.volumes.position_parameters(position),
            1 - self.cuts.host_shares[position].optimizer,
        )
        ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, parameters, device_fraction)
        flat_changes, updates_states = (
            self._list_flat_changes(position),
            updates_parameters(self.machine, self.plan, rank_class),
        )
        drops_gradients = (
            allocates_gradients(self.training, self.plan) and not updates_states
        )  # the server's are the sums
        freed_changes = (
            (Change(Category.GRADIENTS, parameters.elements * self.training.gradient_bytes),) if drops_gradients else ()
        )
        temporary_bytes = 0
        if not (self.plan.offload or rank.accelerator.computes_collectives) and updates_states:
            temporary_bytes = step_temporary_bytes(self.training, self.plan, parameters)
        temporary_changes = (Change(Category.BUFFERS, temporary_bytes),) if temporary_bytes else ()
        piece = Piece(
            TaskKind.OPTIMIZER,
            "optimizer",
            0,
            ticks,
            acquisitions=(*flat_changes, *temporary_changes),
            releases=(*flat_changes, *temporary_changes, *freed_changes),
        )
        return self._build_work(-1, piece)

    def _list_flat_changes(self, position: int) -> tuple[Change, ...]:
        """Return the flat gradient buffer that was summed and that the update reads, as a change of memory."""
        flat_bytes = flat_gradient_bytes(self.training, self.plan, self.volumes.position_parameters(position).elements)
        return (Change(Category.BUFFERS, flat_bytes),) if flat_bytes else ()

    def _build_squares(self, position: int, rank_class: int) -> Work:
        """Return the work of reading gradients for their norm."""
        rank = self.machine.rank(rank_class)
        parameters, host_share = self.volumes.position_parameters(position), self.cuts.host_shares[position]
        ticks = norm_ticks(rank.accelerator, self.training, self.plan, parameters, host_share.parameters)
        piece = Piece(TaskKind.OPTIMIZER, "norm of gradients", 0, ticks)
        return self._build_work(-1, piece)

    def _build_update(self, number: int, end: int, position: int, instance: int) -> TaskContent:
        """Return one chunk of one stage of an update whose states are on the host."""
        update_step, parameters, host_share = (
            STEPS[number],
            self.volumes.position_parameters(position),
            self.cuts.host_shares[position],
        )
        changes = self._list_update_changes(number, end, position)
        if not update_step.kind:
            rank = self.machine.rank(instance)
            fraction = host_share.optimizer / UPDATE_CHUNKS
            ticks = optimizer_ticks(rank.accelerator, self.training, self.plan, parameters, fraction)
            piece = Piece(update_step.task, update_step.name, 0, ticks, None, *changes)
            return TaskContent(self._build_work(-1, piece))
        size = update_bytes(self.training, self.plan, parameters, host_share, number)
        (phase,) = self.machine.communicator(update_step.kind, instance).list_phases(Collective.SEND, size)
        ticks = phase.latency
        if update_step.kind == HOST and not phase.flow.usage:
            ticks = host_ticks(host_elements(self.plan, parameters, host_share))
        if any(changes) and not phase.flow.usage:
            ticks = max(ticks, 1)  # also where copies take no time there is a moment at which it holds them
        moved_bytes = size if update_step.task is TaskKind.HOST_COPY else 0.0
        piece = Piece(update_step.task, update_step.name, 0, ticks, None, *changes, bytes=moved_bytes)
        work = self._build_work(-1, piece)
        return TaskContent(work, phase.flow if phase.flow.usage else None)

    def _list_update_changes(
        self, number: int, end: int, position: int
    ) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Return what the device takes and gives back with a chunk of one stage of an update.

        It holds two chunks of states from the start of the first chunk, where ``end`` is -1, to the end of the last
        one, where it is 1; and the flat gradient buffer while it is read, where no other update holds it.
        """
        parameters, host_share = self.volumes.position_parameters(position), self.cuts.host_shares[position]
        first_step, update_step, last_step = STEPS_ON_DEVICE
        if number in (STEPS_ON_HOST[0], update_step) and host_share.optimizer == 1:
            return (self._list_flat_changes(position),) * 2
        buffers = (Change(Category.OPTIMIZER, 2 * chunk_buffer(self.training, self.plan, parameters, host_share)),)
        return buffers if (number, end) == (first_step, -1) else (), buffers if (number, end) == (last_step, 1) else ()

    def _build_host_copy(self, template: TaskTemplate, instance: int) -> TaskContent:
        """Return a copy between a rank and its host while passes run."""
        rank = self.machine.rank(self.table.tables[template.site.kind].classes[instance][0])
        copy = describe_host_copy(self.cuts, template, rank)
        phases = self.machine.communicator(template.site.kind, instance).list_phases(Collective.SEND, copy.size)
        (phase,) = phases or (TimedPhase(0, 0, Flow(())),)
        piece = Piece(TaskKind.HOST_COPY, copy.name, 0, phase.latency, None, copy.acquired, copy.released, copy.size)
        work = self._build_work(copy.stage, piece)
        return TaskContent(work, phase.flow if phase.flow.usage else None)

    def _build_collective(self, kind: str, key: tuple[int, ...], group: int) -> TaskContent:
        """Return one phase of a collective inside a pass; memory changes with the first and the last phase."""
        stage, variant, index, phase = key
        communicator = self.machine.communicator(kind, group)
        part = self.cuts.list_parts(stage, variant, self.table.tables[kind].classes[group][0])[index]
        segment, piece = part.collective, part.work.pieces[0]
        assert segment is not None and segment.collective is not None
        content = self._build_communication(
            communicator, piece.kind, stage, phase, (segment.collective, segment.size), piece.operators
        )
        num_phases = max(len(communicator.list_phases(segment.collective, segment.size)), 1)
        acquired, released = piece.acquisitions if phase == 0 else (), piece.releases if phase == num_phases - 1 else ()
        if not (acquired or released):
            return content
        changed_piece = content.work.pieces[0]._replace(acquisitions=acquired, releases=released)
        return TaskContent(self._build_work(stage, changed_piece), content.flow)

    def _build_table_move(self, template: TaskTemplate, instance: int) -> TaskContent:
        """Return one phase of what moves of tables beside a step."""
        number, phase = template.key
        segment, communicator = self.cuts.table_moves[number], self.machine.communicator(template.site.kind, instance)
        assert segment.collective is not None
        volume = segment.collective, segment.size
        return self._build_communication(communicator, segment.kind, -1, phase, volume, segment.label)

    def _build_communication(
        self,
        communicator: Communicator,
        kind: TaskKind,
        stage: int,
        phase: int,
        volume: Volume,
        label: str,
        extra_ticks: int = 0,
    ) -> TaskContent:
        """Return one phase of a communication; the first takes ticks ``extra_ticks`` and carries the bytes."""
        phases = communicator.list_phases(*volume)
        timed_phase = phases[phase] if phase < len(phases) else TimedPhase(0, 0, Flow(()))
        moved_bytes, ticks = volume[1] if phase == 0 else 0.0, timed_phase.latency + extra_ticks
        piece = Piece(kind, label, 0, ticks, bytes=moved_bytes)
        work = self._build_work(stage, piece)
        return TaskContent(work, timed_phase.flow if timed_phase.flow.usage else None)

    @memoise
    def _build_work(self, stage: int, piece: Piece) -> Work:
        """Return work of one piece, the same object for equal pieces."""
        return Work(piece.kind, stage, piece.end, (piece,))


def count_traffic(cuts: Cuts, plan: Plan) -> tuple[float, ...]:
    """Return the bytes that collectives inside parts of ranks put on every link class in a step of ``plan``."""
    machine = cuts.machine
    total = [0.0] * len(machine.table.link_representatives)
    # Then every collective is a task, and its flow counts.
    if cuts.granularity is Granularity.OPERATOR:
        return tuple(total)
    hidden_counts: dict[tuple[int, RankProfile], Counter[PassCollective]] = {}
    for kind in (kind for kind in PASS_AXES if kind in machine.table.tables):
        for group, members in enumerate(machine.table.tables[kind].classes):
            position, rank = machine.table.positions[members[0]], machine.rank(members[0])
            if cuts.pass_modes[position] is PassMode.SEPARATE:
                continue
            if (position, rank) not in hidden_counts:
                hidden_counts[position, rank] = _count_hidden(cuts, plan, position, rank)
            communicator = machine.communicator(kind, group)
            for (axis, collective, size), count in hidden_counts[position, rank].items():
                for phase in communicator.list_phases(collective, size) if axis == kind else ():
                    for link, link_bytes in phase.flow.usage:
                        total[link] += link_bytes * count
    return tuple(total)


def _count_hidden(cuts: Cuts, plan: Plan, position: int, rank: RankProfile) -> Counter[PassCollective]:
    """Return how often a step runs each collective inside parts of a rank."""
    counts = Counter[PassCollective]()
    for stage in plan.stages_at(position):
        collectives = cuts.costs.stage_cost(plan, stage, rank).collectives
        for variant, num_passes in count_passes(plan, stage):
            if cuts.find_cut(stage, variant).after_every:
                continue
            for pass_collective, repeats in collectives[kind_of(variant)].items():
                counts[pass_collective] += repeats * num_passes
            for segment in cuts.list_first_segments(stage, variant, rank):
                if segment.collective is not None:
                    counts[segment.axis, segment.collective, segment.size] += num_passes
    return counts


def count_passes(plan: Plan, stage: int) -> tuple[tuple[int, int], ...]:
    """Return how often a step runs each variant of a stage's passes."""
    num_microbatches = plan.num_microbatches
    if not plan.splits_backward:
        return (FORWARD_PASS, num_microbatches), (BACKWARD_PASS, num_microbatches - 1), (LAST_BACKWARD, 1)
    order = plan.actions.orders[plan.positions[stage]]
    last_gradient = plan.actions.find_last_gradient(stage)
    return tuple(
        Counter(variant_of(action, action == last_gradient) for action in order if action.stage == stage).items()
    )
