"""Devices joined directly on a grid."""

from collections.abc import Iterator
from math import prod

import numpy as np

from simulator.interconnect.kinds import Torus
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.ring import Axis, axis
from simulator.interconnect.routes import IntArray, Routes, joined


class AxisWiring:
    """The links along one axis of a grid, whose next position is ``stride`` devices on."""

    def __init__(self, links: Links, torus: Torus, name: str, axis: Axis, stride: int) -> None:
        self._axis, self._stride = axis, stride
        self._links = np.full((2, torus.num_devices), -1)
        link, position = torus.link, self.position(np.arange(torus.num_devices))
        for down, sign in enumerate("+-"):
            members = np.flatnonzero(np.isin(position, axis.exits(down)))
            pattern = f"torus {{}} {name}{sign}"
            self._links[down, members] = links.add(pattern, members, link.bandwidth, link.latency, link.launch)

    def position(self, devices: IntArray) -> IntArray:
        """Return where devices stand on the axis."""
        return devices // self._stride % self._axis.size

    def moved(self, devices: IntArray, position: IntArray) -> IntArray:
        """Return the devices that differ from ``devices`` by their position on the axis only."""
        return devices + (position - self.position(devices)) * self._stride

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes from ``source`` to the position of ``target`` on the axis."""
        walks = self._axis.walks(self.position(source), self.position(target))
        device = self.moved(source[walks.pair], walks.position)
        return Routes(walks.pair, self._links[walks.down, device], walks.share)

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        for row, step in zip(self._links, (1, -1), strict=True):
            tails = np.flatnonzero(row >= 0)
            heads = self.moved(tails, (self.position(tails) + step) % self._axis.size)
            for tail, head, link in zip(tails, heads, row[tails], strict=True):
                yield f"device {tail}", f"device {head}", int(link)


class TorusWiring:
    """The links of a torus; routes follow its axes in order.

    Devices are numbered with the last axis fastest. Two devices on an axis are joined by one
    wire each way, wraparound or not.
    """

    def __init__(self, links: Links, torus: Torus) -> None:
        self._axes = [
            AxisWiring(links, torus, name, axis(size, torus.wraparound), prod(torus.shape[number + 1 :]))
            for number, (name, size) in enumerate(zip("xyz", torus.shape, strict=False))
        ]

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices."""
        parts = []
        for wiring in self._axes:
            parts.append(wiring.routes(source, target))
            source = wiring.moved(source, wiring.position(target))
        return joined(parts)

    def edges(self) -> Iterator[Edge]:
        """Yield device to device."""
        for wiring in self._axes:
            yield from wiring.edges()
