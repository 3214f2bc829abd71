"""NICs, and the switches between them."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from simulator.interconnect.dragonfly import DragonflyWiring
from simulator.interconnect.host_wiring import HostWiring
from simulator.interconnect.kinds import Crossbar, Dragonfly, FatTree, LeafSpine
from simulator.interconnect.leaves import LeafWiring
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering, owners
from simulator.interconnect.routes import FloatArray, IntArray, Routes, along


class SwitchingWiring(Protocol):
    """What lies between NICs.

    Attributes
    ----------
    parts
        For every kind of switch that has links of its own, the one above each NIC; numbers follow those of nodes.
    """

    parts: tuple[IntArray, ...]

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return the links from NICs ``source`` to NICs ``target`` in order, -1 where one is not on the way."""

    def vertex(self, nic: int) -> str:
        """Return what a NIC is plugged into."""

    def edges(self) -> Iterator[Edge]:
        """Yield the explicit edges."""


class CrossbarWiring:
    """Nothing that limits NICs."""

    parts: tuple[IntArray, ...] = ()

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return no links."""
        return ()

    def vertex(self, nic: int) -> str:
        """Return the fabric."""
        return "fabric"

    def edges(self) -> Iterator[Edge]:
        """Yield nothing."""
        yield from ()


class NicWiring:
    """NICs and what lies between them: the whole latency of a NIC is on its way out.

    Where a device has a PCIe slot its NIC is behind it, and traffic crosses the slot too.
    """

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        host: HostWiring,
        fabric: Crossbar | LeafSpine | FatTree | Dragonfly,
    ) -> None:
        self._numbering, self._host = numbering, host
        node = owners(numbering.counts(lambda kind: kind.nics))
        bandwidth = numbering.figures(lambda kind: kind.nic.bandwidth)[node]
        latency = numbering.figures(lambda kind: kind.nic.latency)[node]
        launch = numbering.figures(lambda kind: kind.nic.launch)[node]
        nics = np.arange(len(node))
        self._out = links.add("nic {} out", nics, bandwidth, latency, launch, node)
        self._in = links.add("nic {} in", nics, bandwidth, launch=launch, owner=node)
        self._switches = _switches(links, fabric, node, bandwidth)

    @property
    def parts(self) -> tuple[IntArray, ...]:
        """For every kind of switch that has links of its own, the one above each device."""
        return tuple(of_nic[self._numbering.nic] for of_nic in self._switches.parts)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between devices of different nodes."""
        nic, other = self._numbering.nic[source], self._numbering.nic[target]
        return along(
            self._host.slot_out[source],
            self._out[nic],
            *self._switches.columns(nic, other),
            self._in[other],
            self._host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield device (or its slot) to fabric and back, and what is in the fabric."""
        for device, nic in enumerate(self._numbering.nic.tolist()):
            yield self._host.vertex(device), self._switches.vertex(nic), int(self._out[nic])
            yield self._switches.vertex(nic), self._host.vertex(device), int(self._in[nic])
        yield from self._switches.edges()


def _switches(
    links: Links, fabric: Crossbar | LeafSpine | FatTree | Dragonfly, node: IntArray, bandwidth: FloatArray
) -> SwitchingWiring:
    match fabric:
        case Crossbar():
            return CrossbarWiring()
        case Dragonfly():
            return DragonflyWiring(links, fabric, node)
        case LeafSpine() | FatTree():
            return LeafWiring(links, fabric, node, bandwidth)
