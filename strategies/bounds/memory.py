"""Peak memory of plans without their programs, and whether devices and hosts have that much."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.engine import simulate
from meshwise.simulator.program import IntArray
from meshwise.strategies.lowering import StageCosts, lower
from meshwise.strategies.lowering.costs.memory import Boundary, flat_gradient_bytes, list_residents, peak_activations
from meshwise.strategies.lowering.costs.offload import HostShare
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.lowering.tasks.data_parallel import bucket_limit, fill_buckets, with_whole_units
from meshwise.strategies.lowering.tasks.fully_sharded import (
    PassMemory,
    Sharing,
    find_pass_peaks,
    find_sharing,
    list_changes,
    pass_memory,
)
from meshwise.strategies.lowering.tasks.residents import count_copies, list_host_memory
from meshwise.strategies.lowering.tasks.variants import (
    FIRST_OFFSET,
    JOINED_OFFSET,
    SPLIT_VARIANTS,
    WHOLE_VARIANTS,
    kind_of,
)
from meshwise.strategies.plan.mesh import PIPELINE, list_data_ranks
from meshwise.strategies.plan.offloading import StepPlace
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, ActionKind


@dataclass(frozen=True, slots=True)
class SimulatedMemory:
    """The bytes of the fullest device and the seconds of a step that a simulation finds for a plan.

    ``fits`` says whether all devices and hosts have the memory they need, ``hosts_fit`` whether all hosts have.
    """

    peak: int
    fits: bool
    hosts_fit: bool
    step_time: float


class PlanMemory:
    """Memory of the plans of one problem, each part computed once for all plans that share it."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.cluster, self.training = costs, costs.problem.cluster, costs.problem.training
        self._flattens_gradients = self.training.conventions.flattens_gradients
        self._resident: dict[tuple[object, ...], IntArray] = {}
        self._activations: dict[tuple[object, ...], IntArray] = {}
        self._capacities: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._simulations: dict[Plan, SimulatedMemory] = {}

    def peak(self, plan: Plan) -> int:
        """Return the bytes of the fullest device, exactly as the simulation would reach them."""
        if self.needs_simulation(plan):
            return self.simulate_plan(plan).peak
        even_plans = (plan.with_microbatch(size) for size in plan.sizes)
        return max(int((self.resident_memory(even) + self._find_pass_peaks(even)).max()) for even in even_plans)

    def fits(self, plan: Plan) -> bool:
        """Return whether every device has the memory that its position needs, and every host what its ranks keep."""
        if self.needs_simulation(plan):
            return self.simulate_plan(plan).fits
        capacities = ((plan.with_microbatch(size), self.capacity(plan, size)) for size in plan.sizes)
        return all(self._fits_capacity(*row) for row in capacities) and self.hosts_fit(plan)

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that its ranks keep there."""
        if not plan.offload:
            return True
        if self.needs_simulation(plan):
            return self.simulate_plan(plan).hosts_fit
        # Plans that keep more on hosts while passes run are simulated.
        kinds = list_host_memory(self.costs.machine(plan), self.costs, plan)
        return all(size <= capacity for size, capacity in kinds)

    def _fits_capacity(self, plan: Plan, capacity: NDArray[np.float64]) -> bool:
        """Return whether a plan with microbatches of one size fits devices of some capacity by position."""
        resident = self.resident_memory(plan)
        fits_resident = bool((resident <= capacity).all())
        return fits_resident and bool((resident + self._find_pass_peaks(plan) <= capacity).all())

    def needs_simulation(self, plan: Plan) -> bool:
        """Return whether the memory of some device depends on more than the order of its passes."""
        # how long copies are held hangs on the host's step; a server has states, and a batch of its own
        has_copies = self._flattens_gradients and any(plan.offload.optimizer)
        has_server = plan.gradient_reduction == "parameter_server" and len(plan.sizes) > 1
        steps_on_device = plan.offload.step is StepPlace.DEVICE
        # two passes run in turns on one rank, so that what they hold together depends on times
        interleaves = plan.overlaps_passes and plan.pass_ranks > 1
        return plan.offload.moves_in_passes or steps_on_device or has_copies or has_server or interleaves

    def simulate_plan(self, plan: Plan) -> SimulatedMemory:
        """Return what a simulation of a plan finds; each plan is simulated once."""
        if plan not in self._simulations:
            timeline = simulate(lower(self.costs.problem, plan, costs=self.costs))
            peak = int(max(profile.peak for profile in timeline.memory))
            devices_fit, hosts_fit = (
                all(profile.peak <= profile.capacity for profile in profiles)
                for profiles in (timeline.memory, timeline.host_memory)
            )
            self._simulations[plan] = SimulatedMemory(peak, devices_fit and hosts_fit, hosts_fit, timeline.step_time)
        return self._simulations[plan]

    def resident_memory(self, plan: Plan) -> IntArray:
        """Return the bytes that stay for the whole step, by pipeline position."""
        cut = self.costs.blocks.cut_key(plan)
        buffers, num_copies = self.costs.buffers(plan), count_copies(self.costs, plan)
        state_key = (plan.zero, plan.offload, allocates_gradients(self.training, plan))
        key = (self.costs.stage_kinds(plan), plan.positions, cut, plan.mesh.axes, state_key, buffers, num_copies)
        if key not in self._resident:
            fractions = (plan.offload.fraction_at("optimizer", position) for position in range(plan.pipeline))
            host_shares, parameters = map(HostShare, fractions), self.costs.plan_parameters(plan).positions
            positions = list(zip(parameters, buffers, host_shares, num_copies, strict=True))
            sizes = {}
            for position in dict.fromkeys(positions):
                parts, buffer, share, copies = position
                states = list_residents(self.cluster.accelerator, self.training, plan, parts, buffer, 0, share, copies)
                sizes[position] = sum(change.size for change in states if not change.host)
            self._resident[key] = np.array([sizes[position] for position in positions], dtype=np.int64)
        return self._resident[key]

    def _find_pass_peaks(self, plan: Plan) -> IntArray:
        """Return the most bytes that passes hold, by pipeline position."""
        stage_kinds, cost_key = self.costs.stage_kinds(plan), self.costs.blocks.cost_key(plan)
        shared_states = self._find_sharing(plan)
        # Where first gradients are allocated in the step, their bytes depend on shards: these belong in the key.
        shards = (plan.zero >= 2, plan.zero >= 3, plan.shards, plan.expert_shards)
        shard_key = shards if shared_states.begins_gradients else ()
        key = (plan.schedule, plan.num_microbatches, plan.chunks, stage_kinds, cost_key, shared_states, shard_key)
        if key not in self._activations:
            if shared_states.gradients or shared_states.begins_gradients:
                stage_passes = self._list_stage_passes(plan, shared_states)
                self._activations[key] = find_pass_peaks(plan, shared_states, stage_passes)
            else:
                self._activations[key] = peak_activations(plan, self.costs.stage_memories(plan))
        peaks = self._activations[key]
        return np.maximum(peaks, self._count_flat_gradients(plan)) if self._flattens_gradients else peaks

    def _count_flat_gradients(self, plan: Plan) -> IntArray:
        """Return the bytes of the flat gradient buffer that is all-reduced after the passes, by pipeline position.

        Gradients that live only during the step, from which it is copied, are included.
        """
        elements = np.array(self.costs.plan_parameters(plan).elements, np.int64)
        flat_bytes = np.array([flat_gradient_bytes(self.training, plan, n) for n in elements.tolist()], np.int64)
        begins = allocates_gradients(self.training, plan) and plan.zero < 2
        result: IntArray = flat_bytes + elements * self.training.gradient_bytes * begins
        return result

    def _find_sharing(self, plan: Plan) -> Sharing:
        """Return what data ranks share; the same value for all plans that share nothing."""
        begins = allocates_gradients(self.training, plan)
        return find_sharing(self.cluster, self.training, plan) if plan.zero >= 2 or begins else Sharing()

    def _list_stage_passes(self, plan: Plan, shared_states: Sharing) -> list[dict[int, PassMemory]]:
        """Return the memory of the passes of every stage, by variant."""
        stage_kinds, begins = self.costs.stage_kinds(plan), shared_states.begins_gradients
        boundaries = (self.costs.buffered_boundary(plan, stage) for stage in range(len(plan.stages)))
        elements = (
            self.costs.first_gradient_elements(plan, stage) if begins else () for stage in range(len(plan.stages))
        )
        stages = list(zip(stage_kinds.kind_of, boundaries, elements, strict=True))
        passes = {}
        for stage_key in dict.fromkeys(stages):
            kind, boundary, first_elements = stage_key
            runs = self.costs.blocks.list_runs(plan, stage_kinds.kinds[kind], stage_kinds.recompute(plan, kind))
            block_choices = [(block, recompute_choice) for block, count, recompute_choice in runs for _ in range(count)]
            passes[stage_key] = self._list_pass_memories(plan, shared_states, block_choices, boundary, first_elements)
        return [passes[stage_key] for stage_key in stages]

    def _list_pass_memories(
        self,
        plan: Plan,
        shared_states: Sharing,
        block_choices: list[tuple[str, LayerRecompute]],
        boundary: Boundary,
        first_elements: tuple[int, ...],
    ) -> dict[int, PassMemory]:
        """Return the memory of the passes of a stage, by variant.

        ``block_choices`` are the names of its blocks, with what is recomputed of each.
        """
        blocks = self.costs.blocks
        block_memories = [blocks.memory(plan, name, choice) for name, choice in block_choices]
        memories = [memory for memory, _ in boundary.apply_buffers([(memory, 1) for memory in block_memories])]
        first_memories = memories
        if shared_states.begins_gradients:
            begin_memories = [blocks.first_memory(plan, name, choice) for name, choice in block_choices]
            pairs = [(begin or usual, 1) for begin, usual in zip(begin_memories, block_memories, strict=True)]
            first_memories = [memory for memory, _ in boundary.apply_buffers(pairs)]
        elements = [blocks.count_parameters(plan, name) for name, _ in block_choices]
        experts = [blocks.count_expert_parameters(plan, name) for name, _ in block_choices]
        undeferred = [blocks.count_undeferred(plan, name) for name, _ in reversed(block_choices)]
        units = [blocks.unit(plan, name) for name, _ in block_choices]
        filled = fill_buckets(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(plan))
        filled = with_whole_units(filled, units[::-1])
        result = {}
        used = WHOLE_VARIANTS + SPLIT_VARIANTS if plan.splits_backward else WHOLE_VARIANTS
        offsets = [0, JOINED_OFFSET]
        if shared_states.begins_gradients:
            offsets += [FIRST_OFFSET, FIRST_OFFSET + JOINED_OFFSET]
        for variant in (base + offset for base in used for offset in offsets):
            kind = kind_of(variant)
            if variant >= FIRST_OFFSET and kind not in MAKES_GRADIENTS:
                continue
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
            result[variant] = pass_memory(pass_blocks, block_changes, kind)
        return result

    def capacity(self, plan: Plan, size: int) -> NDArray[np.float64]:
        """Return the memory of the smallest device of every pipeline position, with microbatches of ``size``."""
        uneven_key = () if isinstance(plan.microbatch, int) else (plan.microbatch, size)
        key = (plan.mesh.axes, plan.placement, uneven_key)
        if key not in self._capacities:
            memory = np.array([self.costs.problem.usable_memory(node.accelerator) for node, _ in self.cluster.nodes])
            devices = np.array(plan.placement or range(plan.mesh.num_ranks))
            device_memory = memory[self.cluster.node_kinds[self.cluster.device_nodes[devices]]]
            smallest = np.full(plan.pipeline, np.inf)
            if not isinstance(plan.microbatch, int):
                device_memory[np.array(plan.microbatch)[list_data_ranks(plan.mesh)] != size] = np.inf
            np.minimum.at(smallest, plan.mesh.coordinates(PIPELINE), device_memory)
            self._capacities[key] = smallest
        return self._capacities[key]
