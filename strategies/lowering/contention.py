"""What may disturb the collectives of a tensor group, and so how its passes become tasks."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import numpy as np

from simulator.collective_kinds import Collective
from strategies.lowering.data import reduction
from strategies.lowering.placed import BACKWARD, FORWARD, tenant_kind, tied_kind
from strategies.lowering.stage import Machine
from strategies.mesh import DATA, TENSOR
from strategies.plan import Plan


class Passes(StrEnum):
    """What runs a pass of a stage.

    ``rank``: each class of ranks alone; nothing can disturb the collectives inside. ``group``: its ranks,
    of several classes that compute alike, together. ``apart``: collectives are tasks of their own.
    """

    RANK = "rank"
    GROUP = "group"
    APART = "apart"


def passes(machine: Machine, plan: Plan, overlaps: bool, tied: Sequence[tuple[int, int, int]]) -> tuple[Passes, ...]:
    """Return for every pipeline position how its passes run.

    Ranks of one tensor group that compute alike stay together, because their first collective makes
    them wait for the last: the group ends a pass when that one would, were it alone.
    """
    table = machine.table
    result = [Passes.RANK] * plan.pipeline
    if plan.tensor == 1:
        return tuple(result)
    disturbed = _disturbed(machine, plan, overlaps, tied)
    for index, members in enumerate(table.tables[TENSOR].classes):
        position = table.positions[members[0]]
        if result[position] is not Passes.APART:
            if index in disturbed or len({machine.rank(member).key for member in members}) > 1:
                result[position] = Passes.APART
            elif len(members) > 1:
                result[position] = Passes.GROUP
    return tuple(result)


def _disturbed(machine: Machine, plan: Plan, overlaps: bool, tied: Sequence[tuple[int, int, int]]) -> frozenset[int]:
    """Return the classes of tensor groups on whose links others may move bytes while their collectives do."""
    table = machine.table
    groups, links = table.users(TENSOR, Collective.ALL_REDUCE)
    users = np.bincount(links, minlength=len(table.first_link))
    later: dict[int, list[tuple[str, int]]] = {}
    for kind, collective, after in _others(machine, plan, overlaps, tied):
        index, used = table.users(kind, collective)
        if not after:
            users += np.bincount(used, minlength=len(users))
            continue
        shared = users[used] > 0
        for group, link in zip(index[shared].tolist(), used[shared].tolist(), strict=True):
            later.setdefault(link, []).append((kind, group))
    result = set(groups[users[links] > 1].tolist())
    for group, link in zip(groups.tolist(), links.tolist(), strict=True):
        if link in later and not all(_follows(machine, group, *other) for other in later[link]):
            result.add(group)
    return frozenset(result)


def _others(
    machine: Machine, plan: Plan, overlaps: bool, tied: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[str, Collective, bool]]:
    """Yield other kinds of groups, what they run, and whether they start when their members' passes are done."""
    kinds = [(kind, Collective.SEND, False) for kind in (FORWARD, BACKWARD)]
    kinds += [(tenant_kind(n), tenant.collective, False) for n, tenant in enumerate(machine.table.cluster.tenants)]
    kinds += [(DATA, reduction(plan), not overlaps)]
    kinds += [(tied_kind(first, second), Collective.ALL_REDUCE, True) for first, second, _ in tied]
    return (each for each in kinds if each[0] in machine.table.tables)


def _follows(machine: Machine, tensor: int, kind: str, group: int) -> bool:
    """Return whether a group starts after the passes of a tensor group: it has a member there."""
    own = set(machine.table.tables[TENSOR].classes[tensor])
    return bool(own & set(machine.table.tables[kind].classes[group]))
