"""Nodes whose devices reach each other over PCIe switches and sockets."""

from collections.abc import Iterator

import numpy as np

from simulator.interconnect.host_wiring import HostWiring
from simulator.interconnect.kinds import PcieTree
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.pairs import ordered_pairs, pair_index
from simulator.interconnect.routes import IntArray, Routes, along, where
from simulator.interconnect.switch import Ports
from simulator.interconnect.wires import Wires


class PcieTreeWiring:
    """A port for every device, the uplinks of switches, and a link between every two sockets of a node.

    The uplinks, and the slots where the host has them, are those that copies to the host cross.
    """

    def __init__(self, links: Links, numbering: Numbering, kind: int, tree: PcieTree, host: HostWiring) -> None:
        self._numbering, self._host, self._per_socket = numbering, host, tree.switches_per_socket
        self._ports = Ports(links, numbering, kind, tree.link)
        self._sockets = int(self._socket(self._ports.devices[-1:])[0]) + 1
        pattern = "node {} socket {}>{}"
        self._wires = Wires(links, numbering, kind, pattern, ordered_pairs(self._sockets), tree.socket)

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return slot and port out, uplink, socket to socket, uplink, port and slot in: what is on the way."""
        host, here, there = self._host, self._socket(source), self._socket(target)
        leaves_switch, leaves_socket = host.switch[source] != host.switch[target], here != there
        socket = np.full(len(source), -1)
        wires = pair_index(here, there, self._sockets)[leaves_socket]
        socket[leaves_socket] = self._wires.of(source[leaves_socket], wires)
        return along(
            host.slot_out[source],
            self._ports.out(source),
            where(leaves_switch, host.uplink_out, source),
            socket,
            where(leaves_switch, host.uplink_in, target),
            self._ports.into(target),
            host.slot_in[target],
        )

    def edges(self) -> Iterator[Edge]:
        """Yield device (or its slot) to switch to socket to socket, and back."""
        host, devices = self._host, self._ports.devices
        sockets = self._socket(devices)
        for device, socket, out, into in zip(
            devices, sockets, self._ports.out(devices), self._ports.into(devices), strict=True
        ):
            lower, switch = host.vertex(device), f"pcie switch {host.switch[device]}"
            upper = f"node {self._numbering.node[device]} socket {socket}"
            yield lower, switch, int(out)
            yield switch, lower, int(into)
            yield switch, upper, int(host.uplink_out[device])
            yield upper, switch, int(host.uplink_in[device])
        yield from self._wires.between("socket")

    def _socket(self, devices: IntArray) -> IntArray:
        """Return the socket of every device, counted in its node."""
        first = devices - self._numbering.local[devices]
        switch: IntArray = self._host.switch[devices] - self._host.switch[first]
        return switch // self._per_socket
