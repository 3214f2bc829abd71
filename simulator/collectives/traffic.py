"""Traffic of messages between devices: their latency, and their bytes over links.

A collective runs in phases: a phase has a latency, then moves bytes over links.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import FloatArray, IntArray
from meshwise.simulator.machine.cluster import Cluster


class Phase(NamedTuple):
    """One phase of a collective on each of several groups, for one byte of size.

    Parameters
    ----------
    latency
        For every group, seconds before its bytes move.
    group, link, load
        Bytes over ``link`` for every byte of size, as sparse rows: one for each group and link, sorted.
    launch
        For every group the part of ``latency`` that is paid once, not in steps; ``None`` if the phase runs by `SIMPLE`
        alone.
    messages
        Whether the phase is sends or an all-to-all, not steps of a collective.
    """

    latency: FloatArray
    group: IntArray
    link: IntArray
    load: FloatArray
    launch: FloatArray | None = None
    messages: bool = False


def merge_phases(num_groups: int, parts: Sequence[tuple[IntArray, tuple[Phase, ...]]]) -> tuple[Phase, ...]:
    """Return the phases of all groups from parts: pairs (indices of groups, their phases).

    A group with fewer phases than others idles in the last ones.
    """
    if len(parts) == 1:
        return parts[0][1]
    phases = []
    for index in range(max((len(part) for _, part in parts), default=0)):
        entries = [(groups, part[index]) for groups, part in parts if index < len(part)]
        latency, launch = np.zeros((2, num_groups))
        has_launch = all(phase.launch is not None for _, phase in entries)
        for groups, phase in entries:
            latency[groups] = phase.latency
            launch[groups] = 0.0 if phase.launch is None else phase.launch
        rows = [
            np.concatenate(column) for column in zip(*((g[p.group], p.link, p.load) for g, p in entries), strict=True)
        ]
        order = np.lexsort((rows[1], rows[0]))
        merged_phase = Phase(latency, rows[0][order], rows[1][order], rows[2][order], launch if has_launch else None)
        phases.append(merged_phase)
    return tuple(phases)


_SPARSE_RATIO = 4
"""Cells of a full table per row above which rows are sorted to sum them; below, the table is faster."""


class Edges(NamedTuple):
    """Messages of ``weight`` bytes from device ``source`` to device ``target``, each on behalf of a group."""

    group: IntArray
    source: IntArray
    target: IntArray
    weight: FloatArray


class Traffic(NamedTuple):
    """The summed messages of each of several groups.

    Parameters
    ----------
    weight, delay, max_latency
        For every group: the bytes of all messages, the sum of bytes times latency, and the largest latency.
    group, link, load
        Bytes over ``link``, as sparse rows: one for each group and link, sorted.
    """

    weight: FloatArray
    delay: FloatArray
    max_latency: FloatArray
    group: IntArray
    link: IntArray
    load: FloatArray

    @property
    def latency(self) -> FloatArray:
        """For every group the mean latency of its messages, weighted by bytes; 0 for groups without messages."""
        return np.divide(self.delay, self.weight, out=np.zeros_like(self.delay), where=self.weight > 0)

    def with_size(self, size: FloatArray) -> "Traffic":
        """Return the same messages with the bytes on links multiplied by ``size`` of their group."""
        return self._replace(load=self.load * size[self.group])


def traffic(cluster: Cluster, num_groups: int, chunks: Iterable[Edges]) -> Traffic:
    """Return the traffic of all messages, which come in chunks to limit the memory of routes.

    The latency of a message is the sum over the links of its route; over several equal routes it is their mean.
    """
    network = interconnect(cluster)
    weight, delay, max_latency = np.zeros((3, num_groups))
    parts = []
    for edges in chunks:
        # The chunks of an exchange among many ranks take seconds.
        check_deadline()
        routes = network.routes(edges.source, edges.target)
        latency = np.bincount(routes.pair, routes.share * network.latency[routes.link], len(edges.source))
        weight += np.bincount(edges.group, edges.weight, num_groups)
        delay += np.bincount(edges.group, edges.weight * latency, num_groups)
        np.maximum.at(max_latency, edges.group, latency)
        order = _order_by_hop(routes.pair)
        pair, link = routes.pair[order], routes.link[order]
        load = edges.weight[pair] * routes.share[order]
        parts.append(_sum_rows(edges.group[pair], link, load, num_groups, network.num_links))
    return Traffic(weight, delay, max_latency, *_join_rows(parts, num_groups, network.num_links))


def merge_traffic(cluster: Cluster, *parts: Traffic) -> Traffic:
    """Return the sum of several traffics of the same groups."""
    num_groups = len(parts[0].weight)
    rows = _join_rows(
        [(part.group, part.link, part.load) for part in parts], num_groups, interconnect(cluster).num_links
    )
    return Traffic(
        sum((part.weight for part in parts), np.zeros(num_groups)),
        sum((part.delay for part in parts), np.zeros(num_groups)),
        np.max([part.max_latency for part in parts], axis=0),
        *rows,
    )


def build_phase(
    link_traffic: Traffic, latency: FloatArray, size: FloatArray | float = 1.0, *, messages: bool = False
) -> Phase:
    """Return the phase that waits ``latency`` and moves ``size`` times the bytes of ``link_traffic``, by group."""
    scale = np.broadcast_to(np.asarray(size, dtype=np.float64), latency.shape)
    load = link_traffic.load * scale[link_traffic.group]
    return Phase(latency, link_traffic.group, link_traffic.link, load, np.zeros(len(latency)), messages)


def with_launch(cluster: Cluster, *phases: Phase) -> tuple[Phase, ...]:
    """Return the phases of one collective, the first one with the largest launch of all its links as extra latency."""
    launch = interconnect(cluster).launch
    latency = np.zeros(len(phases[0].latency))
    for part in phases:
        np.maximum.at(latency, part.group, launch[part.link])
    paid_launch = None if phases[0].launch is None else phases[0].launch + latency
    return (phases[0]._replace(latency=phases[0].latency + latency, launch=paid_launch), *phases[1:])


def _order_by_hop(pair: IntArray) -> IntArray:
    """Return the order of rows by hop: all first hops, then all second ones. Such runs sort fast."""
    first_rows = np.flatnonzero(np.diff(pair, prepend=-1))
    hop = np.arange(len(pair)) - np.repeat(first_rows, np.diff(first_rows, append=len(pair)))
    # NumPy sorts integers of 16 bits by radix, in linear time.
    return np.argsort(hop.astype(np.uint16), kind="stable")


_Rows = tuple[IntArray, IntArray, FloatArray]


def _join_rows(parts: list[_Rows], num_groups: int, num_links: int) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    # Columns of no rows, for traffic of no parts.
    empty = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    group, link, load = (np.concatenate(column) for column in zip(empty, *parts, strict=True))
    return _sum_rows(group, link, load, num_groups, num_links)


def _sum_rows(group: IntArray, link: IntArray, load: FloatArray, num_groups: int, num_links: int) -> _Rows:
    """Return one sorted row for each group and link, with the sum of its loads."""
    key = group * num_links + link
    if not len(key):
        return group, link, load
    if num_groups * num_links <= _SPARSE_RATIO * len(key):
        table = np.asarray(np.bincount(key, load, num_groups * num_links), dtype=np.float64)
        cells = np.flatnonzero(table)
        return cells // num_links, cells % num_links, table[cells]
    order = np.argsort(key, kind="stable")
    key = key[order]
    is_new = np.concatenate([[True], key[1:] != key[:-1]])
    cells, sums = key[is_new], np.bincount(np.cumsum(is_new) - 1, load[order])
    return cells // num_links, cells % num_links, np.asarray(sums, dtype=np.float64)
