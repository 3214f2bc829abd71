"""Rank classes: ranks that do the same at the same time, found by colour refinement.

Ranks start with the colour of their stage and of how their groups lie on the machine, and
are split by the colours in their groups until nothing changes. Equal colours then have
equal sets of predecessors, so that one rank of a class stands for all of it.

References
----------
Weisfeiler and Leman 1968 (1-dimensional colour refinement).
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from simulator.cluster import Cluster
from simulator.program import RankClass
from strategies.lowering.operator import GroupShape
from strategies.mesh import DATA, PIPELINE, TENSOR, Mesh

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ClassTable:
    """The rank classes of a mesh on a machine, and which class each rank is in."""

    cluster: Cluster
    mesh: Mesh
    members: tuple[tuple[int, ...], ...]
    class_of: tuple[int, ...]

    def rank_classes(self, num_stages: int) -> tuple[RankClass, ...]:
        """Return the classes with the pipeline stages they hold."""
        ranks = self.mesh.size(PIPELINE)
        result = []
        for members in self.members:
            position = self.mesh.coordinate(members[0], PIPELINE)
            stages = tuple(range(position, num_stages, ranks))
            one_of = [m for m in self.members if self.mesh.coordinate(m[0], PIPELINE) == position]
            suffix = f".{one_of.index(members)}" if len(one_of) > 1 else ""
            result.append(RankClass(f"stage {','.join(map(str, stages))}{suffix}", stages, members))
        return tuple(result)

    def on_pipeline_rank(self, position: int) -> tuple[int, ...]:
        """Return the classes at one pipeline position."""
        return self._positions[position]

    @cached_property
    def _positions(self) -> tuple[tuple[int, ...], ...]:
        rows: list[list[int]] = [[] for _ in range(self.mesh.size(PIPELINE))]
        for index, members in enumerate(self.members):
            rows[self.mesh.coordinate(members[0], PIPELINE)].append(index)
        return tuple(map(tuple, rows))

    @cached_property
    def _shapes(self) -> dict[tuple[int, str], GroupShape]:
        return {}

    def group_classes(self, index: int, axis: str) -> tuple[int, ...]:
        """Return the classes that the group of a class's representative touches, along ``axis``."""
        group = self.mesh.group(self.members[index][0], axis)
        return tuple(sorted({self.class_of[rank] for rank in group}))

    def shape(self, index: int, axis: str) -> GroupShape:
        """Return how the group of a class's representative lies on the machine."""
        if (index, axis) not in self._shapes:
            group = self.mesh.group(self.members[index][0], axis)
            self._shapes[index, axis] = GroupShape(self.cluster.spans(group), self._sharing(index, group))
        return self._shapes[index, axis]

    def neighbour(self, index: int, step: int) -> tuple[int, int]:
        """Return the rank ``step`` pipeline positions on from the representative, and its class."""
        rank = self.members[index][0]
        size, stride = self.mesh.size(PIPELINE), self.mesh.stride(PIPELINE)
        position = self.mesh.coordinate(rank, PIPELINE)
        other = rank + ((position + step) % size - position) * stride
        return other, self.class_of[other]

    def pair_shape(self, index: int, other: int) -> GroupShape:
        """Return the shape of a transfer between a class's representative and the rank ``other``."""
        rank = self.members[index][0]
        return GroupShape(self.cluster.spans((rank, other)), self._sharing(index, (rank,)))

    def _sharing(self, index: int, group: tuple[int, ...]) -> float:
        """Return how many such groups put their bytes through the representative's NIC at once."""
        rank = self.members[index][0]
        local = [other for other in nic_ranks(self.cluster, rank) if self.class_of[other] == index]
        own = [other for other in local if other in group]
        return len(local) / len(own)


def nic_ranks(cluster: Cluster, rank: int) -> list[int]:
    """Return the ranks that use the NIC of ``rank``."""
    first = cluster.node(rank) * cluster.devices_per_node
    return [r for r in range(first, first + cluster.devices_per_node) if cluster.nic(r) == cluster.nic(rank)]


def fold(cluster: Cluster, mesh: Mesh) -> ClassTable:
    """Return the coarsest classes that colour refinement finds stable."""
    colours = _first_colours(cluster, mesh)
    count = 0
    while True:
        numbers: dict[Hashable, int] = {}
        numbered = [numbers.setdefault(colour, len(numbers)) for colour in colours]
        if len(numbers) == count:
            return _table(cluster, mesh, numbered)
        count = len(numbers)
        tensor, data = (_of_group(mesh, axis, partial(_colours_of, numbered)) for axis in (TENSOR, DATA))
        stride, total = mesh.stride(PIPELINE), mesh.num_ranks
        after = [numbered[(rank + stride) % total] for rank in range(total)]
        before = [numbered[(rank - stride) % total] for rank in range(total)]
        colours = list(zip(numbered, tensor, data, after, before, strict=True))


def unfolded(cluster: Cluster, mesh: Mesh) -> ClassTable:
    """Return every rank in a class of its own: the reference that folding must equal."""
    return _table(cluster, mesh, list(range(mesh.num_ranks)))


def _table(cluster: Cluster, mesh: Mesh, colours: list[int]) -> ClassTable:
    members: list[list[int]] = [[] for _ in range(max(colours) + 1)]
    for rank, colour in enumerate(colours):
        members[colour].append(rank)
    return ClassTable(cluster, mesh, tuple(map(tuple, members)), tuple(colours))


def _colours_of(colours: list[int], group: tuple[int, ...]) -> frozenset[int]:
    return frozenset(colours[rank] for rank in group)


def _of_group(mesh: Mesh, axis: str, describe: Callable[[tuple[int, ...]], T]) -> list[T]:
    """Return for every rank what ``describe`` says of its group along ``axis``; each group is asked once."""
    found: dict[int, T] = {}
    for group in mesh.groups(axis):
        found |= dict.fromkeys(group, describe(group))
    return [found[rank] for rank in range(mesh.num_ranks)]


def _first_colours(cluster: Cluster, mesh: Mesh) -> list[Hashable]:
    """Return what each rank sees of the machine: stage, groups, neighbours, and who shares its NIC."""
    stride, total = mesh.stride(PIPELINE), mesh.num_ranks
    stages = [mesh.coordinate(rank, PIPELINE) for rank in range(total)]
    spans = [_of_group(mesh, axis, cluster.spans) for axis in (TENSOR, DATA)]
    own_nic = [_of_group(mesh, axis, partial(_by_nic, cluster)) for axis in (TENSOR, DATA)]
    sharing = Counter((cluster.nic(rank), stages[rank]) for rank in range(total))
    return [
        (
            stages[rank],
            sharing[cluster.nic(rank), stages[rank]],
            *(nics[rank][cluster.nic(rank)] for nics in own_nic),
            *(span[rank] for span in spans),
            cluster.node((rank + stride) % total) == cluster.node(rank),
            cluster.node((rank - stride) % total) == cluster.node(rank),
        )
        for rank in range(total)
    ]


def _by_nic(cluster: Cluster, group: tuple[int, ...]) -> Counter[int]:
    return Counter(cluster.nic(rank) for rank in group)
