"""Walks along an axis of a torus or a ring: the short way round, an exact half by both ways."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.routes import FloatArray, IntArray, Routes, expanded
from simulator.interconnect.wires import Wires
from simulator.link import Link


class Walks(NamedTuple):
    """Steps sorted by pair: a ``share`` of the pair's bytes leaves ``position``, up or (``down`` is 1) down."""

    pair: IntArray
    position: IntArray
    down: IntArray
    share: FloatArray


class Axis(NamedTuple):
    """Positions in a row, ``closed`` to a ring or not."""

    size: int
    closed: bool

    def exits(self, down: int) -> IntArray:
        """Return the positions from which a link leads up the axis, or (``down`` is 1) down."""
        return np.arange(self.size) if self.closed else np.arange(down, self.size - 1 + down)

    def walks(self, source: IntArray, target: IntArray) -> Walks:
        """Return the steps from every source position to its target.

        >>> there = axis(4).walks(np.array([3, 0]), np.array([0, 2]))
        >>> there.position.tolist(), there.down.tolist(), there.share.tolist()
        ([3, 0, 1, 0, 3], [0, 0, 0, 1, 1], [1.0, 0.5, 0.5, 0.5, 0.5])
        """
        hops = np.stack([target - source, source - target], axis=1)
        if self.closed:
            hops %= self.size
            hops[hops > hops[:, ::-1]] = 0
        hops = np.maximum(hops, 0)
        share = 1.0 / np.maximum(np.count_nonzero(hops, axis=1), 1)
        way, step = expanded(hops.ravel())
        pair, down = np.divmod(way, 2)
        return Walks(pair, (source[pair] + np.where(down, -step, step)) % self.size, down, share[pair])


def axis(size: int, wraparound: bool = True) -> Axis:
    """Return the axis of ``size`` positions; two joined by one wire are no ring."""
    return Axis(size, wraparound and size > 2)


class RingWiring:
    """A link from each device to the next and to the one before, in all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._local, self._axis = numbering.local, axis(numbering.kinds[kind].devices)
        up, down = self._axis.exits(0), self._axis.exits(1)
        ends = np.concatenate([up, down]), np.concatenate([up + 1, down - 1]) % self._axis.size
        self._wires = Wires(links, numbering, kind, "node {} link {}>{}", ends, link)
        self._wire = np.zeros((2, self._axis.size), dtype=np.int64)
        self._wire[0, up] = np.arange(len(up))
        self._wire[1, down] = np.arange(len(up), len(ends[0]))

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the short way round."""
        walks = self._axis.walks(self._local[source], self._local[target])
        link = self._wires.of(source[walks.pair], self._wire[walks.down, walks.position])
        return Routes(walks.pair, link, walks.share)

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        return self._wires.between_devices()
