"""The links of a cluster by number and by name, and the parts of the cluster that own them.

`Numbering` has the node, the host and the NIC of every device, all numbered through the cluster. `Parts` are the owners
of links: nodes, leaf switches and pods.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.interconnect.routes import FloatArray, IntArray
from meshwise.simulator.machine.cluster import Cluster, Node


class Parts:
    """Nodes, leaf switches and pods, numbered through the cluster, and the links that each owns.

    Parts of the same build own as many links of every family, in the same order.

    Parameters
    ----------
    device_parts
        [levels, devices]: the node of every device, and the switches above its NIC; the numbers of a level are higher
        than those of the level before.
    owners
        For every family, the part that owns each of its links, in rising order; -1 for links without an owner.
    """

    def __init__(self, device_parts: IntArray, owners: tuple[IntArray, ...]) -> None:
        self.device_parts, self._owners = device_parts, owners
        self._starts = np.array([0, *accumulate(map(len, owners))])
        self.count = int(device_parts.max()) + 1

    @cached_property
    def owns_all_links(self) -> bool:
        """Whether every link has an owner."""
        return all(int(owner[0]) >= 0 for owner in self._owners)

    @cached_property
    def _owner(self) -> IntArray:
        """The owner of every link."""
        return np.concatenate(self._owners)

    @cached_property
    def _first_links(self) -> IntArray:
        """[families, devices]: the first link of every family that the device's part owns."""
        levels = self.device_parts.min(axis=1)
        first_links = np.empty((len(self._owners), self.device_parts.shape[1]), dtype=np.int64)
        for row, start, owner in zip(first_links, self._starts, self._owners, strict=False):
            counts = np.bincount(owner, minlength=self.count)
            level = np.searchsorted(levels, owner[0], side="right") - 1
            row[:] = (start + np.cumsum(counts) - counts)[self.device_parts[level]]
        return first_links

    @property
    def families(self) -> tuple[slice, ...]:
        """The links of every family."""
        return tuple(slice(start, end) for start, end in pairwise(self._starts.tolist()))

    def owners(self, family: int) -> IntArray:
        """Return the owners of the links of a family."""
        return self._owners[family]

    def owner(self, links: IntArray) -> IntArray:
        """Return the owner of each of ``links``."""
        parts: IntArray = self._owner[links]
        return parts

    def places(self, links: IntArray, devices: IntArray) -> tuple[IntArray, IntArray]:
        """Return for each of ``links`` its family and its position among the links of that family on its owner.

        ``devices[i]`` is any device in the owner of ``links[i]``.
        """
        family = np.searchsorted(self._starts, links, side="right") - 1
        return family, links - self._first_links[family, devices]

    def links(self, family: IntArray, place: IntArray, devices: IntArray) -> IntArray:
        """Return the links of a family at these positions, on the parts in which ``devices`` are."""
        num_devices = self._first_links.shape[1]
        # These arrays have a row for every group and link: a flat index and a sum in place save copies of them.
        links: IntArray = self._first_links.ravel()[family * num_devices + devices]
        links += place
        return links


_NUMBER = re.compile(r"\d+")
_MAX_NUMBER = 2**31
_MAX_SHOWN = 60
"""Characters of a user's name that a message repeats at most."""
_MAX_COMPARED = 1000
"""Names of a family that an unknown name is compared with at most."""
MAX_SINGLE_LOOKUPS = 16
"""Look-ups by name that are answered one at a time; for more, all names of a family are written into a table."""

Edge = tuple[str, str, int]
"""A link of the explicit graph: (from, to, number)."""


class Family(NamedTuple):
    """Links of one name pattern: the name of link ``first_link + i`` is ``pattern`` with the labels of row ``i``."""

    first_link: int
    pattern: str
    labels: NDArray[Any]

    @property
    def kind(self) -> str:
        """The words of the name without labels; ``edge`` if there are none."""
        return " ".join(word for word in self.pattern.split() if "{" not in word) or "edge"

    @property
    def has_text(self) -> bool:
        """Whether labels are names from the user, not numbers."""
        return self.labels.dtype == object

    def name(self, index: int) -> str:
        """Return the name of link ``first_link + index``."""
        return self.pattern.format(*self.labels[index])

    def find_nearest(self, name: str) -> int:
        """Return the index of the link called ``name``, or of one with a similar name.

        Of labels that are text, only the first ones are compared.
        """
        if self.has_text:
            names = [self.name(index) for index in range(min(len(self.labels), _MAX_COMPARED))]
            return names.index(get_close_matches(name[:_MAX_SHOWN], names, n=1, cutoff=0.0)[0])
        width = self.labels.shape[1]
        # The first digits suffice: a number of a thousand of them would not fit 64 bits.
        numbers = [min(int(digits[:12]), _MAX_NUMBER) for digits in _NUMBER.findall(name)[:width]]
        target_labels = np.array(numbers + [0] * (width - len(numbers)))
        return int(np.abs(self.labels - target_labels).sum(axis=1).argmin())


class Links:
    """Links in the order in which they were added."""

    def __init__(self) -> None:
        self._families: list[Family] = []
        self._figures: list[tuple[float | FloatArray, ...]] = []
        self._owners: list[IntArray] = []
        self._count = 0
        self._places: dict[int, dict[str, int]] = {}
        self._num_lookups = 0

    def add_links(
        self,
        pattern: str,
        labels: IntArray | tuple[IntArray, ...] | tuple[tuple[str, str], ...],
        bandwidth: float | FloatArray,
        latency: float | FloatArray = 0.0,
        launch: float | FloatArray = 0.0,
        owner: IntArray | None = None,
    ) -> IntArray:
        """Add a family of links, one for each row of labels, and return their numbers.

        Labels are a column of integers, several such columns, or rows of text. ``owner`` is the part (`Parts`) that
        owns each link, in rising order; ``None`` for links without an owner.
        """
        rows = _rows(labels)
        if len(rows):
            self._figures.append((bandwidth, latency, launch))
            self._families.append(Family(self._count, pattern, rows))
            self._owners.append(np.full(len(rows), -1) if owner is None else owner)
        self._count += len(rows)
        return np.arange(self._count - len(rows), self._count)

    def figures(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return bandwidth in byte/s, latency in s and launch in s of every link."""
        table = np.empty((3, self._count))
        for family, figures in zip(self._families, self._figures, strict=True):
            for column, figure in zip(table, figures, strict=True):
                column[family.first_link : family.first_link + len(family.labels)] = figure
        bandwidth, latency, launch = table
        return bandwidth, latency, launch

    def parts(self, device_parts: IntArray) -> Parts:
        """Return the parts of the cluster, given those of every device, [levels, devices]."""
        return Parts(device_parts, tuple(self._owners))

    def family(self, link: int) -> Family:
        """Return the family of ``link``; raise ``ValueError`` if there is no such link."""
        if not 0 <= link < self._count:
            raise ValueError(f"links are numbered below {self._count}, met {link}")
        return self._families[bisect_right(self._families, link, key=lambda family: family.first_link) - 1]

    def name(self, link: int) -> str:
        """Return the name of ``link``."""
        family = self.family(link)
        return family.name(int(link) - family.first_link)

    def names(self, links: IntArray) -> list[str]:
        """Return the names of many links."""
        names = [""] * len(links)
        for family in self._families:
            members = np.flatnonzero((links >= family.first_link) & (links < family.first_link + len(family.labels)))
            rows = family.labels[links[members] - family.first_link].tolist()
            for place, row in zip(members.tolist(), rows, strict=True):
                names[place] = family.pattern.format(*row)
        return names

    def _index_names(self, family: Family) -> dict[str, int]:
        """Return the indices of the links of a family by name."""
        if family.first_link not in self._places:
            rows = family.labels.tolist()
            self._places[family.first_link] = {family.pattern.format(*row): index for index, row in enumerate(rows)}
        return self._places[family.first_link]

    def link(self, name: str) -> int:
        """Return the number of the link called ``name``; a ``ValueError`` names the most similar one."""
        pattern = _NUMBER.sub("{}", name)
        self._num_lookups += 1
        for family in self._families:
            if not family.has_text and family.pattern != pattern:
                continue
            if family.has_text or self._num_lookups > MAX_SINGLE_LOOKUPS:
                if (place := self._index_names(family).get(name)) is not None:
                    return family.first_link + place
            else:
                index = family.find_nearest(name)
                if family.name(index) == name:
                    return family.first_link + index
        nearest = get_close_matches(
            name[:_MAX_SHOWN], [f.name(f.find_nearest(name)) for f in self._families], n=1, cutoff=0.0
        )
        rule = "a link goes by the name it was built with"
        raise ValueError(f"{rule}, met {name[:_MAX_SHOWN]!r}; nearest: {' '.join(nearest) or 'none'}")


def _rows(labels: IntArray | tuple[IntArray, ...] | tuple[tuple[str, str], ...]) -> NDArray[Any]:
    if isinstance(labels, np.ndarray):
        return labels[:, None]
    if isinstance(labels[0], np.ndarray):
        return np.stack(labels, axis=1)
    return np.array(labels, dtype=object)


@dataclass(frozen=True, eq=False)
class Numbering:
    """Numbers of nodes, hosts and NICs of a cluster, node by node.

    Parameters
    ----------
    kinds
        The distinct kinds of node.
    node_kind, node_rank
        For every node its kind, and its position among the nodes of that kind.
    node, local, kind, rank
        For every device its node, its position in the node, the node's kind, and the device's position among the
        devices of all nodes of that kind.
    host, host_local
        For every device its host, and its position among that host's devices.
    nic
        For every device its NIC.
    """

    kinds: tuple[Node, ...]
    node_kind: IntArray
    node_rank: IntArray
    node: IntArray
    local: IntArray
    kind: IntArray
    rank: IntArray
    host: IntArray
    host_local: IntArray
    nic: IntArray

    def counts(self, count: Callable[[Node], int]) -> IntArray:
        """Return ``count`` of the kind of every node."""
        return np.array([count(kind) for kind in self.kinds], dtype=np.int64)[self.node_kind]

    def figures(self, figure: Callable[[Node], float]) -> FloatArray:
        """Return ``figure`` of the kind of every node."""
        return np.array([figure(kind) for kind in self.kinds], dtype=np.float64)[self.node_kind]

    def nodes_of(self, kind: int) -> IntArray:
        """Return the nodes of a kind."""
        return np.flatnonzero(self.node_kind == kind)

    def devices_of(self, kind: int) -> IntArray:
        """Return the devices of the nodes of a kind."""
        return np.flatnonzero(self.kind == kind)


def owners(counts: IntArray) -> IntArray:
    """Return the owner of every part if owner ``i`` has ``counts[i]`` parts."""
    return np.repeat(np.arange(len(counts)), counts)


def starts(counts: IntArray) -> IntArray:
    """Return the number of the first part of every owner if owner ``i`` has ``counts[i]`` parts."""
    return np.cumsum(counts) - counts


def number_devices(cluster: Cluster) -> Numbering:
    """Return the numbering of nodes, hosts and NICs of ``cluster``."""
    number = {node: index for index, node in enumerate(dict.fromkeys(node for node, _ in cluster.nodes))}
    kinds = tuple(number)
    node_kind = np.array([number[node] for node, _ in cluster.nodes])[cluster.node_kinds]
    devices, hosts, nics = (
        np.array([getattr(kind, part) for kind in kinds])[node_kind] for part in ("devices", "hosts", "nics")
    )
    node = owners(devices)
    local = np.arange(len(node)) - starts(devices)[node]
    devices_per_host = (devices // hosts)[node]
    host = starts(hosts)[node] + local // devices_per_host
    nic = starts(nics)[node] + local * nics[node] // devices[node]
    kind = node_kind[node]
    ranks = (_ranks(column, len(kinds)) for column in (node_kind, kind))
    return Numbering(kinds, node_kind, next(ranks), node, local, kind, next(ranks), host, local % devices_per_host, nic)


def _ranks(kinds: IntArray, count: int) -> IntArray:
    """Return the position of every item among the items of its kind."""
    ranks = np.zeros(len(kinds), dtype=np.int64)
    for kind in range(count):
        members = np.flatnonzero(kinds == kind)
        ranks[members] = np.arange(len(members))
    return ranks
