"""Any graph that the user draws."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from simulator.interconnect.kinds import Graph
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.routes import IntArray, Routes, table_of
from simulator.interconnect.shortest import Shortest


class GraphWiring:
    """One link for each edge; devices are the vertices ``device 0``, ``device 1``, ..."""

    def __init__(self, links: Links, graph: Graph, num_devices: int) -> None:
        self._ends = tuple((tail, head) for tail, head, _ in graph.edges)
        often, times = Counter(self._ends).most_common(1)[0]
        if times > 1:
            raise ValueError(f"a graph has each edge once, met {'>'.join(often)} {times} times: make its link wider")
        built = [link for _, _, link in graph.edges]
        bandwidth, latency, launch = (
            np.array([getattr(link, cost) for link in built]) for cost in ("bandwidth", "latency", "launch")
        )
        self._links = links.add("{}>{}", self._ends, bandwidth, latency, launch)
        vertices = {f"device {device}": device for device in range(num_devices)}
        for ends in self._ends:
            for name in ends:
                vertices.setdefault(name, len(vertices))
        self._shortest = Shortest(len(vertices), [(vertices[tail], vertices[head]) for tail, head in self._ends])
        self._num_devices = num_devices

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the ways of fewest hops; ``ValueError`` where there is none."""
        pairs, entry = np.unique(source * self._num_devices + target, return_inverse=True)
        rows = [self._ways(*divmod(pair, self._num_devices)) for pair in pairs.tolist()]
        routes = table_of(rows).routes(entry)
        return routes._replace(link=self._links[routes.link])

    def edges(self) -> Iterator[Edge]:
        """Yield the edges."""
        for (tail, head), link in zip(self._ends, self._links.tolist(), strict=True):
            yield tail, head, link

    def _ways(self, source: int, target: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ways = self._shortest.ways(source, target)
        if ways is None:
            raise ValueError(f"a graph joins the devices that communicate, met no way from {source} to {target}")
        return ways
