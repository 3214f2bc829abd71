"""Links that are the same in every node of a kind."""

from collections.abc import Iterator

import numpy as np

from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.routes import FloatArray, IntArray
from simulator.link import Link


class Wires:
    """Wire ``i`` leads from part ``tail[i]`` to part ``head[i]`` of every node of a kind.

    ``width[i]`` is how many links it bundles, 1 where it is not given.
    """

    def __init__(
        self,
        links: Links,
        numbering: Numbering,
        kind: int,
        pattern: str,
        ends: tuple[IntArray, IntArray],
        link: Link,
        width: FloatArray | None = None,
    ) -> None:
        self._numbering, self._kind = numbering, kind
        self.tail, self.head = ends
        nodes, count = numbering.nodes_of(kind), len(self.tail)
        labels = np.repeat(nodes, count), np.tile(self.tail, len(nodes)), np.tile(self.head, len(nodes))
        bandwidth = link.bandwidth * np.tile(np.ones(count) if width is None else width, len(nodes))
        added = links.add(pattern, labels, bandwidth, link.latency, link.launch, labels[0])
        self._links = added.reshape(len(nodes), count)

    def of(self, devices: IntArray, wires: IntArray) -> IntArray:
        """Return for every device the link that is a wire of its node."""
        return self._links[self._numbering.node_rank[self._numbering.node[devices]], wires]

    def between_devices(self) -> Iterator[Edge]:
        """Yield the explicit edges where the parts are devices."""
        devices = self._numbering.devices_of(self._kind).reshape(len(self._links), -1)
        for members, row in zip(devices, self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"device {members[tail]}", f"device {members[head]}", int(link)

    def between(self, part: str) -> Iterator[Edge]:
        """Yield the explicit edges where the parts are numbered in their node and called ``part``."""
        for node, row in zip(self._numbering.nodes_of(self._kind), self._links, strict=True):
            for tail, head, link in zip(self.tail, self.head, row, strict=True):
                yield f"node {node} {part} {tail}", f"node {node} {part} {head}", int(link)
