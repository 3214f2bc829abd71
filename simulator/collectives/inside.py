"""The rings that a collective takes inside a node, by how its devices are wired."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from simulator.cluster import Cluster
from simulator.collectives.placement import Placement
from simulator.collectives.traffic import Edges
from simulator.interconnect.kinds import Graph, Mesh, NodeNetwork, Ring, Torus
from simulator.interconnect.routes import FloatArray, IntArray

_SEARCH = 20_000
"""Steps after which the search for one more ring through a mesh gives up."""


def inside(cluster: Cluster, placement: Placement, *, through: bool = False) -> Edges:
    """Return rings through the ranks of every seat; every rank sends one byte in all.

    With ``through`` they are parts of rings, or of trees, that go on to other nodes: where a
    group has several, each ring of ``k`` ranks is open and has ``k - 1`` edges.

    Behind switches one ring follows the devices. Where devices are wired to each other, rings
    that share no wire run at once, as NCCL and RCCL build them: both ways round a ring, over
    all pairs of a full mesh (the mean over all orders), and else as many as a search packs.
    """
    rank = np.flatnonzero(placement.size[placement.seat] > 1)
    kind = cluster.node_kinds[cluster.device_nodes[placement.device[rank]]]
    parts: list[_Columns] = []
    for index, (node, _) in enumerate(cluster.nodes):
        network = None if isinstance(cluster.fabric, Torus | Graph) else node.network
        of_kind = rank[kind == index]
        if len(of_kind):
            parts.extend(_rings(cluster, placement, of_kind, network))
    empty = np.zeros(0, dtype=np.int64)
    columns = zip(*parts, strict=True) if parts else ((empty,), (empty,), (np.zeros(0),))
    source, target, weight = (np.concatenate(column) for column in columns)
    if through:
        count = placement.size[placement.seat[source]]
        weight = np.where(placement.nodes[placement.group_of[source]] > 1, weight * (count - 1) / count, weight)
    return Edges(placement.group_of[source], placement.device[source], placement.device[target], weight)


_Columns = tuple[IntArray, IntArray, FloatArray]


def _rings(cluster: Cluster, placement: Placement, rank: IntArray, network: NodeNetwork | None) -> Iterator[_Columns]:
    """Yield (source, target, weight) of the rings through ``rank``, whole seats of one kind of node."""
    count = placement.size[placement.seat[rank]]
    if isinstance(network, Mesh) and network.pairs:
        yield from _packed(cluster, placement, rank, network.pairs)
    elif isinstance(network, Mesh):
        for offset in range(1, int(count.max())):
            wired = offset < count
            yield rank[wired], _around(placement, rank[wired], offset), 1.0 / (count[wired] - 1)
    elif isinstance(network, Ring):
        for offset in (1, -1):
            yield rank, _around(placement, rank, offset), np.full(len(rank), 0.5)
    else:
        yield rank, _around(placement, rank, 1), np.ones(len(rank))


def _around(placement: Placement, rank: IntArray, offset: int) -> IntArray:
    """Return the ranks ``offset`` places further round their seats."""
    seat = placement.seat[rank]
    target: IntArray = placement.start[seat] + (placement.local[rank] + offset) % placement.size[seat]
    return target


def _packed(
    cluster: Cluster, placement: Placement, rank: IntArray, pairs: tuple[tuple[int, int, int], ...]
) -> Iterator[_Columns]:
    seats = np.unique(placement.seat[rank])
    for count in np.unique(placement.size[seats]):
        start = placement.start[seats[placement.size[seats] == count]]
        device = placement.device[start[:, None] + np.arange(count)]
        local = device - cluster.first_devices[cluster.device_nodes[device]]
        for devices in np.unique(local, axis=0):
            first = start[(local == devices).all(axis=1)]
            cycles = _cycles(pairs, tuple(devices.tolist()))
            for cycle in cycles:
                for source, target in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                    yield first + source, first + target, np.full(len(first), 1.0 / len(cycles))


@lru_cache(maxsize=1024)
def _cycles(pairs: tuple[tuple[int, int, int], ...], devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return rings through all ``devices``, as places in it, that share no wire; each also the other way round.

    Where no ring fits into the wires it follows the order of the devices.

    >>> _cycles(((0, 1, 1), (1, 2, 1), (0, 2, 1)), (0, 1, 2))
    ((0, 1, 2), (2, 1, 0))
    """
    place = {device: index for index, device in enumerate(devices)}
    wires = np.zeros((len(devices), len(devices)), dtype=np.int64)
    for a, b, links in pairs:
        if a in place and b in place:
            wires[place[a], place[b]] += links
            wires[place[b], place[a]] += links
    found: list[tuple[int, ...]] = []
    while (cycle := _hamiltonian(wires)) is not None:
        found.append(cycle)
        for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            wires[a, b] -= 1
            wires[b, a] -= 1
    rings = found or [tuple(range(len(devices)))]
    return tuple(way for ring in rings for way in (ring, ring[::-1]))


def _hamiltonian(wires: IntArray) -> tuple[int, ...] | None:
    """Return a ring over ``wires``, the most wired neighbours first, or ``None``."""
    path, choices, steps = [0], [_next(wires, 0, [0])], 0
    while choices and steps < _SEARCH:
        steps += 1
        if len(path) == len(wires) and wires[path[-1], 0] > 0:
            return tuple(path)
        if choices[-1]:
            path.append(choices[-1].pop())
            choices.append(_next(wires, path[-1], path))
        else:
            path.pop()
            choices.pop()
    return None


def _next(wires: IntArray, last: int, path: list[int]) -> list[int]:
    free = [int(other) for other in np.flatnonzero(wires[last]) if int(other) not in path]
    return sorted(free, key=lambda other: (wires[last, other], -other))
