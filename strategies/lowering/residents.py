"""Residents: what ranks and hosts hold for a whole step, rank class by rank class.

The ranks of a pipeline position keep some of it on their hosts. Without a flush some is kept more than once: versions
of weights, and buffers of gradients.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.program import Category, HostClass, MemoryChange
from meshwise.strategies.lowering.costs.offload import NO_HOST_SHARE, HostShare, host_states
from meshwise.strategies.lowering.costs.optimizer import (
    Parameters,
    allocates_gradients,
    count_updated_parameters,
    state_bytes,
)
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import overlaps_gradients
from meshwise.strategies.lowering.tasks.unflushed import UpdateSchedule
from meshwise.strategies.plan.mesh import list_data_ranks
from meshwise.strategies.plan.plan import Plan, SharedStates
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.tables.loads import TableBytes


class StateCopies(NamedTuple):
    """Number of versions of its weights, and of buffers of gradients, that a rank keeps."""

    weights: int
    gradients: int


SINGLE_COPY = StateCopies(1, 1)
"""One version of the weights and one buffer of gradients."""


class Residents(NamedTuple):
    """Bytes that a rank keeps for the whole step, by category, on its device and on its host."""

    device: dict[Category, int]
    host: dict[Category, int]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    def add_tables(self, tables: TableBytes | None) -> "Residents":
        """Return what a rank keeps with its part of the tables that data ranks share."""
        if tables is None:
            return self
        names = Category.PARAMETERS, Category.OPTIMIZER, Category.BUFFERS
        device_sizes = zip(names, (tables.parameters, tables.states, tables.buffers), strict=True)
        host_sizes = zip(names, (tables.host_parameters, tables.host_states), strict=False)
        device = self.device | {name: self.device[name] + size for name, size in device_sizes}
        host = self.host | {name: self.host.get(name, 0) + size for name, size in host_sizes if size}
        return Residents(device, host)


def count_residents(
    training: Training,
    plan: SharedStates,
    parameters: Parameters,
    buffers: int = 0,
    host_share: HostShare = NO_HOST_SHARE,
    copies: StateCopies = SINGLE_COPY,
) -> Residents:
    """Return what one rank keeps for the whole step, without what the runtime of its device reserves.

    Gradients that get their memory in a backward are not among it.

    Parameters
    ----------
    buffers
        Bytes that the framework keeps besides.
    host_share
        The part that is on the host.
    copies
        How often weights and gradients are kept.
    """
    num_updated = count_updated_parameters(plan, parameters.elements, parameters.expert_elements)
    gathers_units = plan.zero == 3 and plan.shards > 1  # copies in fp8 are then made of each block and given up with it
    quantised_bytes = 0 if gathers_units else parameters.quantised_elements * training.more_bytes
    host_state_bytes = host_states(training, plan, parameters, host_share)
    gradient_bytes = 0 if allocates_gradients(training, plan) else training.gradient_bytes
    weights, gradients = ((num_updated if plan.zero >= min_zero else parameters.elements) for min_zero in (3, 2))
    weights -= host_share.parameters
    if plan.shards > 1 and plan.zero == 2 and training.conventions.keeps_shards and not training.mains_as_shards:
        weights += num_updated
    # Shards of the main copy, which count as optimizer state, are then the only parameters that stay.
    if plan.shards > 1 and plan.zero == 3 and training.mains_as_shards:
        weights = 0
    device_sizes = {
        Category.PARAMETERS: copies.weights * (weights * training.parameter_bytes + quantised_bytes),
        Category.GRADIENTS: copies.gradients * (gradients - host_share.parameters) * gradient_bytes,
        Category.OPTIMIZER: state_bytes(training, plan, parameters) - host_state_bytes,
        Category.BUFFERS: buffers,
    }
    host_sizes = {
        Category.PARAMETERS: host_share.parameters * training.parameter_bytes * (not training.mains_as_shards),
        Category.GRADIENTS: host_share.parameters * training.gradient_bytes,
        Category.OPTIMIZER: host_state_bytes,
    }
    return Residents(device_sizes, {category: size for category, size in host_sizes.items() if size})


def find_buffer_bytes(costs: StageCosts, plan: Plan, position: int, rank: RankProfile) -> int:
    """Return the bytes of one of the two buffers through which activations of a position move to the host and back."""
    if not plan.offload.moves_in_passes:
        return 0
    stages = (costs.stage_cost(plan, stage, rank) for stage in plan.stages_at(position))
    return max((block.offloaded_bytes for stage in stages for block in stage.blocks), default=0)


def schedule_updates(costs: StageCosts, plan: Plan) -> UpdateSchedule:
    """Return when the stages of a plan update their weights."""
    overlaps_passes = overlaps_gradients(costs.problem.cluster, plan) or any(plan.offload.optimizer)
    tied = {max(pair) for *pair, _ in costs.list_tied_shares(plan)}  # the other one makes its gradients after that
    updates_once = plan.asynchronous and not plan.rule.updates_every_microbatch
    is_late = tuple(updates_once and (overlaps_passes or position in tied) for position in range(plan.pipeline))
    return UpdateSchedule(plan.num_microbatches // plan.updates, is_late)


def count_copies(costs: StageCosts, plan: Plan) -> tuple[StateCopies, ...]:
    """Return, for every pipeline position, how often weights and gradients are kept.

    A version of the weights is what forward and backward read; the optimizer's states and the main copy are kept once.
    Weight stashing keeps one version for every microbatch in flight (Narayanan et al., "PipeDream", SOSP 2019,
    section 3.3), 2BW keeps two (Narayanan et al., ICML 2021, section 3.1).
    """
    if not plan.asynchronous:
        return (SINGLE_COPY,) * plan.pipeline
    is_late = schedule_updates(costs, plan).is_late
    return tuple(StateCopies(plan.count_weight_versions(position), 1 + waits) for position, waits in enumerate(is_late))


def list_class_residents(
    machine: Machine, costs: StageCosts, plan: Plan, host_shares: Sequence[HostShare]
) -> tuple[MemoryChange, ...]:
    """Return what every rank class holds for the whole step; ``host_shares`` is the part on hosts by position."""
    training, position_parameters = costs.problem.training, costs.plan_parameters(plan).positions
    copies = count_copies(costs, plan)
    known_residents: dict[tuple[int, RankProfile], Residents] = {}
    changes: list[MemoryChange] = []
    for index, position in enumerate(machine.table.positions):
        rank = machine.rank(index)
        if (position, rank) not in known_residents:
            buffers = costs.buffers(plan, rank.batch)[position]
            buffers += 2 * find_buffer_bytes(costs, plan, position, rank) + int(rank.accelerator.reserved)
            residents = count_residents(
                training, plan, position_parameters[position], buffers, host_shares[position], copies[position]
            )
            known_residents[position, rank] = residents.add_tables(costs.find_table_bytes(plan))
        device, host = known_residents[position, rank]
        updates_states = updates_parameters(machine, plan, index)
        sizes = [*((row, False) for row in device.items()), *((row, True) for row in host.items())]
        changes += [
            MemoryChange(index, category, size, host=on_host)
            for (category, size), on_host in sizes
            if updates_states or category is not Category.OPTIMIZER
        ]
    return tuple(changes)


def updates_parameters(machine: Machine, plan: Plan, rank_class: int) -> bool:
    """Return whether ranks of a class update parameters; with a server only the first data rank does.

    Experts that ranks share have servers of their own.
    """
    if plan.gradient_reduction != "parameter_server" or plan.expert > 1:
        return True
    return rank_class in machine.table.class_of[list_data_ranks(plan.mesh) == 0]


def list_hosts(machine: Machine) -> tuple[HostClass, ...]:
    """Return the hosts that differ in memory or in their number of ranks of every class, one of each kind."""
    table = machine.table
    devices, cluster = table.placed.devices, table.cluster
    number_of = interconnect(cluster).host_of(devices)
    numbers, first_ranks = np.unique(number_of, return_index=True)
    pairs, ranks = np.unique(number_of * len(table) + table.class_of, return_counts=True)
    start = np.searchsorted(pairs, numbers * len(table))
    result: dict[tuple[float, tuple[tuple[int, int], ...]], HostClass] = {}
    for number, rank, low, high in zip(numbers, first_ranks, start, [*start[1:], len(pairs)], strict=True):
        members = tuple(zip((pairs[low:high] % len(table)).tolist(), ranks[low:high].tolist(), strict=True))
        capacity = cluster.node_kind(int(devices[rank])).host.memory
        result.setdefault((capacity, members), HostClass(f"host {number}", capacity, members))
    return tuple(result.values())


def list_host_memory(machine: Machine, costs: StageCosts, plan: Plan) -> Iterator[tuple[float, float]]:
    """Yield, for every kind of host, the bytes that its ranks keep there for the whole step, and its memory in bytes.

    What they keep there for a part of the step is not included.
    """
    class_bytes = np.zeros(len(machine.table))
    for change in list_class_residents(machine, costs, plan, costs.list_host_shares(plan)):
        if change.host:
            class_bytes[change.rank_class] += change.size
    for host in list_hosts(machine):
        yield sum(class_bytes[index] * ranks for index, ranks in host.members), host.capacity
