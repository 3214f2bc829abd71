"""Routers in all-to-all groups, and groups joined all-to-all."""

from collections.abc import Iterator

import numpy as np

from simulator.interconnect.kinds import Dragonfly
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.pairs import ordered_pairs, pair_index
from simulator.interconnect.routes import IntArray, where


class DragonflyWiring:
    """Minimal routes: to the gateway of the own group, to the gateway of the other group, to the router.

    The router that holds the link of its group to group ``g`` is number ``g % routers_per_group``
    of the group. Groups are complete even where the last has fewer nodes.
    """

    parts: tuple[IntArray, ...] = ()

    def __init__(self, links: Links, fabric: Dragonfly, node: IntArray) -> None:
        self._router = node // fabric.nodes_per_router
        routers = int(self._router[-1]) + 1
        self._size = min(fabric.routers_per_group, routers)
        self._groups = -(-routers // self._size)
        a, b = ordered_pairs(self._size)
        base = np.repeat(np.arange(self._groups) * self._size, len(a))
        self._ends = np.tile(a, self._groups) + base, np.tile(b, self._groups) + base
        local, between = fabric.local, fabric.group_link
        self._local = links.add("router {}>{}", self._ends, local.bandwidth, local.latency, local.launch)
        self._group_ends = ordered_pairs(self._groups)
        self._group = links.add("group {}>{}", self._group_ends, between.bandwidth, between.latency, between.launch)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return router to gateway, group to group, gateway to router: what is on the way."""
        here, there = self._router[source], self._router[target]
        group, other = here // self._size, there // self._size
        exit_router = np.where(group == other, there, self._gateway(group, other))
        entry_router = np.where(group == other, there, self._gateway(other, group))
        return self._hop(here, exit_router), self._leap(group, other), self._hop(entry_router, there)

    def vertex(self, nic: int) -> str:
        """Return the router of a NIC."""
        return f"router {self._router[nic]}"

    def edges(self) -> Iterator[Edge]:
        """Yield router to router in a group, and gateway to gateway."""
        for tail, head, link in zip(*self._ends, self._local, strict=True):
            yield f"router {tail}", f"router {head}", int(link)
        group, other = self._group_ends
        exits, entries = self._gateway(group, other), self._gateway(other, group)
        for tail, head, link in zip(exits, entries, self._group, strict=True):
            yield f"router {tail}", f"router {head}", int(link)

    def _gateway(self, group: IntArray, other: IntArray) -> IntArray:
        """Return the router of ``group`` that holds its link to ``other``."""
        return group * self._size + other % self._size

    def _hop(self, router: IntArray, other: IntArray) -> IntArray:
        """Return the link between routers of one group, -1 where they are one."""
        size = self._size
        index = router // size * (size * (size - 1)) + pair_index(router % size, other % size, size)
        return where(router != other, self._local, index)

    def _leap(self, group: IntArray, other: IntArray) -> IntArray:
        """Return the link between groups, -1 where they are one."""
        return where(group != other, self._group, pair_index(group, other, self._groups))
