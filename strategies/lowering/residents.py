"""What ranks and hosts hold for a whole step, class by class."""

from collections.abc import Sequence

import numpy as np

from simulator.interconnect.interconnect import interconnect
from simulator.program import Category, HostClass, MemoryChange
from strategies.local_batches import data_ranks
from strategies.lowering.copies import copies
from strategies.lowering.machine import Machine
from strategies.lowering.memory import resident
from strategies.lowering.offload import OnHost
from strategies.lowering.on_host import buffer
from strategies.lowering.stage import StageCosts
from strategies.plan import Plan


def residents(machine: Machine, costs: StageCosts, plan: Plan, on_host: Sequence[OnHost]) -> tuple[MemoryChange, ...]:
    """Return what every rank class holds for the whole step; ``on_host`` says for each position what is there."""
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
            own = held[position], buffers, 0, on_host[position], several[position]
            known[key] = resident(rank.accelerator, training, plan, *own)
        states = updates(machine, plan, index)
        changes += [
            MemoryChange(index, *change[1:])
            for change in known[key]
            if states or change.category is not Category.OPTIMIZER
        ]
    return tuple(changes)


def updates(machine: Machine, plan: Plan, rank_class: int) -> bool:
    """Return whether ranks of a class update parameters; with a server only the first data rank does.

    Experts that ranks share have servers of their own.
    """
    if plan.gradient_reduction != "parameter_server" or plan.expert > 1:
        return True
    return rank_class in machine.table.class_of[data_ranks(plan.mesh) == 0]


def hosts(machine: Machine) -> tuple[HostClass, ...]:
    """Return the hosts of the classes' representatives, with the ranks that each holds of every class."""
    network, table = interconnect(machine.table.cluster), machine.table
    devices = table.placed.devices
    host_of = network.host_of(devices)
    found: dict[tuple[tuple[int, int], ...], HostClass] = {}
    for rank in table.first.tolist():
        classes, counts = np.unique(table.class_of[host_of == host_of[rank]], return_counts=True)
        members = tuple(zip(classes.tolist(), counts.tolist(), strict=True))
        capacity = table.cluster.node_kind(int(devices[rank])).host.memory
        found.setdefault(members, HostClass(f"host {host_of[rank]}", capacity, members))
    return tuple(found.values())
