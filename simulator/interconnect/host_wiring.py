"""Links between devices and host memory: PCIe slots, uplinks of switches, and the memory of NUMA nodes.

A copy to the host crosses the device's slot, the uplink of its switch and the memory of its NUMA node. The memory's
link has the slot's latency and launch, as only copies cross it: NICs and a `PcieTree` share the slot, but have
latencies of their own.
"""

from collections.abc import Iterator
from math import ceil, inf

import numpy as np

from meshwise.simulator.interconnect.links import Edge, Links, Numbering, owners, starts
from meshwise.simulator.interconnect.routes import FloatArray, IntArray, Routes, chain_links
from meshwise.simulator.machine.cluster import Node
from meshwise.simulator.machine.topology import Link, PcieTree


class HostWiring:
    """Slot and switch uplink of every device, out of the device and into it; -1 for devices without one.

    ``switch`` is the PCIe switch of every device, numbered through the cluster. ``trees`` says whether nodes whose
    network is a `PcieTree` have the switches of the tree.
    """

    def __init__(self, links: Links, numbering: Numbering, trees: bool) -> None:
        node, host = numbering.node, numbering.host
        has_slot = np.array([kind.host.pcie is not None for kind in numbering.kinds])[numbering.kind]
        slot = np.where(has_slot, np.arange(len(node)), -1)
        self.switch = _number_switches(numbering, trees)
        self.slot_out, self.slot_in = _add_link_pairs(
            links, "pcie {}", slot, numbering.figures(lambda kind: _slot_link(kind).bandwidth), node
        )
        self.uplink_out, self.uplink_in = _add_link_pairs(
            links, "pcie switch {}", self.switch, numbering.figures(_uplink_width), node
        )
        # Without slots the uplinks belong to a `PcieTree` alone, and copies do not cross them.
        self._copy_out = np.where(has_slot, self.uplink_out, -1)
        self._copy_in = np.where(has_slot, self.uplink_in, -1)
        self._host, self._numa = host, _number_numa_nodes(numbering)
        self._memory_in, self._memory_out = _add_memory_links(links, numbering, self._numa)

    def to_host(self, devices: IntArray) -> Routes:
        """Return the routes from ``devices`` to their host memory."""
        return chain_links(self.slot_out[devices], self._copy_out[devices], self._memory_in[devices])

    def from_host(self, devices: IntArray) -> Routes:
        """Return the routes to ``devices`` from their host memory."""
        return chain_links(self._memory_out[devices], self._copy_in[devices], self.slot_in[devices])

    def vertex(self, device: int) -> str:
        """Return the vertex at which ``device`` meets its NIC: the far end of its slot, if it has one."""
        return f"slot {device}" if self.slot_out[device] >= 0 else f"device {device}"

    def edges(self) -> Iterator[Edge]:
        """Yield the edges between every device and its host's memory."""
        for device in range(len(self.switch)):
            name = f"{self._host[device]}.{self._numa[device]}"
            hops = (
                (self.vertex(device), self.slot_out, self.slot_in),
                (f"root {name}", self._copy_out, self._copy_in),
                (f"memory {name}", self._memory_in, self._memory_out),
            )
            tail = f"device {device}"
            for head, link_out, link_in in hops:
                if link_out[device] >= 0:
                    yield tail, head, int(link_out[device])
                    yield head, tail, int(link_in[device])
                    tail = head


def _slot_link(node: Node) -> Link:
    """Return the link of a device's slot; a link without cost if the host has no slots."""
    return node.host.pcie.link if node.host.pcie is not None else Link(0.0, inf)


def _uplink_width(node: Node) -> float:
    if node.host.pcie is None and isinstance(node.network, PcieTree):
        return node.network.link.bandwidth
    return _slot_link(node).bandwidth


def _memory_width(node: Node) -> float:
    """Return byte/s of the memory of one NUMA node; infinite if it needs no link.

    A memory without limit needs a link if it carries the slot's latency; it is then as wide as its slots together.
    """
    host, slot = node.host, _slot_link(node)
    if host.memory_bandwidth < inf or slot.latency == slot.launch == 0:
        return host.memory_bandwidth / host.numa_nodes
    return slot.bandwidth * ceil(node.devices / node.hosts / host.numa_nodes)


def _devices_per_switch(node: Node, trees: bool) -> int:
    """Return the number of devices that share an uplink; 0 for no uplinks."""
    tree, pcie = node.network, node.host.pcie
    if not (trees and isinstance(tree, PcieTree)):
        return pcie.devices_per_switch if pcie is not None and pcie.devices_per_switch > 1 else 0
    if pcie is not None and pcie.devices_per_switch != tree.devices_per_switch:
        raise ValueError(
            f"the PCIe tree of a node and its host have the same devices_per_switch, met {tree.devices_per_switch} "
            f"in the tree and {pcie.devices_per_switch} in host {node.host.name}"
        )
    return tree.devices_per_switch


def _number_switches(numbering: Numbering, trees: bool) -> IntArray:
    """Return the number of the PCIe switch of every device, -1 for none; no switch serves two hosts."""
    switch_size = numbering.counts(lambda kind: _devices_per_switch(kind, trees))
    hosts = numbering.counts(lambda kind: kind.hosts)
    devices_per_host = numbering.counts(lambda kind: kind.devices // kind.hosts)
    num_switches = np.where(switch_size > 0, -(-devices_per_host // np.maximum(switch_size, 1)), 0)
    first_switch = starts(num_switches[owners(hosts)])
    switch = first_switch[numbering.host] + numbering.host_local // np.maximum(switch_size, 1)[numbering.node]
    return np.where(switch_size[numbering.node] > 0, switch, -1)


def _add_link_pairs(
    links: Links, name: str, part_of_device: IntArray, width: FloatArray, node: IntArray
) -> tuple[IntArray, IntArray]:
    """Add the links out of and into every slot or switch, and return both for every device.

    ``part_of_device`` numbers the slot or switch of every device, in rising order; it is -1 for devices without one,
    whose links are -1 too. ``width`` is the bandwidth by node.
    """
    first_devices = np.flatnonzero((part_of_device >= 0) & (np.diff(part_of_device, prepend=-1) != 0))
    part, owner = part_of_device[first_devices], node[first_devices]
    # One row more than parts, so that index -1 finds -1.
    link_table = np.full((2, int(part_of_device.max()) + 2), -1)
    for row, end in zip(link_table, ("out", "in"), strict=True):
        row[part] = links.add_links(f"{name} {end}", part, width[owner], owner=owner)
    return link_table[0, part_of_device], link_table[1, part_of_device]


def _number_numa_nodes(numbering: Numbering) -> IntArray:
    """Return the NUMA node of every device, numbered inside its host."""
    numa_nodes = numbering.counts(lambda kind: kind.host.numa_nodes)[numbering.node]
    devices_per_host = numbering.counts(lambda kind: kind.devices // kind.hosts)[numbering.node]
    return numbering.host_local * numa_nodes // devices_per_host


def _add_memory_links(links: Links, numbering: Numbering, numa: IntArray) -> tuple[IntArray, IntArray]:
    """Add the links into and out of the memory of NUMA nodes, and return both for every device."""
    node_of_host = owners(numbering.counts(lambda kind: kind.hosts))
    num_memories = numbering.counts(lambda kind: kind.host.numa_nodes)[node_of_host]
    host, first_memory = owners(num_memories), starts(num_memories)
    node = node_of_host[host]
    width = numbering.figures(_memory_width)[node]
    latency = numbering.figures(lambda kind: _slot_link(kind).latency)[node]
    launch = numbering.figures(lambda kind: _slot_link(kind).launch)[node]
    limited_memories = np.flatnonzero(width < inf)
    labels = host[limited_memories], limited_memories - first_memory[host[limited_memories]]
    link_table = np.full((2, len(host)), -1)
    for row, pattern in zip(link_table, ("memory {}.{} in", "memory {}.{} out"), strict=True):
        row[limited_memories] = links.add_links(
            pattern,
            labels,
            width[limited_memories],
            latency[limited_memories],
            launch[limited_memories],
            node[limited_memories],
        )
    memory = first_memory[numbering.host] + numa
    return link_table[0, memory], link_table[1, memory]
