"""Peak memory of plans without their programs, and whether devices and hosts have that much."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.memo import HashedTuple, memoise
from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.pass_peaks import PassMemory, find_pass_peaks, pass_memory, peak_activations
from meshwise.strategies.lowering.costs.keys import PassKey, StageKey
from meshwise.strategies.lowering.costs.memory import BlockMemory, Boundary
from meshwise.strategies.lowering.costs.offload import HostShare
from meshwise.strategies.lowering.costs.optimizer import (
    allocates_gradients,
    count_updated_parameters,
    flat_gradient_bytes,
    step_temporary_bytes,
)
from meshwise.strategies.lowering.costs.weights import Unit
from meshwise.strategies.lowering.residents import StateCopies, count_copies, count_residents, list_host_memory
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import BucketFilling, bucket_limit, fill_buckets, with_whole_units
from meshwise.strategies.lowering.tasks.fully_sharded import (
    BlockChanges,
    Sharing,
    find_sharing,
    list_changes,
)
from meshwise.strategies.lowering.tasks.variants import FIRST_OFFSET, kind_of
from meshwise.strategies.plan.mesh import PIPELINE, Axis, Mesh, Microbatch, list_data_ranks
from meshwise.strategies.plan.offloading import StepPlace, select_fraction
from meshwise.strategies.plan.plan import Plan, StateKey
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.schedules.orders import list_actions
from meshwise.strategies.schedules.schedule import ActionKind

ScheduleOrder = tuple[str, int, int, int]
"""A schedule by name, with its pipeline ranks, microbatches and chunks."""


class _Room(NamedTuple):
    """By pipeline position the least bytes that a plan may use of a device, and the most that a runtime reserves."""

    capacity: NDArray[np.float64]
    reserved: IntArray


class StagePass(NamedTuple):
    """What the blocks of a stage hold in a pass, in its order: activations, and ``changes`` besides."""

    blocks: list[BlockMemory]
    changes: tuple[BlockChanges, ...]
    kind: ActionKind


class StagePasses(dict[int, StagePass]):
    """What the blocks of a stage hold in its passes, by variant; each is worked out when it is first asked for."""

    def __init__(self, find_pass: Callable[[int], StagePass]) -> None:
        self._find_pass = find_pass

    def __missing__(self, variant: int) -> StagePass:
        self[variant] = self._find_pass(variant)
        return self[variant]


class PlanMemory:
    """Memory of the plans of one problem, each part computed once for all plans that share it."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.cluster, self.training = costs, costs.problem.cluster, costs.problem.training
        conventions = self.training.conventions
        self._flattens_gradients = conventions.flattens_gradients
        self._has_step_temporaries = conventions.steps_together or conventions.widens_gradients
        self.is_mixed = len({node.accelerator for node, _ in self.cluster.nodes}) > 1

    def peak(self, plan: Plan) -> int:
        """Return the bytes of the fullest device, exactly as the simulation would reach them.

        This and what follows hold for plans whose memory needs no simulation (`needs_simulation`).
        """
        even_plans = {size: plan.with_microbatch(size) for size in plan.sizes}
        return max(
            int((self.allocated(even) + self._find_reserved(plan, size)).max()) for size, even in even_plans.items()
        )

    def allocated(self, plan: Plan) -> IntArray:
        """Return the most bytes of tensors by pipeline position, for one size of microbatches."""
        return self.resident_memory(plan) + self.find_pass_peaks_of(plan)

    def fits(self, plan: Plan) -> bool:
        """Return whether every device has the memory that its position needs, and every host what its ranks keep."""
        capacities = ((plan.with_microbatch(size), self.capacity(plan, size)) for size in plan.sizes)
        return all(self._fits_capacity(*row) for row in capacities) and self.hosts_fit(plan)

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that its ranks keep there."""
        if not plan.offload and not plan.embeddings.uses_hosts:
            return True
        kinds = list_host_memory(self.costs.machine(plan), self.costs, plan)
        return all(size <= capacity for size, capacity in kinds)

    def _fits_capacity(self, plan: Plan, capacity: NDArray[np.float64]) -> bool:
        """Return whether a plan with microbatches of one size fits devices of some capacity by position."""
        resident = self.resident_memory(plan)
        fits_resident = bool((resident <= capacity).all())
        return fits_resident and bool((self.allocated(plan) <= capacity).all())

    def needs_simulation(self, plan: Plan) -> bool:
        """Return whether the memory of some device depends on more than the order of its passes."""
        # how long copies are held hangs on the host's step; a server has states, and a batch or a device of its own
        has_copies = self._flattens_gradients and any(plan.offload.optimizer)
        has_server = plan.gradient_reduction == "parameter_server" and (len(plan.sizes) > 1 or self.is_mixed)
        steps_on_device = plan.offload.step is StepPlace.DEVICE
        # two passes run in turns on one rank, so that what they hold together depends on times
        interleaves = plan.overlaps_passes and plan.pass_ranks > 1
        return plan.offload.moves_in_passes or steps_on_device or has_copies or has_server or interleaves

    def resident_memory(self, plan: Plan) -> IntArray:
        """Return the bytes that stay for the whole step, by pipeline position, without what devices reserve."""
        _, stages, states = self.costs.find_keys(plan)
        buffers, copies = self.costs.buffers(plan), count_copies(self.costs, plan)
        resident = self._count_resident(stages, states, plan.offload.optimizer, buffers, copies)
        tables = self.costs.find_table_bytes(plan)
        return resident if tables is None else resident + tables.device_bytes

    @memoise
    def _count_resident(
        self,
        stages: StageKey,
        states: StateKey,
        fractions: tuple[float, ...],
        buffers: tuple[int, ...],
        copies: tuple[StateCopies, ...],
    ) -> IntArray:
        """Return the bytes that stay for the whole step, by pipeline position, without what devices reserve.

        ``fractions`` are those of optimizer states on hosts, and ``buffers`` what the framework keeps.
        """
        shares = [HostShare(select_fraction(fractions, position)) for position in range(stages.num_positions)]
        sites = list(zip(self.costs.count_parameters(stages).positions, buffers, shares, copies, strict=True))
        sizes = {site: count_residents(self.training, states, *site).device_bytes for site in dict.fromkeys(sites)}
        return np.array([sizes[site] for site in sites], dtype=np.int64)

    def find_pass_peaks_of(self, plan: Plan) -> IntArray:
        """Return the most bytes that passes and the optimizer's step hold, by pipeline position."""
        passes, stages, states = self.costs.find_keys(plan)
        sharing = self.find_sharing(plan)
        if sharing.gradients or sharing.begins_gradients:
            order = plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks
            peaks = self._find_shared_peaks(order, passes, stages, states, sharing)
        else:
            order = plan.schedule, plan.pipeline, plan.ordered_microbatches, plan.chunks
            peaks = self._find_plain_peaks(order, passes, stages)
        if not (self._flattens_gradients or self._has_step_temporaries):
            return peaks
        result: IntArray = np.maximum(peaks, self._count_step_bytes(stages, states, self.steps_on_device(plan)))
        return result

    def steps_on_device(self, plan: Plan) -> bool:
        """Return whether the optimizer steps on devices that make temporary tensors for it."""
        return not (plan.offload or self.cluster.accelerator.computes_collectives)

    def list_block_choices(self, plan: Plan, stage: int) -> list[tuple[str, LayerRecompute]]:
        """Return the blocks of a stage in order, each with what is recomputed of it."""
        passes, stages, _ = self.costs.find_keys(plan)
        kind = stages.kinds.kind_of[stage]
        runs = self.costs.blocks.list_runs(
            stages.cut, stages.kinds.kinds[kind], stages.find_recompute(passes.recompute, kind)
        )
        return [(block, choice) for block, count, choice in runs for _ in range(count)]

    def list_stage_passes(self, plan: Plan, stage: int) -> StagePasses:
        """Return what the blocks of a stage hold in its passes, by variant."""
        passes, stages, states = self.costs.find_keys(plan)
        sharing = self.find_sharing(plan)
        boundary = self.costs.find_buffered_boundary(passes.run, stages, stage)
        first_elements = self.costs.list_first_gradients(stages, states, stage) if sharing.begins_gradients else ()
        block_choices = HashedTuple(self.list_block_choices(plan, stage))
        return self._list_block_passes(passes, states, sharing, block_choices, boundary, first_elements)

    @memoise
    def _find_plain_peaks(self, order: ScheduleOrder, passes: PassKey, stages: StageKey) -> IntArray:
        """Return the most bytes that passes hold where data ranks share nothing that they take or give back."""
        return peak_activations(list_actions(*order), self.costs.list_stage_memories(passes, stages))

    @memoise
    def _find_shared_peaks(
        self, order: ScheduleOrder, passes: PassKey, stages: StageKey, states: StateKey, sharing: Sharing
    ) -> IntArray:
        """Return the most bytes that passes hold, with gradients and parameters that come and go in them."""
        rows = list_actions(*order)
        variants = np.unique(sharing.list_variants(rows)).tolist()
        stage_passes = self._list_stage_passes(passes, stages, states, sharing, variants)
        return find_pass_peaks(rows, sharing, stage_passes)

    @memoise
    def _count_step_bytes(self, stages: StageKey, states: StateKey, on_device: bool) -> IntArray:
        """Return the bytes that live while the optimizer steps, by pipeline position, without resident ones.

        These are the flat buffer of gradients that were all-reduced after the passes, temporary tensors of the step,
        and gradients that live only during the step.
        """
        parameters = self.costs.count_parameters(stages).positions
        begins = allocates_gradients(self.training, states)
        rows = []
        for row in parameters:
            num_begun = row.elements
            if states.zero >= 2:
                num_begun = count_updated_parameters(states, row.elements, row.expert_elements)
            step_bytes = step_temporary_bytes(self.training, states, row) * on_device
            flat_bytes = flat_gradient_bytes(self.training, states, row.elements)
            rows.append(flat_bytes + step_bytes + num_begun * self.training.gradient_bytes * begins)
        return np.array(rows, np.int64)

    def find_sharing(self, plan: Plan) -> Sharing:
        """Return what data ranks share; the same value for all plans that share nothing."""
        begins = self.costs.find_keys(plan).run.allocates_gradients
        if plan.zero < 2 and not begins:
            return Sharing()
        return find_sharing(self.cluster, self.training, plan, begins_gradients=begins)

    def _list_stage_passes(
        self, passes: PassKey, stages: StageKey, states: StateKey, sharing: Sharing, variants: Sequence[int]
    ) -> list[dict[int, PassMemory]]:
        """Return the memory of the passes of every stage, by variant."""
        begins = sharing.begins_gradients
        sites = [
            (
                stages.kinds.kind_of[stage],
                self.costs.find_buffered_boundary(passes.run, stages, stage),
                self.costs.list_first_gradients(stages, states, stage) if begins else (),
            )
            for stage in range(len(stages.stages))
        ]
        pass_memories = {}
        for site in dict.fromkeys(sites):
            kind, boundary, first_elements = site
            recompute = stages.find_recompute(passes.recompute, kind)
            runs = self.costs.blocks.list_runs(stages.cut, stages.kinds.kinds[kind], recompute)
            block_choices = HashedTuple((block, choice) for block, count, choice in runs for _ in range(count))
            stage_passes = self._list_block_passes(passes, states, sharing, block_choices, boundary, first_elements)
            pass_memories[site] = {variant: pass_memory(*stage_passes[variant]) for variant in variants}
        return [pass_memories[site] for site in sites]

    @memoise
    def _list_block_passes(
        self,
        passes: PassKey,
        states: StateKey,
        shared_states: Sharing,
        block_choices: HashedTuple[tuple[str, LayerRecompute]],
        boundary: Boundary,
        first_elements: tuple[int, ...],
    ) -> StagePasses:
        """Return what the blocks of a stage hold in its passes, by variant.

        ``block_choices`` are the names of its blocks, with what is recomputed of each.
        """
        blocks, run, cut = self.costs.blocks, passes.run, passes.run.cut
        block_memories = [blocks.memory(run, name, choice) for name, choice in block_choices]
        memories = [memory for memory, _ in boundary.apply_buffers([(memory, 1) for memory in block_memories])]
        first_memories = memories
        if shared_states.begins_gradients:
            begin_memories = [blocks.first_memory(run, name, choice) for name, choice in block_choices]
            pairs = [(begin or usual, 1) for begin, usual in zip(begin_memories, block_memories, strict=True)]
            first_memories = [memory for memory, _ in boundary.apply_buffers(pairs)]
        elements = [blocks.count_parameters(cut, name) for name, _ in block_choices]
        experts = [blocks.count_expert_parameters(cut, name) for name, _ in block_choices]
        undeferred = [blocks.count_undeferred(run, name) for name, _ in reversed(block_choices)]
        units = [blocks.unit(cut, name) for name, _ in block_choices]
        filled = fill_buckets(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(states))
        filled = fill_whole_units(filled, units[::-1])

        def find_pass(variant: int) -> StagePass:
            kind = kind_of(variant)
            turn = 1 if kind is ActionKind.FORWARD else -1
            block_changes = list_changes(
                shared_states,
                self.training,
                variant,
                [unit.size for unit in units[::turn]],
                filled if shared_states.gradients else (),
                undeferred=undeferred,
                lasting_elements=first_elements,
            )
            pass_blocks = (first_memories if variant >= FIRST_OFFSET else memories)[::turn]
            return StagePass(pass_blocks, block_changes, kind)

        return StagePasses(find_pass)

    def capacity(self, plan: Plan, size: int) -> NDArray[np.float64]:
        """Return the least memory of a device of every pipeline position, with microbatches of ``size``.

        What the runtime of the device reserves is not included.
        """
        return self._find_room(plan, size).capacity

    def _find_reserved(self, plan: Plan, size: int) -> IntArray:
        """Return the most bytes that a runtime reserves at every position, with microbatches of ``size``."""
        return self._find_room(plan, size).reserved

    def _find_room(self, plan: Plan, size: int) -> "_Room":
        uneven = (0, 0) if isinstance(plan.microbatch, int) else (plan.microbatch, size)
        return self._compute_room(plan.mesh.axes, plan.placement, *uneven)

    @memoise
    def _compute_room(
        self, axes: tuple[Axis, ...], placement: tuple[int, ...], microbatch: Microbatch, size: int
    ) -> "_Room":
        """Return the room on the devices of every position; on those of all data ranks where ``microbatch`` is 0."""
        mesh = Mesh(axes)
        accelerators = [node.accelerator for node, _ in self.cluster.nodes]
        kind_reserved = np.array([int(accelerator.reserved) for accelerator in accelerators])
        kind_capacity = np.array(list(map(self.costs.problem.usable_memory, accelerators))) - kind_reserved
        devices = np.array(placement or range(mesh.num_ranks))
        kinds, positions = self.cluster.node_kinds[self.cluster.device_nodes[devices]], mesh.coordinates(PIPELINE)
        if microbatch:
            has_size = np.array(microbatch)[list_data_ranks(mesh)] == size
            kinds, positions = kinds[has_size], positions[has_size]
        capacity = np.full(mesh.size(PIPELINE), np.inf)
        np.minimum.at(capacity, positions, kind_capacity[kinds])
        reserved = np.zeros(mesh.size(PIPELINE), np.int64)
        np.maximum.at(reserved, positions, kind_reserved[kinds])
        return _Room(capacity, reserved)


def fill_whole_units(fillings: Sequence[BucketFilling], units: Sequence[Unit]) -> tuple[BucketFilling, ...]:
    """Return fillings of buckets where the gradients of whole units are whole at once."""
    elements, experts = [unit.elements for unit in units], [unit.expert_elements for unit in units]
    return with_whole_units(fillings, elements, experts)
