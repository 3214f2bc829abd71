"""Collectives: the algorithm that runs one, its load on every link, and its time on an idle network.

``size`` is the buffer of one rank for all-reduce, push-pull, all-to-all, broadcast, send and shift, and the full
buffer, all shards together, for all-gather and reduce-scatter.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.hierarchical import hierarchical_phases
from meshwise.simulator.collectives.in_switch import fabric_reduces, in_switch_phases, switches_reduce
from meshwise.simulator.collectives.placement import Placement, place_groups
from meshwise.simulator.collectives.point_to_point import pairwise_exchange, parameter_server, send_phases, shift_phases
from meshwise.simulator.collectives.ring import ring
from meshwise.simulator.collectives.torus import torus_ring
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.collectives.tree import tree
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import BoolArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Mesh, Torus
from meshwise.simulator.memo import LatestResults

_SHARDED_ALGORITHMS = (Algorithm.RING, Algorithm.IN_SWITCH, Algorithm.HIERARCHICAL)
_ALGORITHMS = {
    Collective.ALL_REDUCE: (
        Algorithm.RING,
        Algorithm.TREE,
        Algorithm.IN_SWITCH,
        Algorithm.HIERARCHICAL,
        Algorithm.PARAMETER_SERVER,
    ),
    Collective.ALL_GATHER: _SHARDED_ALGORITHMS,
    Collective.REDUCE_SCATTER: _SHARDED_ALGORITHMS,
    Collective.BROADCAST: (Algorithm.RING, Algorithm.TREE),
    Collective.ALL_TO_ALL: (Algorithm.PAIRWISE,),
    Collective.SEND: (Algorithm.DIRECT,),
    Collective.SHIFT: (Algorithm.DIRECT,),
    Collective.PUSH_PULL: (Algorithm.PARAMETER_SERVER,),
}
"""Algorithms of every collective; of equally fast ones the first is chosen."""


def phases(cluster: Cluster, collective: Collective, algorithm: Algorithm, groups: IntArray) -> tuple[Phase, ...]:
    """Return the phases of a collective on each of ``groups``, rows of devices in rank order.

    Groups of one rank have no phases.

    Raises
    ------
    ValueError
        If a group cannot run the algorithm, or names a device twice.

    Examples
    --------
    A ring all-reduce of 8 GB over 4 nodes moves 2 * 3/4 * 8 GB = 12 GB over every NIC and its slot.

    >>> from meshwise.simulator.catalog import cluster
    >>> group = np.array([[0, 1, 2, 3]])
    >>> [phase] = phases(cluster("dgx-a100-80gb", 4, 1), Collective.ALL_REDUCE, Algorithm.RING, group)
    >>> sorted(set((8e9 * phase.load).tolist()))
    [12000000000.0]
    """
    if groups.ndim != 2 or groups.shape[1] < 1:
        raise ValueError(f"groups are rows of devices, met an array of shape {groups.shape}")
    if groups.shape[1] < 2 or not len(groups):
        return ()
    if collective is Collective.SEND and groups.shape[1] != 2:
        raise ValueError(f"a send has 2 ranks, met {groups.shape[1]}")
    if len(groups) == 1:
        return _cached_phases(cluster, collective, algorithm, tuple(groups[0].tolist()))
    key = cluster, collective, algorithm, groups.shape, groups.tobytes()
    return _PHASES.look_up(key, lambda: _measure_phases(_list_phases(cluster, collective, algorithm, groups), groups))


_PHASES: LatestResults[tuple[Phase, ...]] = LatestResults(max_bytes=2**27)
"""Phases of many groups at once: the plans of a search have few different groups, and come back to them."""


def _measure_phases(value: tuple[Phase, ...], groups: IntArray) -> tuple[tuple[Phase, ...], int]:
    """Return phases, which nobody may change from now on, and their bytes with those of their key."""
    arrays = [part for phase in value for part in phase if isinstance(part, np.ndarray)]
    for array in arrays:
        array.flags.writeable = False
    return value, groups.nbytes + sum(array.nbytes for array in arrays)


# Arrays have no hash: single groups are cached as tuples.
@lru_cache(maxsize=256)
def _cached_phases(
    cluster: Cluster, collective: Collective, algorithm: Algorithm, group: tuple[int, ...]
) -> tuple[Phase, ...]:
    groups = np.array([group])
    return _measure_phases(_list_phases(cluster, collective, algorithm, groups), groups)[0]


def _list_phases(cluster: Cluster, collective: Collective, algorithm: Algorithm, groups: IntArray) -> tuple[Phase, ...]:
    placement = place_groups(cluster, groups)
    failing_groups = np.flatnonzero(~_can_run(cluster, collective, algorithm, placement))
    if len(failing_groups):
        group = groups[failing_groups[0]]
        names = ", ".join(algorithms(cluster, collective, group))
        raise ValueError(f"the group of {group.tolist()[:8]} runs {collective} by {names}, met {algorithm}")
    rounds = 2 if collective is Collective.ALL_REDUCE else 1
    match algorithm:
        case Algorithm.RING if isinstance(cluster.fabric, Torus):
            return torus_ring(cluster, cluster.fabric, groups, collective)
        case Algorithm.RING:
            return ring(cluster, placement, rounds)
        case Algorithm.TREE:
            return tree(cluster, placement, rounds)
        case Algorithm.HIERARCHICAL:
            return hierarchical_phases(cluster, placement, collective)
        case Algorithm.IN_SWITCH:
            return in_switch_phases(cluster, groups, collective)
        case Algorithm.PARAMETER_SERVER:
            return parameter_server(cluster, groups)
        case Algorithm.PAIRWISE:
            return pairwise_exchange(cluster, groups)
        case _ if collective is Collective.SHIFT:
            return shift_phases(cluster, groups)
        case _:
            return send_phases(cluster, groups)


def algorithms(cluster: Cluster, collective: Collective, group: IntArray) -> tuple[Algorithm, ...]:
    """Return the algorithms that can run a collective on ``group``, without `Algorithm.MEASURED`."""
    return _list_algorithms(cluster, collective, tuple(np.asarray(group).tolist()))


@lru_cache(maxsize=4096)
def _list_algorithms(cluster: Cluster, collective: Collective, group: tuple[int, ...]) -> tuple[Algorithm, ...]:
    placement = place_groups(cluster, np.array([group]))
    return tuple(
        algorithm
        for algorithm in _ALGORITHMS[collective]
        if bool(_can_run(cluster, collective, algorithm, placement)[0])
    )


def _can_run(cluster: Cluster, collective: Collective, algorithm: Algorithm, placement: Placement) -> BoolArray:
    """Return for every group of a placement whether it can run a collective by ``algorithm``."""
    is_able = np.full(placement.num_groups, algorithm in _ALGORITHMS[collective])
    spans_nodes = placement.nodes > 1
    is_even = placement.channels == placement.max_ranks
    match algorithm:
        case Algorithm.DIRECT:
            is_able &= (placement.ranks == 2) | (collective is Collective.SHIFT)
        case Algorithm.TREE:
            is_able &= spans_nodes & (not isinstance(cluster.fabric, Torus))
        case Algorithm.HIERARCHICAL:
            is_able &= spans_nodes & is_even & (placement.channels > 1) & (not isinstance(cluster.fabric, Torus))
        case Algorithm.IN_SWITCH:
            reduces_inside = switches_reduce(cluster, placement)
            reduces_across = (
                np.full_like(reduces_inside, True)
                if fabric_reduces(cluster)
                else reduces_inside & (placement.channels > 1)
            )
            is_able &= np.where(
                spans_nodes, is_even & reduces_across & (collective is Collective.ALL_REDUCE), reduces_inside
            )
    return is_able


def candidates(cluster: Cluster, collective: Collective) -> tuple[Algorithm, ...]:
    """Return the algorithms that may be chosen on a cluster: the user's first, then those that libraries pick."""
    fixed_algorithm = dict(cluster.algorithms).get(collective)
    automatic_choices = _automatic_algorithms(cluster, collective)
    return automatic_choices if fixed_algorithm is None else tuple(dict.fromkeys((fixed_algorithm, *automatic_choices)))


def fastest_algorithms(cluster: Cluster, collective: Collective, group: IntArray) -> tuple[Algorithm, ...]:
    """Return the algorithms of `candidates` that no other algorithm on ``group`` beats at every size."""
    fixed_algorithm = dict(cluster.algorithms).get(collective)
    if fixed_algorithm in algorithms(cluster, collective, group):
        return (fixed_algorithm,)
    lines = _algorithm_lines(cluster, collective, tuple(np.asarray(group).tolist()))
    winners: set[Algorithm] = set()
    best_seconds = inf
    # In order of latency, a line is the fastest at some size only if no line before it is as fast per byte.
    for _, seconds, order in sorted(_sum_lines(lines)):
        if seconds < best_seconds * (1 - 1e-12):
            best_seconds = seconds
            winners.add(lines[order].algorithm)
    return tuple(line.algorithm for line in lines if line.algorithm in winners)


def _sum_lines(lines: Sequence["_Lines"]) -> Iterator[tuple[float, float, int]]:
    """Yield (latency, seconds per byte, index of the algorithm) for every choice of protocols for its phases."""
    for order, line in enumerate(lines):
        for choice in product(*line.phases):
            yield sum(latency for latency, _ in choice), sum(seconds for _, seconds in choice), order


def can_run(cluster: Cluster, collective: Collective, algorithm: Algorithm, groups: IntArray) -> BoolArray:
    """Return for every group whether it can run a collective by an algorithm."""
    return _can_run(cluster, collective, algorithm, place_groups(cluster, groups))


def idle_time(cluster: Cluster, phases: Sequence[Phase], group: int, size: float) -> float:
    """Return the seconds that one of the groups takes for ``size`` bytes on an idle network; 0 for no bytes.

    ``sum over phases of min over protocols of latency + size * max over links of load / bandwidth``.
    """
    return _total_time(_phase_lines(cluster, phases, group), size) if size > 0 else 0.0


_PhaseLines = tuple[tuple[tuple[float, float], ...], ...]
"""For every phase its protocols: latency in s and seconds per byte."""


def _total_time(phases: _PhaseLines, size: float) -> float:
    return sum(min(latency + size * seconds for latency, seconds in phase) for phase in phases)


def _phase_lines(cluster: Cluster, phases: Sequence[Phase], group: int) -> _PhaseLines:
    """Return latency and seconds per byte of every protocol of every phase on an idle network."""
    bandwidth = interconnect(cluster).bandwidth
    lines = []
    for phase in phases:
        start, stop = np.searchsorted(phase.group, (group, group + 1))
        idle_seconds = float(np.max(phase.load[start:stop] / bandwidth[phase.link[start:stop]], initial=0.0))
        launch = None if phase.launch is None else float(phase.launch[group])
        costs = cluster.library.list_protocol_costs(float(phase.latency[group]), launch, phase.messages)
        lines.append(tuple((latency, idle_seconds * bytes_moved) for latency, bytes_moved in costs))
    return tuple(lines)


def measured_time(cluster: Cluster, collective: Collective, ranks: int, size: float) -> float | None:
    """Return the seconds of a measured curve; ``None`` if the cluster has no curve for that group size."""
    for curve in cluster.collectives:
        if curve.collective is collective and curve.ranks == ranks:
            return curve.time(size) if size > 0 else 0.0
    return None


def choose(cluster: Cluster, collective: Collective, group: IntArray, size: float) -> Algorithm:
    """Return the algorithm that runs a collective of ``size`` bytes on ``group``.

    It is `Algorithm.MEASURED` if the cluster has a curve for that collective and group size; else the user's, if the
    group can run it; else the fastest on an idle network of those that libraries pick: NCCL's tuner compares ring, tree
    and in-switch, and HCCL uses two levels on devices that are wired to each other.

    Raises
    ------
    ValueError
        If the user fixed an algorithm that never runs this collective.
    """
    if measured_time(cluster, collective, len(group), size) is not None:
        return Algorithm.MEASURED
    fixed_algorithm = dict(cluster.algorithms).get(collective)
    if fixed_algorithm is not None and fixed_algorithm not in _ALGORITHMS[collective]:
        raise ValueError(f"{collective} runs by {', '.join(_ALGORITHMS[collective])}, met {fixed_algorithm}")
    options = algorithms(cluster, collective, group)
    if not options:
        raise ValueError(f"a {collective} has 2 ranks, met {len(group)}")
    if fixed_algorithm in options:
        return fixed_algorithm
    lines = _algorithm_lines(cluster, collective, tuple(np.asarray(group).tolist()))
    return min(lines, key=lambda line: _total_time(line.phases, size)).algorithm


def _automatic_algorithms(cluster: Cluster, collective: Collective) -> tuple[Algorithm, ...]:
    """Return the algorithms of a collective among which libraries pick."""
    is_wired = all(isinstance(node.network, Mesh) and not node.network.pairs for node, _ in cluster.nodes)
    exclusions = set() if is_wired else {Algorithm.HIERARCHICAL}
    # Only a user's choice makes an all-reduce run by a server.
    if collective is Collective.ALL_REDUCE:
        exclusions.add(Algorithm.PARAMETER_SERVER)
    return tuple(algorithm for algorithm in _ALGORITHMS[collective] if algorithm not in exclusions)


class _Lines(NamedTuple):
    """Time of an algorithm on an idle network: for every phase a straight line over the size for each protocol.

    There are no phases if there is no other algorithm to compare it with.
    """

    algorithm: Algorithm
    phases: _PhaseLines


@lru_cache(maxsize=4096)
def _algorithm_lines(cluster: Cluster, collective: Collective, group: tuple[int, ...]) -> tuple[_Lines, ...]:
    """Return the lines of all algorithms among which libraries pick on ``group``."""
    choices = [
        algorithm
        for algorithm in _list_algorithms(cluster, collective, group)
        if algorithm in _automatic_algorithms(cluster, collective)
    ]
    if len(choices) == 1:
        return (_Lines(choices[0], ()),)
    parts = [(algorithm, phases(cluster, collective, algorithm, np.array([group]))) for algorithm in choices]
    return tuple(_Lines(algorithm, _phase_lines(cluster, part, 0)) for algorithm, part in parts)
