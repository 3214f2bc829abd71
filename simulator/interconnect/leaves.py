"""Leaf switches, a spine or pods above them, and a core above pods."""

from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from simulator.interconnect.kinds import FatTree, LeafSpine
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.numbering import starts
from simulator.interconnect.routes import FloatArray, IntArray, where


class Tier:
    """Switches of one tier, each with one link up and one down; ``of_nic`` is the one above every NIC.

    As parts of the cluster (`Parts`) they are numbered from ``first_part``. Traffic is spread evenly
    over the switches of the tier above, so that all uplinks of a switch act as one pipe.
    """

    def __init__(
        self,
        links: Links,
        pattern: str,
        labels: tuple[IntArray, ...],
        of_nic: IntArray,
        capacity: FloatArray,
        hop: float,
        first_part: int,
    ) -> None:
        self._pattern, self._labels, self.of_nic = pattern, labels, of_nic
        self.part_of_nic, owner = first_part + of_nic, first_part + np.arange(len(capacity))
        self._up = links.add(f"{pattern} up", labels, capacity, hop, owner=owner)
        self._down = links.add(f"{pattern} down", labels, capacity, owner=owner)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
        """Return the links up and down between NICs, -1 where one switch is above both."""
        here, there = self.of_nic[source], self.of_nic[target]
        return where(here != there, self._up, here), where(here != there, self._down, there)

    def name(self, switch: int) -> str:
        """Return the name of a switch."""
        return self._pattern.format(*(column[switch] for column in self._labels))

    def edges(self, above: Iterable[str]) -> Iterator[Edge]:
        """Yield every switch to the one ``above`` it, and back."""
        ways = zip(above, self._up.tolist(), self._down.tolist(), strict=False)
        for switch, (upper, up, down) in enumerate(ways):
            yield self.name(switch), upper, up
            yield upper, self.name(switch), down


class LeafWiring:
    """A leaf-spine or fat-tree network.

    The uplinks of a leaf are as wide as its NICs together over the oversubscription, those of a
    pod as wide as its leaves' uplinks over the core's; each tier adds its ``hop`` on the way up.
    """

    def __init__(self, links: Links, fabric: LeafSpine | FatTree, node: IntArray, bandwidth: FloatArray) -> None:
        pattern, labels, leaf = _leaves(fabric, node)
        capacity = np.bincount(leaf, weights=bandwidth) / fabric.oversubscription
        nodes = int(node[-1]) + 1
        self._leaves = Tier(links, pattern, labels, leaf, capacity, fabric.hop, nodes)
        self._pods: Tier | None = None
        if isinstance(fabric, FatTree):
            self._pod_of_leaf = np.arange(len(capacity)) // fabric.leaves_per_pod
            above = np.bincount(self._pod_of_leaf, weights=capacity) / fabric.core_oversubscription
            pods = (np.arange(len(above)),)
            first_pod = nodes + len(capacity)
            self._pods = Tier(links, "pod {}", pods, self._pod_of_leaf[leaf], above, fabric.hop, first_pod)
        self.parts = tuple(tier.part_of_nic for tier in (self._leaves, self._pods) if tier is not None)

    def columns(self, source: IntArray, target: IntArray) -> tuple[IntArray, ...]:
        """Return up and down of every tier where no one switch is above both NICs."""
        up, down = self._leaves.columns(source, target)
        if self._pods is None:
            return up, down
        return up, *self._pods.columns(source, target), down

    def vertex(self, nic: int) -> str:
        """Return the leaf of a NIC."""
        return self._leaves.name(int(self._leaves.of_nic[nic]))

    def edges(self) -> Iterator[Edge]:
        """Yield leaf to spine, or leaf to pod to core, and back."""
        if self._pods is None:
            yield from self._leaves.edges(repeat("spine"))
        else:
            yield from self._leaves.edges(map(self._pods.name, self._pod_of_leaf.tolist()))
            yield from self._pods.edges(repeat("core"))


def _leaves(fabric: LeafSpine | FatTree, node: IntArray) -> tuple[str, tuple[IntArray, ...], IntArray]:
    """Return how leaves are called, their labels, and the leaf of every NIC; ``node`` is the node of every NIC."""
    unit = node // fabric.nodes_per_leaf
    if not fabric.rail_optimized:
        return "leaf {}", (np.arange(unit[-1] + 1),), unit
    rail = np.arange(len(node)) - starts(np.bincount(node))[node]
    rails = np.zeros(unit[-1] + 1, dtype=np.int64)
    np.maximum.at(rails, unit, rail + 1)
    units = np.repeat(np.arange(len(rails)), rails)
    first = starts(rails)
    return "rail {}.{}", (units, np.arange(len(units)) - first[units]), first[unit] + rail
