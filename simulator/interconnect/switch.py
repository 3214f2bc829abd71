"""Nodes whose devices share a non-blocking switch."""

from collections.abc import Iterator

from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.routes import IntArray, Routes, along
from simulator.link import Link


class Ports:
    """A port out, which has the whole latency, and a port in for every device of a kind of node."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self.devices = numbering.devices_of(kind)
        self._rank = numbering.rank
        node = numbering.node[self.devices]
        self._out = links.add("device {} out", self.devices, link.bandwidth, link.latency, link.launch, node)
        self._in = links.add("device {} in", self.devices, link.bandwidth, launch=link.launch, owner=node)

    def out(self, devices: IntArray) -> IntArray:
        """Return the port out of every device."""
        return self._out[self._rank[devices]]

    def into(self, devices: IntArray) -> IntArray:
        """Return the port into every device."""
        return self._in[self._rank[devices]]


class SwitchWiring:
    """The ports of all nodes of one kind."""

    def __init__(self, links: Links, numbering: Numbering, kind: int, link: Link) -> None:
        self._node = numbering.node
        self._ports = Ports(links, numbering, kind, link)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return port out, port in."""
        return along(self._ports.out(source), self._ports.into(target))

    def edges(self) -> Iterator[Edge]:
        """Yield device to switch and switch to device."""
        devices = self._ports.devices
        for device, out, into in zip(devices, self._ports.out(devices), self._ports.into(devices), strict=True):
            yield f"device {device}", f"node {self._node[device]} switch", int(out)
            yield f"node {self._node[device]} switch", f"device {device}", int(into)
