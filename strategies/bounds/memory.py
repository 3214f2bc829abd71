"""Peak memory of plans without their programs, and whether devices and hosts have that much."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.engine import simulate
from meshwise.simulator.program import IntArray
from meshwise.strategies.lowering import StageCosts, lower
from meshwise.strategies.lowering.costs.memory import Boundary, flat_gradients, peak_activations, resident
from meshwise.strategies.lowering.costs.offload import OnHost
from meshwise.strategies.lowering.costs.optimizer import begin_in_step
from meshwise.strategies.lowering.tasks.data_parallel import at_once, bucket_limit, fillings
from meshwise.strategies.lowering.tasks.fully_sharded import (
    PassMemory,
    Sharing,
    changes,
    pass_memory,
    peak_of_passes,
    sharing,
)
from meshwise.strategies.lowering.tasks.residents import copies, host_residents
from meshwise.strategies.lowering.tasks.variants import FIRST, JOINED, SPLIT, WHOLE, kind_of
from meshwise.strategies.plan.mesh import PIPELINE, data_ranks
from meshwise.strategies.plan.offloading import StepPlace
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import OfLayer
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, ActionKind


@dataclass(frozen=True, slots=True)
class SimulatedNeed:
    """The memory and time that a simulation finds for a plan.

    Parameters
    ----------
    peak
        Bytes of the fullest device.
    fits, hosts_fit
        Whether all devices and hosts have the memory they need, and whether all hosts have.
    step_time
        Seconds of a step.
    """

    peak: int
    fits: bool
    hosts_fit: bool
    step_time: float


class Needs:
    """Memory of the plans of one problem, each part computed once for all plans that share it."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.cluster, self.training = costs, costs.problem.cluster, costs.problem.training
        self._flattens = self.training.conventions.flattens_gradients
        self._resident: dict[tuple[object, ...], IntArray] = {}
        self._activations: dict[tuple[object, ...], IntArray] = {}
        self._capacities: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._simulated: dict[Plan, SimulatedNeed] = {}

    def peak(self, plan: Plan) -> int:
        """Return the bytes of the fullest device, exactly as the simulation would reach them."""
        if self.needs_simulation(plan):
            return self.simulated(plan).peak
        seen = (plan.even(size) for size in plan.sizes)
        return max(int((self.held(each) + self._peaks(each)).max()) for each in seen)

    def fit(self, plan: Plan) -> bool:
        """Return whether every device has the memory that its position needs, and every host what its ranks keep."""
        if self.needs_simulation(plan):
            return self.simulated(plan).fits
        on_devices = all(self._fits(plan.even(size), self.capacity(plan, size)) for size in plan.sizes)
        return on_devices and self.hosts_fit(plan)

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that its ranks keep there."""
        if not plan.offload:
            return True
        if self.needs_simulation(plan):
            return self.simulated(plan).hosts_fit
        # Plans that keep more on hosts while passes run are simulated.
        kinds = host_residents(self.costs.machine(plan), self.costs, plan)
        return all(size <= capacity for size, capacity in kinds)

    def _fits(self, plan: Plan, capacity: NDArray[np.float64]) -> bool:
        """Return whether a plan with microbatches of one size fits devices of some capacity by position."""
        held = self.held(plan)
        return bool((held <= capacity).all()) and bool((held + self._peaks(plan) <= capacity).all())

    def needs_simulation(self, plan: Plan) -> bool:
        """Return whether the memory of some device depends on more than the order of its passes."""
        copies = self._flattens and any(plan.offload.optimizer)  # how long they are held hangs on the host's step
        server = (
            plan.gradient_reduction == "parameter_server" and len(plan.sizes) > 1
        )  # it has states, and a batch of its own
        on_device = plan.offload.step is StepPlace.DEVICE
        return plan.offload.in_passes or on_device or copies or server or _interleaves(plan)

    def simulated(self, plan: Plan) -> SimulatedNeed:
        """Return what a simulation of a plan finds; each plan is simulated once."""
        if plan not in self._simulated:
            timeline = simulate(lower(self.costs.problem, plan, costs=self.costs))
            peak = int(max(profile.peak for profile in timeline.memory))
            devices_fit, hosts_fit = (
                all(profile.peak <= profile.capacity for profile in profiles)
                for profiles in (timeline.memory, timeline.host_memory)
            )
            self._simulated[plan] = SimulatedNeed(peak, devices_fit and hosts_fit, hosts_fit, timeline.step_time)
        return self._simulated[plan]

    def held(self, plan: Plan) -> IntArray:
        """Return the bytes that stay for the whole step, by pipeline position."""
        cut = self.costs.blocks.cut(plan)
        buffers, num_copies = self.costs.buffers(plan), copies(self.costs, plan)
        state_key = (plan.zero, plan.offload, begin_in_step(self.training, plan))
        key = (self.costs.division(plan), plan.positions, cut, plan.mesh.axes, state_key, buffers, num_copies)
        if key not in self._resident:
            host_shares = [OnHost(plan.offload.at("optimizer", position)) for position in range(plan.pipeline)]
            positions = list(zip(self.costs.held(plan).positions, buffers, host_shares, num_copies, strict=True))
            sizes = {}
            for parameters, buffer, host_share, copy_counts in dict.fromkeys(positions):
                accelerator = self.cluster.accelerator
                states = resident(accelerator, self.training, plan, parameters, buffer, 0, host_share, copy_counts)
                on_device = (change.size for change in states if not change.host)
                sizes[parameters, buffer, host_share, copy_counts] = sum(on_device)
            self._resident[key] = np.array([sizes[position] for position in positions], dtype=np.int64)
        return self._resident[key]

    def _peaks(self, plan: Plan) -> IntArray:
        """Return the most bytes that passes hold, by pipeline position."""
        made, how, shared = self.costs.division(plan), self.costs.blocks.how(plan), self._sharing(plan)
        # Where first gradients are allocated in the step, their bytes depend on shards: these belong in the key.
        begun = (plan.zero >= 2, plan.zero >= 3, plan.shards, plan.expert_shards) if shared.begins else ()
        key = (plan.schedule, plan.num_microbatches, plan.chunks, made, how, shared, begun)
        if key not in self._activations:
            if shared.gradients or shared.begins:
                self._activations[key] = peak_of_passes(plan, shared, self._passes(plan, shared))
            else:
                self._activations[key] = peak_activations(plan, self.costs.memories(plan))
        return np.maximum(self._activations[key], self._flat(plan)) if self._flattens else self._activations[key]

    def _flat(self, plan: Plan) -> IntArray:
        """Return the bytes of the flat gradient buffer that is all-reduced after the passes, by pipeline position.

        Gradients that live only during the step, from which it is copied, are included.
        """
        held = np.array(self.costs.held(plan).parameters, np.int64)
        flat = np.array([flat_gradients(self.training, plan, n) for n in held.tolist()], np.int64)
        begun = begin_in_step(self.training, plan) and plan.zero < 2
        result: IntArray = flat + held * self.training.gradient_bytes * begun
        return result

    def _sharing(self, plan: Plan) -> Sharing:
        """Return what data ranks share; the same value for all plans that share nothing."""
        begins = begin_in_step(self.training, plan)
        return sharing(self.cluster, self.training, plan) if plan.zero >= 2 or begins else Sharing()

    def _passes(self, plan: Plan, shared: Sharing) -> list[dict[int, PassMemory]]:
        """Return the memory of the passes of every stage, by variant."""
        made = self.costs.division(plan)
        stages = [
            (kind, self.costs.ends(plan, stage), self.costs.begun_elements(plan, stage) if shared.begins else ())
            for stage, kind in enumerate(made.kind_of)
        ]
        kinds = {}
        for kind, ends, begun in dict.fromkeys(stages):
            runs = self.costs.blocks.runs(plan, made.kinds[kind], made.recompute(plan, kind))
            named = [(block, how) for block, count, how in runs for _ in range(count)]
            kinds[kind, ends, begun] = self._pass_memories(plan, shared, named, ends, begun)
        return [kinds[each] for each in stages]

    def _pass_memories(
        self,
        plan: Plan,
        shared_states: Sharing,
        block_choices: list[tuple[str, OfLayer]],
        boundary: Boundary,
        first_elements: tuple[int, ...],
    ) -> dict[int, PassMemory]:
        """Return the memory of the passes of a stage, by variant.

        ``block_choices`` are the names of its blocks, with what is recomputed of each.
        """
        blocks = self.costs.blocks
        block_memories = [blocks.memory(plan, name, choice) for name, choice in block_choices]
        memories = [memory for memory, _ in boundary.applied([(memory, 1) for memory in block_memories])]
        first_memories = memories
        if shared_states.begins:
            begin_memories = [blocks.first_memory(plan, name, choice) for name, choice in block_choices]
            pairs = [(begin or usual, 1) for begin, usual in zip(begin_memories, block_memories, strict=True)]
            first_memories = [memory for memory, _ in boundary.applied(pairs)]
        elements = [blocks.parameters(plan, name) for name, _ in block_choices]
        experts = [blocks.experts(plan, name) for name, _ in block_choices]
        undeferred = [blocks.undeferred(plan, name) for name, _ in reversed(block_choices)]
        units = [blocks.unit(plan, name) for name, _ in block_choices]
        filled = fillings(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(plan))
        filled = at_once(filled, units[::-1])
        result = {}
        used = WHOLE + SPLIT if plan.splits_backward else WHOLE
        offsets = [0, JOINED, *((FIRST, FIRST + JOINED) if shared_states.begins else ())]
        for variant in (base + offset for base in used for offset in offsets):
            kind = kind_of(variant)
            if variant >= FIRST and kind not in MAKES_GRADIENTS:
                continue
            turn = 1 if kind is ActionKind.FORWARD else -1
            block_changes = changes(
                shared_states,
                self.training,
                variant,
                [unit.size for unit in units[::turn]],
                filled if shared_states.gradients else (),
                undeferred=undeferred,
                kept=first_elements,
            )
            pass_blocks = (first_memories if variant >= FIRST else memories)[::turn]
            result[variant] = pass_memory(pass_blocks, block_changes, kind)
        return result

    def capacity(self, plan: Plan, size: int) -> NDArray[np.float64]:
        """Return the memory of the smallest device of every pipeline position, with microbatches of ``size``."""
        uneven = () if isinstance(plan.microbatch, int) else (plan.microbatch, size)
        key = (plan.mesh.axes, plan.placement, uneven)
        if key not in self._capacities:
            memory = np.array([self.costs.problem.usable(node.accelerator) for node, _ in self.cluster.nodes])
            devices = np.array(plan.placement or range(plan.mesh.num_ranks))
            of_device = memory[self.cluster.node_kinds[self.cluster.device_nodes[devices]]]
            least = np.full(plan.pipeline, np.inf)
            if not isinstance(plan.microbatch, int):
                of_device[np.array(plan.microbatch)[data_ranks(plan.mesh)] != size] = np.inf
            np.minimum.at(least, plan.mesh.coordinates(PIPELINE), of_device)
            self._capacities[key] = least
        return self._capacities[key]


def _interleaves(plan: Plan) -> bool:
    """Return whether two passes run in turns on one rank, so that what they hold together depends on times."""
    return plan.overlaps_passes and plan.operator_ranks * plan.context * plan.expert > 1
