"""What may disturb the collectives inside passes, and so how passes become tasks."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import StrEnum

import numpy as np

from simulator.collective_kinds import Collective
from strategies.lowering.data import reduction
from strategies.lowering.machine import INSIDE, Machine
from strategies.lowering.placed import BACKWARD, FORWARD, HOST_KINDS, hop_kind, tenant_kind, tied_kind
from strategies.mesh import DATA, EXPERT_DATA, REPLICA, TENSOR
from strategies.offloading import FROM_HOST, TO_HOST
from strategies.plan import Plan

_Group = tuple[str, int]
"""A class of groups, by kind and index."""


class Passes(StrEnum):
    """What runs a pass of a stage.

    ``rank``: each class of ranks alone; nothing can disturb the collectives inside. ``group``: its ranks,
    of several classes that compute alike, together: those that come first are shown to wait before the pass, not in its
    first collective. ``apart``: collectives are tasks of their own.
    """

    RANK = "rank"
    GROUP = "group"
    APART = "apart"


def passes(
    machine: Machine,
    plan: Plan,
    in_buckets: bool,
    tied: Sequence[tuple[int, int, int]],
    replicated: Sequence[str],
    drifts: Callable[[int], bool],
) -> tuple[Passes, ...]:
    """Return for every pipeline position how its passes run; along ``replicated`` axes gradients are summed.

    Ranks of one tensor group that compute alike stay together, because their first collective makes
    them wait for the last: the group ends a pass when that one would, were it alone. Where ``drifts`` of
    a position, they need not wait for one another, for every collective may end before the work that it runs beside.
    """
    table = machine.table
    result = [Passes.RANK] * plan.pipeline
    inside = [kind for kind in INSIDE if kind in table.tables]
    if inside and plan.overlaps_passes:
        return (Passes.APART,) * plan.pipeline
    disturbed = _disturbed(machine, inside, plan, _others(machine, plan, in_buckets, tied, replicated))
    for kind in inside:
        for index, members in enumerate(table.tables[kind].classes):
            position = table.positions[members[0]]
            if (kind, index) in disturbed or len({machine.rank(member).key for member in members}) > 1:
                result[position] = Passes.APART
            elif len(members) > 1 and result[position] is not Passes.APART:
                together = inside == [TENSOR] and not drifts(position)
                result[position] = Passes.GROUP if together else Passes.APART
    return tuple(result)


def _disturbed(
    machine: Machine, inside: Sequence[str], plan: Plan, beside: Iterable[tuple[str, Collective, bool]]
) -> frozenset[_Group]:
    """Return the classes of groups on whose links others, as `_others` yields them, may move bytes as they do.

    Two groups with a common member take turns, for it runs one collective after another.
    """
    runs = [(kind, INSIDE[kind][0]) for kind in inside]
    runs += [each for each in machine.table.placed.exchanges.items() if each[0] in inside]
    own, others = _users(machine, runs), dict[int, list[_Group]]()
    busy = np.zeros(len(machine.table.first_link), dtype=bool)
    for kind, collective, after in beside:
        if after:
            for link, found in _users(machine, [(kind, collective)], own).items():
                others.setdefault(link, []).extend(found)
        else:
            busy[machine.table.users(kind, collective)[1]] = True
    result: set[_Group] = set()
    for link, groups in own.items():
        met = [*groups, *others.get(link, ())]
        if busy[link]:
            result.update(groups)
        elif len(met) > 1:
            result.update(group for group in groups if any(not _take_turns(machine, group, each) for each in met))
    return frozenset(result)


def _users(
    machine: Machine, runs: Iterable[tuple[str, Collective]], on: Container[int] | None = None
) -> dict[int, list[_Group]]:
    """Return for every link class the group classes that use it, as (kind, index)."""
    result: dict[int, list[_Group]] = {}
    for kind, collective in runs:
        index, links = machine.table.users(kind, collective)
        for group, link in zip(index.tolist(), links.tolist(), strict=True):
            if on is None or link in on:
                result.setdefault(link, []).append((kind, group))
    return result


def _take_turns(machine: Machine, first: _Group, second: _Group) -> bool:
    """Return whether two groups have a common member."""
    tables = machine.table.tables
    return not set(tables[first[0]].classes[first[1]]).isdisjoint(tables[second[0]].classes[second[1]])


def _others(
    machine: Machine, plan: Plan, in_buckets: bool, tied: Sequence[tuple[int, int, int]], replicated: Sequence[str]
) -> Iterator[tuple[str, Collective, bool]]:
    """Yield other kinds of groups, what they run, and whether they start when their members' passes are done."""
    hops = (hop_kind(*pair) for pair in plan.hops)
    kinds = [(kind, Collective.SEND, False) for kind in (FORWARD, BACKWARD, *hops)]
    kinds += [(tenant_kind(n), tenant.collective, False) for n, tenant in enumerate(machine.table.cluster.tenants)]
    kinds += [(kind, reduction(plan), not in_buckets) for kind in (DATA, EXPERT_DATA)]
    kinds += [(REPLICA, Collective.ALL_REDUCE, not in_buckets)]
    kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero >= 3]
    kinds += [(kind, Collective.SEND, False) for kind in (TO_HOST, FROM_HOST) if plan.offload.in_passes]
    if plan.asynchronous:  # weights are updated beneath the passes of others, or their own
        kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero]
        kinds += [(kind, Collective.SEND, False) for kind in HOST_KINDS if plan.offload]
        kinds += [(axis, Collective.ALL_REDUCE, False) for axis in replicated]
    kinds += [(tied_kind(first, second), Collective.ALL_REDUCE, not plan.asynchronous) for first, second, _ in tied]
    return (each for each in kinds if each[0] in machine.table.tables)
