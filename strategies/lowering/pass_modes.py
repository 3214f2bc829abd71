"""Whether ranks run a pass alone, as a group, or each collective by itself: what may disturb collectives in passes."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import StrEnum

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.rank_classes.machine import Machine
from meshwise.strategies.lowering.rank_classes.placement import tenant_kind
from meshwise.strategies.lowering.tasks.data_parallel import choose_reduction
from meshwise.strategies.plan.mesh import (
    BACKWARD,
    DATA,
    EXPERT_DATA,
    FORWARD,
    PASS_AXES,
    REPLICA,
    TENSOR,
    hop_kind,
    tied_kind,
)
from meshwise.strategies.plan.offloading import FROM_HOST, HOST_KINDS, TO_HOST
from meshwise.strategies.plan.plan import Plan

_GroupClass = tuple[str, int]
"""A group class, by kind and index."""


class PassMode(StrEnum):
    """How a pass of a stage runs.

    ``rank``: each rank class runs it alone; nothing can disturb the collectives inside. ``group``: the ranks of a
    group, of several classes that compute alike, run it together: early ones are shown to wait before the pass, not in
    its first collective. ``separate``: collectives are tasks of their own.
    """

    RANK = "rank"
    GROUP = "group"
    SEPARATE = "separate"


def choose_pass_modes(
    machine: Machine,
    plan: Plan,
    in_buckets: bool,
    tied_sums: Sequence[tuple[int, int, int]],
    replicated_axes: Sequence[str],
    can_drift: Callable[[int], bool],
) -> tuple[PassMode, ...]:
    """Return, for every pipeline position, how its passes run.

    Ranks of one tensor group that compute alike stay together, because their first collective makes them wait for the
    last: the group ends a pass when that one would, were it alone. Where ``can_drift`` of a position is true they need
    not wait for one another, because every collective may end before the work that it overlaps. Along
    ``replicated_axes`` gradients are summed.
    """
    table = machine.table
    result = [PassMode.RANK] * plan.pipeline
    pass_kinds = [kind for kind in PASS_AXES if kind in table.tables]
    # Two passes take turns at collectives, which must be tasks for that.
    if pass_kinds and plan.overlaps_passes:
        return (PassMode.SEPARATE,) * plan.pipeline
    disturbed = _find_disturbed(
        machine, pass_kinds, _list_others(machine, plan, in_buckets, tied_sums, replicated_axes)
    )
    for kind in pass_kinds:
        for index, members in enumerate(table.tables[kind].classes):
            position = table.positions[members[0]]
            if (kind, index) in disturbed or len({machine.rank(member) for member in members}) > 1:
                result[position] = PassMode.SEPARATE
            elif len(members) > 1 and result[position] is not PassMode.SEPARATE:
                runs_as_group = pass_kinds == [TENSOR] and not can_drift(position)
                result[position] = PassMode.GROUP if runs_as_group else PassMode.SEPARATE
    return tuple(result)


def _find_disturbed(
    machine: Machine, pass_kinds: Sequence[str], other_collectives: Iterable[tuple[str, Collective, bool]]
) -> frozenset[_GroupClass]:
    """Return the group classes on whose links other groups, as `_list_others` yields them, may move bytes meanwhile.

    Two groups with a common member take turns, because a rank runs one collective after another.
    """
    runs = [(kind, PASS_AXES[kind].collectives[0]) for kind in pass_kinds]
    runs += [entry for entry in machine.table.placed.extra_collectives.items() if entry[0] in pass_kinds]
    own_users, other_users = _list_users(machine, runs), dict[int, list[_GroupClass]]()
    is_busy = np.zeros(len(machine.table.link_representatives), dtype=bool)
    for kind, collective, is_late in other_collectives:
        if is_late:
            for link, new_groups in _list_users(machine, [(kind, collective)], own_users).items():
                other_users.setdefault(link, []).extend(new_groups)
        else:
            is_busy[machine.table.find_users(kind, collective)[1]] = True
    result: set[_GroupClass] = set()
    for link, groups in own_users.items():
        rivals = [*groups, *other_users.get(link, ())]
        if is_busy[link]:
            result.update(groups)
        elif len(rivals) > 1:
            result.update(group for group in groups if any(not _take_turns(machine, group, entry) for entry in rivals))
    return frozenset(result)


def _list_users(
    machine: Machine, runs: Iterable[tuple[str, Collective]], wanted_links: Container[int] | None = None
) -> dict[int, list[_GroupClass]]:
    """Return, for every link class, the group classes that use it, as (kind, index)."""
    result: dict[int, list[_GroupClass]] = {}
    for kind, collective in runs:
        index, links = machine.table.find_users(kind, collective)
        for group, link in zip(index.tolist(), links.tolist(), strict=True):
            if wanted_links is None or link in wanted_links:
                result.setdefault(link, []).append((kind, group))
    return result


def _take_turns(machine: Machine, first_group: _GroupClass, second_group: _GroupClass) -> bool:
    """Return whether two groups have a common member."""
    tables = machine.table.tables
    return not set(tables[first_group[0]].classes[first_group[1]]).isdisjoint(
        tables[second_group[0]].classes[second_group[1]]
    )


def _list_others(
    machine: Machine,
    plan: Plan,
    in_buckets: bool,
    tied_sums: Sequence[tuple[int, int, int]],
    replicated_axes: Sequence[str],
) -> Iterator[tuple[str, Collective, bool]]:
    """Yield other kinds of groups, their collectives, and whether these wait until their members' passes end."""
    hops = (hop_kind(*pair) for pair in plan.hops)
    kinds = [(kind, Collective.SEND, False) for kind in (FORWARD, BACKWARD, *hops)]
    kinds += [
        (tenant_kind(number), tenant.collective, False) for number, tenant in enumerate(machine.table.cluster.tenants)
    ]
    kinds += [(kind, choose_reduction(plan), not in_buckets) for kind in (DATA, EXPERT_DATA)]
    kinds += [(REPLICA, Collective.ALL_REDUCE, not in_buckets)]
    kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero >= 3]
    kinds += [(kind, Collective.SEND, False) for kind in (TO_HOST, FROM_HOST) if plan.offload.moves_in_passes]
    if plan.asynchronous:  # weights are updated beneath the passes of others, or their own
        kinds += [(kind, Collective.ALL_GATHER, False) for kind in (DATA, EXPERT_DATA) if plan.zero]
        kinds += [(kind, Collective.SEND, False) for kind in HOST_KINDS if plan.offload]
        kinds += [(axis, Collective.ALL_REDUCE, False) for axis in replicated_axes]
    kinds += [
        (tied_kind(first_position, second_position), Collective.ALL_REDUCE, not plan.asynchronous)
        for first_position, second_position, _ in tied_sums
    ]
    return (entry for entry in kinds if entry[0] in machine.table.tables)
