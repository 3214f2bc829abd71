"""Nodes whose devices are wired to each other."""

from collections.abc import Iterator

import numpy as np

from simulator.interconnect.kinds import Mesh
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.pairs import ordered_pairs, pair_index
from simulator.interconnect.routes import IntArray, Routes, along, table_of
from simulator.interconnect.shortest import Shortest
from simulator.interconnect.wires import Wires
from simulator.link import Link


class FullMeshWiring:
    """A link between every two devices."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._local, self._size = numbering.local, numbering.kinds[kind].devices
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", ordered_pairs(self._size), link)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the one link."""
        return along(self._wires.of(source, pair_index(self._local[source], self._local[target], self._size)))

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()


class MeshWiring:
    """Links between some pairs of devices; the others send through them, by ways found when first asked for."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, mesh: Mesh) -> None:
        self._local, self._size = numbering.local, numbering.kinds[kind].devices
        width = _widths(mesh, self._size)
        tail, head = (np.array(column, dtype=np.int64) for column in zip(*width, strict=True))
        count = np.array(list(width.values()), dtype=np.float64)
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", (tail, head), mesh.link, count)
        self._shortest = _joined(tuple(width), self._size)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the ways of fewest hops."""
        wanted, entry = np.unique(self._local[source] * self._size + self._local[target], return_inverse=True)
        ways = (self._shortest.ways(*divmod(pair, self._size)) for pair in wanted.tolist())
        local = table_of([way for way in ways if way is not None]).routes(entry)
        return local._replace(link=self._wires.of(source[local.pair], local.link))

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()


def _widths(mesh: Mesh, size: int) -> dict[tuple[int, int], int]:
    """Return how many links lead from one device to another, in order of the two."""
    width: dict[tuple[int, int], int] = {}
    for a, b, count in mesh.pairs:
        if max(a, b) >= size:
            raise ValueError(f"mesh pairs are devices of the node, below {size}, met ({a}, {b})")
        for ends in ((a, b), (b, a)):
            width[ends] = width.get(ends, 0) + count
    return dict(sorted(width.items()))


def _joined(wires: tuple[tuple[int, int], ...], size: int) -> Shortest:
    """Return the ways over ``wires``, each of which there is in both directions; they join all devices."""
    shortest = Shortest(size, wires)
    reached = shortest.distances(0)
    missing = next((device for device in range(size) if device not in reached), None)
    if missing is not None:
        raise ValueError(f"a mesh joins all {size} devices of its node, met no way from 0 to {missing}")
    return shortest
