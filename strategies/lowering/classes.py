"""Rank classes: ranks that do the same at the same time, found by colour refinement.

Ranks start with the colour of their stage and of how their groups lie on the machine, and
are split by the colours in their groups until nothing changes. Equal colours then have
equal sets of predecessors, so that one rank of a class stands for all of it.

References
----------
Weisfeiler and Leman 1968 (1-dimensional colour refinement).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from simulator.cluster import Cluster
from simulator.program import RankClass
from strategies.lowering.operator import GroupShape
from strategies.mesh import DATA, PIPELINE, TENSOR, Mesh


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
    colours: list[Hashable] = [_first_colour(cluster, mesh, rank) for rank in range(mesh.num_ranks)]
    count = 0
    while True:
        numbers: dict[Hashable, int] = {}
        numbered = [numbers.setdefault(colour, len(numbers)) for colour in colours]
        if len(numbers) == count:
            return _table(cluster, mesh, numbered)
        count = len(numbers)
        sets = {axis: _group_colours(mesh, axis, numbered) for axis in (TENSOR, DATA)}
        stride, total = mesh.stride(PIPELINE), mesh.num_ranks
        colours = [
            (
                numbered[rank],
                sets[TENSOR][rank],
                sets[DATA][rank],
                numbered[(rank + stride) % total],
                numbered[(rank - stride) % total],
            )
            for rank in range(total)
        ]


def unfolded(cluster: Cluster, mesh: Mesh) -> ClassTable:
    """Return every rank in a class of its own: the reference that folding must equal."""
    return _table(cluster, mesh, list(range(mesh.num_ranks)))


def _table(cluster: Cluster, mesh: Mesh, colours: list[int]) -> ClassTable:
    members: list[list[int]] = [[] for _ in range(max(colours) + 1)]
    for rank, colour in enumerate(colours):
        members[colour].append(rank)
    return ClassTable(cluster, mesh, tuple(map(tuple, members)), tuple(colours))


def _group_colours(mesh: Mesh, axis: str, colours: list[int]) -> list[frozenset[int]]:
    result: list[frozenset[int]] = [frozenset()] * mesh.num_ranks
    for group in mesh.groups(axis):
        found = frozenset(colours[rank] for rank in group)
        for rank in group:
            result[rank] = found
    return result


def _first_colour(cluster: Cluster, mesh: Mesh, rank: int) -> Hashable:
    after = (rank + mesh.stride(PIPELINE)) % mesh.num_ranks
    before = (rank - mesh.stride(PIPELINE)) % mesh.num_ranks
    stage = mesh.coordinate(rank, PIPELINE)
    sharing = [other for other in nic_ranks(cluster, rank) if mesh.coordinate(other, PIPELINE) == stage]
    return (
        stage,
        len(sharing),
        *(sum(other in mesh.group(rank, axis) for other in sharing) for axis in (TENSOR, DATA)),
        cluster.spans(mesh.group(rank, TENSOR)),
        cluster.spans(mesh.group(rank, DATA)),
        cluster.node(after) == cluster.node(rank),
        cluster.node(before) == cluster.node(rank),
    )
