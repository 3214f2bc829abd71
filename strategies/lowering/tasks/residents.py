"""Residents: what ranks and hosts hold for a whole step, rank class by rank class.

The ranks of a pipeline position keep some of it on their hosts. Without a flush some is kept more than once: versions
of weights, and buffers of gradients.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.program import Category, HostClass, MemoryChange
from meshwise.strategies.lowering.costs.memory import ONCE, Copies, resident
from meshwise.strategies.lowering.costs.offload import OnHost
from meshwise.strategies.lowering.costs.optimizer import updated_parameters
from meshwise.strategies.lowering.costs.stage import StageCosts
from meshwise.strategies.lowering.rank_classes.machine import Machine, Rank
from meshwise.strategies.lowering.tasks.data_parallel import overlaps
from meshwise.strategies.plan.mesh import data_ranks
from meshwise.strategies.plan.plan import Plan, blocks_on_host


def on_host(costs: StageCosts, plan: Plan) -> tuple[OnHost, ...]:
    """Return what ranks keep on their hosts for the whole step, by position; a tied parameter is there once."""
    return tuple(_at(costs, plan, position) for position in range(plan.pipeline))


def _at(costs: StageCosts, plan: Plan, position: int) -> OnHost:
    """Return what ranks of a position keep on their hosts for the whole step."""
    fraction = plan.offload.at("optimizer", position)
    if not plan.offload.in_passes:
        return OnHost(fraction)
    found = costs.of(plan)
    stages, held = plan.stages_at(position), found.held.positions[position]
    away = [block for stage in stages for block in found.stages[stage].blocks[: blocks_on_host(plan, stage)]]
    elements = updated_parameters(plan, sum(b.parameters for b in away), sum(b.experts for b in away))
    most = updated_parameters(plan, held.elements, held.experts)
    return OnHost(fraction, min(elements, most))


def buffer(costs: StageCosts, plan: Plan, position: int, rank: Rank) -> int:
    """Return the bytes of one of the two buffers through which activations of a position move to the host and back."""
    if not plan.offload.in_passes:
        return 0
    stages = (costs.stage(plan, stage, rank) for stage in plan.stages_at(position))
    return max((block.away for stage in stages for block in stage.blocks), default=0)


class Updates(NamedTuple):
    """When stages update their weights.

    ``interval`` is the number of backwards of a stage between updates, and ``is_late`` says for every position whether
    its update waits until it is due.
    """

    every: int
    late: tuple[bool, ...]


def updates(costs: StageCosts, plan: Plan) -> Updates:
    """Return when the stages of a plan update their weights."""
    beneath = overlaps(costs.problem.cluster, plan) or any(plan.offload.optimizer)
    tied = {max(pair) for *pair, _ in costs.tied(plan)}  # the other one makes its gradients after that
    once = plan.asynchronous and not plan.rule.updates_every_microbatch
    late = tuple(once and (beneath or position in tied) for position in range(plan.pipeline))
    return Updates(plan.num_microbatches // plan.updates, late)


def copies(costs: StageCosts, plan: Plan) -> tuple[Copies, ...]:
    """Return, for every pipeline position, how often weights and gradients are kept.

    A version of the weights is what forward and backward read; the optimizer's states and the main copy are kept once.
    Weight stashing keeps one version for every microbatch in flight (Narayanan et al., "PipeDream", SOSP 2019,
    section 3.3), 2BW keeps two (Narayanan et al., ICML 2021, section 3.1).
    """
    if not plan.asynchronous:
        return (ONCE,) * plan.pipeline
    late = updates(costs, plan).late
    return tuple(Copies(plan.weight_versions(position), 1 + waits) for position, waits in enumerate(late))


def residents(
    machine: Machine, costs: StageCosts, plan: Plan, host_shares: Sequence[OnHost]
) -> tuple[MemoryChange, ...]:
    """Return what every rank class holds for the whole step; ``host_shares`` is the part on hosts by position."""
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
    """Return the hosts that differ in memory or in their number of ranks of every class, one of each kind."""
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
    """Yield, for every kind of host, the bytes that its ranks keep there for the whole step, and its memory in bytes.

    What they keep there for a part of the step is not included.
    """
    by_class = np.zeros(len(machine.table))
    for change in residents(machine, costs, plan, on_host(costs, plan)):
        if change.host:
            by_class[change.rank_class] += change.size
    for host in hosts(machine):
        yield sum(by_class[index] * ranks for index, ranks in host.members), host.capacity
