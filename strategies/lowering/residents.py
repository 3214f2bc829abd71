"""What ranks and hosts hold for a whole step, class by class."""

from collections.abc import Iterator, Sequence

import numpy as np

from simulator.interconnect.interconnect import interconnect
from simulator.program import Category, HostClass, MemoryChange
from strategies.local_batches import data_ranks
from strategies.lowering.copies import copies
from strategies.lowering.machine import Machine
from strategies.lowering.memory import resident
from strategies.lowering.offload import OnHost
from strategies.lowering.on_host import buffer, on_host
from strategies.lowering.stage import StageCosts
from strategies.plan import Plan


def residents(
    machine: Machine, costs: StageCosts, plan: Plan, host_shares: Sequence[OnHost]
) -> tuple[MemoryChange, ...]:
    """Return what every rank class holds for the whole step; ``host_shares`` says for each position what hosts have."""
    training, held = costs.problem.training, costs.of(plan).held.positions
    changes: list[MemoryChange] = []
    known: dict[tuple[object, ...], tuple[MemoryChange, ...]] = {}
    several = copies(costs, plan)
    for index, position in enumerate(machine.table.positions):
        rank = machine.rank(index)
        key = (position, rank.key)
        if key not in known:
            buffers = costs.buffers(costs.seen(plan, rank.batch))[position]
            buffers += 2 * buffer(costs, plan, position, rank)
            own = held[position], buffers, 0, host_shares[position], several[position]
            known[key] = resident(rank.accelerator, training, plan, *own)
        states = updates_parameters(machine, plan, index)
        changes += [
            MemoryChange(index, *change[1:])
            for change in known[key]
            if states or change.category is not Category.OPTIMIZER
        ]
    return tuple(changes)


def updates_parameters(machine: Machine, plan: Plan, rank_class: int) -> bool:
    """Return whether ranks of a class update parameters; with a server only the first data rank does.

    Experts that ranks share have servers of their own.
    """
    if plan.gradient_reduction != "parameter_server" or plan.expert > 1:
        return True
    return rank_class in machine.table.class_of[data_ranks(plan.mesh) == 0]


def hosts(machine: Machine) -> tuple[HostClass, ...]:
    """Return the hosts that differ in memory or in how many ranks they hold of every class, the first of each kind."""
    table = machine.table
    devices, cluster = table.placed.devices, table.cluster
    number_of = interconnect(cluster).host_of(devices)
    numbers, first = np.unique(number_of, return_index=True)
    pairs, ranks = np.unique(number_of * len(table) + table.class_of, return_counts=True)
    start = np.searchsorted(pairs, numbers * len(table))
    result: dict[tuple[float, tuple[tuple[int, int], ...]], HostClass] = {}
    for number, rank, low, high in zip(numbers, first, start, [*start[1:], len(pairs)], strict=True):
        members = tuple(zip((pairs[low:high] % len(table)).tolist(), ranks[low:high].tolist(), strict=True))
        capacity = cluster.node_kind(int(devices[rank])).host.memory
        result.setdefault((capacity, members), HostClass(f"host {number}", capacity, members))
    return tuple(result.values())


def host_residents(machine: Machine, costs: StageCosts, plan: Plan) -> Iterator[tuple[float, float]]:
    """Yield for every kind of host the bytes that its ranks keep there for the whole step, and the bytes that it has.

    What they hold there for part of the step is not among it.
    """
    by_class = np.zeros(len(machine.table))
    for change in residents(machine, costs, plan, on_host(costs, plan)):
        if change.host:
            by_class[change.rank_class] += change.size
    for host in hosts(machine):
        yield sum(by_class[index] * ranks for index, ranks in host.members), host.capacity
