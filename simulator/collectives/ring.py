"""Rings through all ranks of a group, as many at the same time as its nodes can feed.

The wiring of a node decides which rings there are inside it.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from meshwise.simulator.collectives.placement import Placement
from meshwise.simulator.collectives.traffic import Edges, Phase, build_phase, traffic, with_launch
from meshwise.simulator.interconnect.routes import FloatArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Graph, Mesh, NodeNetwork, Ring, Torus

_MAX_STEPS = 20_000
"""Steps after which the search for one more ring through a mesh ends."""


def node_rings(cluster: Cluster, placement: Placement, *, is_open: bool = False) -> Edges:
    """Return the edges of rings through the ranks of every seat; every rank sends one byte in all.

    With ``is_open`` they are parts of rings, or of trees, that continue on other nodes: in groups of several nodes each
    ring of ``k`` ranks is open, with ``k - 1`` edges.

    Behind switches one ring follows the order of devices. If devices are wired to each other, rings that share no wire
    run at the same time, as NCCL and RCCL build them: both directions of a ring, all pairs of a full mesh (the mean
    over all orders), or as many rings as a search packs into other wires.
    """
    rank = np.flatnonzero(placement.size[placement.seat] > 1)
    kind = cluster.node_kinds[cluster.device_nodes[placement.device[rank]]]
    parts: list[_Columns] = []
    for index, (node, _) in enumerate(cluster.nodes):
        network = None if isinstance(cluster.fabric, Torus | Graph) else node.network
        kind_ranks = rank[kind == index]
        if len(kind_ranks):
            parts.extend(_rings(cluster, placement, kind_ranks, network))
    empty = np.zeros(0, dtype=np.int64)
    columns = zip(*parts, strict=True) if parts else ((empty,), (empty,), (np.zeros(0),))
    source, target, weight = (np.concatenate(column) for column in columns)
    if is_open:
        count = placement.size[placement.seat[source]]
        weight = np.where(placement.nodes[placement.group_of[source]] > 1, weight * (count - 1) / count, weight)
    return Edges(placement.group_of[source], placement.device[source], placement.device[target], weight)


_Columns = tuple[IntArray, IntArray, FloatArray]


def _rings(cluster: Cluster, placement: Placement, rank: IntArray, network: NodeNetwork | None) -> Iterator[_Columns]:
    """Yield (source, target, weight) of the rings through ``rank``, complete seats on one kind of node."""
    count = placement.size[placement.seat[rank]]
    if isinstance(network, Mesh) and network.pairs:
        yield from _packed_rings(cluster, placement, rank, network.pairs)
    elif isinstance(network, Mesh):
        for offset in range(1, int(count.max())):
            has_offset = offset < count
            yield rank[has_offset], _shift_ranks(placement, rank[has_offset], offset), 1.0 / (count[has_offset] - 1)
    elif isinstance(network, Ring):
        for offset in (1, -1):
            yield rank, _shift_ranks(placement, rank, offset), np.full(len(rank), 0.5)
    else:
        yield rank, _shift_ranks(placement, rank, 1), np.ones(len(rank))


def _shift_ranks(placement: Placement, rank: IntArray, offset: int) -> IntArray:
    """Return the ranks that are ``offset`` positions further around their seats."""
    seat = placement.seat[rank]
    target: IntArray = placement.start[seat] + (placement.local[rank] + offset) % placement.size[seat]
    return target


def _packed_rings(
    cluster: Cluster, placement: Placement, rank: IntArray, pairs: tuple[tuple[int, int, int], ...]
) -> Iterator[_Columns]:
    """Yield (source, target, weight) of the rings that a search packs into the wires ``pairs`` of a mesh."""
    # Seats with the same devices inside their node have the same rings: one search serves all.
    seats = np.unique(placement.seat[rank])
    for count in np.unique(placement.size[seats]):
        start = placement.start[seats[placement.size[seats] == count]]
        device = placement.device[start[:, None] + np.arange(count)]
        local = device - cluster.first_devices[cluster.device_nodes[device]]
        for devices in np.unique(local, axis=0):
            first_rank = start[(local == devices).all(axis=1)]
            cycles = _find_cycles(pairs, tuple(devices.tolist()))
            for cycle in cycles:
                for source, target in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                    yield first_rank + source, first_rank + target, np.full(len(first_rank), 1.0 / len(cycles))


@lru_cache(maxsize=1024)
def _find_cycles(pairs: tuple[tuple[int, int, int], ...], devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return rings through all ``devices`` that share no wire, in both directions, as indices into ``devices``.

    If no ring fits into the wires, one follows the order of the devices.

    >>> _find_cycles(((0, 1, 1), (1, 2, 1), (0, 2, 1)), (0, 1, 2))
    ((0, 1, 2), (2, 1, 0))
    """
    place = {device: index for index, device in enumerate(devices)}
    wires = np.zeros((len(devices), len(devices)), dtype=np.int64)
    for a, b, links in pairs:
        if a in place and b in place:
            wires[place[a], place[b]] += links
            wires[place[b], place[a]] += links
    cycles: list[tuple[int, ...]] = []
    while (cycle := _find_cycle(wires)) is not None:
        cycles.append(cycle)
        for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            wires[a, b] -= 1
            wires[b, a] -= 1
    rings = cycles or [tuple(range(len(devices)))]
    return tuple(direction for ring in rings for direction in (ring, ring[::-1]))


def _find_cycle(wires: IntArray) -> tuple[int, ...] | None:
    """Return a Hamiltonian ring over ``wires``, found by depth-first search; ``None`` if there is none in time."""
    path, choices, steps = [0], [_list_neighbours(wires, 0, [0])], 0
    while choices and steps < _MAX_STEPS:
        steps += 1
        if len(path) == len(wires) and wires[path[-1], 0] > 0:
            return tuple(path)
        if choices[-1]:
            path.append(choices[-1].pop())
            choices.append(_list_neighbours(wires, path[-1], path))
        else:
            path.pop()
            choices.pop()
    return None


def _list_neighbours(wires: IntArray, vertex: int, path: list[int]) -> list[int]:
    # The search pops from the end: the neighbour with the most wires is tried first, and the fewest are used up last.
    candidates = [int(neighbour) for neighbour in np.flatnonzero(wires[vertex]) if int(neighbour) not in path]
    return sorted(candidates, key=lambda neighbour: (wires[vertex, neighbour], -neighbour))


def ring(cluster: Cluster, placement: Placement, rounds: int) -> tuple[Phase, ...]:
    """Return the one phase of rings that pass the buffer around ``rounds`` times.

    A step costs the mean latency of a ring's edges, and ``rounds * (n - 1) / n`` bytes cross each edge for every byte
    of size [1]_. A group that spans nodes has as many rings (channels) as it has ranks on the node with the fewest, so
    that as many NICs work at the same time. Channel ``c`` enters even nodes at rank ``c`` and leaves them at ``c + 1``;
    in odd nodes it is the reverse. So both ends of a hop are on the same rail, except for the hop that closes an odd
    number of nodes. Inside a node the copy of a rank's own part counts (`CommunicationLibrary`).

    References
    ----------
    .. [1] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
       workstations", J. Parallel Distrib. Comput. 69(2), 2009.
    """
    edges = [node_rings(cluster, placement, is_open=True), _node_hops(placement)]
    link_traffic = traffic(cluster, placement.num_groups, edges)
    rate = rounds * (placement.ranks - 1) / placement.ranks
    self_copy = np.where(placement.nodes == 1, cluster.library.own, 0.0) / placement.ranks
    return with_launch(cluster, build_phase(link_traffic, rate * link_traffic.delay, rate + self_copy))


def _node_hops(placement: Placement) -> Edges:
    """Return the edges from every node to the next; a node sends one byte over all channels together."""
    rails = count_rails(placement)
    seat, channel = channels(placement, rails)
    next_seat = placement.neighbour(1)[seat]
    count = rails[placement.group[seat]]
    next_channel = (channel + 1) % count
    source = placement.start[seat] + np.where(placement.position[seat] % 2 == 0, next_channel, channel)
    target = placement.start[next_seat] + np.where(placement.position[next_seat] % 2 == 0, channel, next_channel)
    return Edges(placement.group[seat], placement.device[source], placement.device[target], 1.0 / count)


_RACK = 32
"""Ranks of a node above which it is a rack: NVLink joins no more of them in one server."""
_RACK_RAILS = 10
"""Ranks of a rack whose NICs carry a ring or tree to other racks.

An all-reduce of 16 GiB over 2 racks of 72 GB200 has a bus bandwidth of 810 GB/s and over 20 racks of 406 GB/s
(coreweave/nccl-tests README.md). A tree puts the size on the NICs of a node of two once, and twice on those of an inner
node of many; both say that 405 GB/s leave a rack, of the 3,600 GB/s of its 72 NICs: 10 of them at 0.84 of line rate.
"""


def count_rails(placement: Placement) -> IntArray:
    """Return for every group how many ranks of a node send to other nodes in rings and trees."""
    return np.where(placement.channels > _RACK, _RACK_RAILS, placement.channels)


def channels(placement: Placement, rails: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Return all pairs (seat, channel) of groups that span nodes; ``rails`` limits the channels of every group."""
    width = np.where(placement.nodes > 1, placement.channels if rails is None else rails, 0)[placement.group]
    seat = np.repeat(np.arange(len(width)), width)
    return seat, np.arange(len(seat)) - np.repeat(np.cumsum(width) - width, width)
