"""What a collective asks of the links inside nodes and of NICs, apart from their figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from simulator.calibration.collective_rows import CollectiveRow
from simulator.catalog import cluster
from simulator.cluster import Cluster
from simulator.collective import Phase, algorithms, candidates, phases
from simulator.collective_kinds import Algorithm, Collective
from simulator.interconnect.interconnect import interconnect
from simulator.interconnect.routes import FloatArray
from simulator.library import LOSSLESS, Library
from simulator.link import Link

_NONE, _UNIT = Link(0.0, inf), Link(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is fitted: the link inside nodes, the NIC between them, and the library."""

    link: Link
    nic: Link = _NONE
    library: Library = LOSSLESS


class Term(NamedTuple):
    """One phase of a collective: (steps, bytes for each of its size) inside nodes and between them.

    ``own`` are the bytes inside nodes that `Library.own` multiplies.
    """

    inside: tuple[float, float]
    between: tuple[float, float]
    own: float
    switched: bool
    messages: bool

    def time(self, figures: Figures, size: FloatArray, first: bool) -> FloatArray:
        """Return the seconds of the phase for every size; the ``first`` one pays for what is paid once."""
        library, link, nic = figures.library, figures.link, figures.nic
        launch = max(link.launch if self.inside[1] else 0.0, nic.launch if self.between[1] else 0.0) * first
        waits = self.inside[0] * link.latency, self.between[0] * nic.latency
        steps = max(waits) if self.messages else sum(waits)  # messages are under way together
        inside = (self.inside[1] + self.own * library.own) / link.bandwidth
        moving = max(inside / library.reduction if self.switched else inside, self.between[1] / nic.bandwidth)
        once = library.reduction_launch * (self.switched and first)
        ways = library.ways(launch + steps + once, None if self.switched else launch, self.messages)
        found: FloatArray = np.min([latency + size * (moving * moved) for latency, moved in ways], axis=0)
        return found


Terms = tuple[Term, ...]
"""The phases of a collective by one algorithm."""


class Case(NamedTuple):
    """Rows of the same collective on the same devices: which, their sizes, and the algorithms to choose from."""

    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    size: FloatArray
    ways: tuple[Terms, ...]


def cases(rows: Sequence[CollectiveRow]) -> tuple[Case, ...]:
    """Return rows by what they have in common."""
    found: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault((row.machine, row.nodes, row.ranks, row.collective, row.algorithm), []).append(index)
    return tuple(
        Case(np.array(each), np.array([rows[i].size for i in each]), _ways(rows[each[0]])) for each in found.values()
    )


def predict(found: Sequence[Case], count: int, figures: Figures) -> FloatArray:
    """Return the seconds of all ``count`` rows, each by the algorithm and protocol that is fastest."""
    seconds = np.zeros(count)
    for case in found:
        every = [
            np.sum([each.time(figures, case.size, not n) for n, each in enumerate(way)], axis=0) for way in case.ways
        ]
        seconds[case.rows] = np.min(every, axis=0)
    return seconds


def _ways(row: CollectiveRow) -> tuple[Terms, ...]:
    machine, group = cluster(row.machine, row.nodes), np.array(row.group)
    able = algorithms(machine, row.collective, group)
    if row.algorithm is not None:
        chosen: tuple[Algorithm, ...] = (row.algorithm,) if row.algorithm in able else able
    else:
        chosen = tuple(each for each in candidates(machine, row.collective) if each in able)
    return tuple(terms(row.machine, row.nodes, row.group, row.collective, each) for each in chosen)


@lru_cache(maxsize=4096)
def terms(name: str, nodes: int, group: tuple[int, ...], collective: Collective, algorithm: Algorithm) -> Terms:
    """Return what the phases of a collective ask of links, from the phases that the simulator builds.

    Figures of 1 on one kind of link and of nothing on the other show the steps and bytes on each.
    """
    inside, own, between = (
        _with(cluster(name, nodes), *links)
        for links in ((_UNIT, _NONE, LOSSLESS), (_UNIT, _NONE, Library(own=1.0)), (_NONE, _UNIT, LOSSLESS))
    )
    parts = [phases(each, collective, algorithm, np.array([group])) for each in (inside, own, between)]
    return tuple(
        Term(
            (float(a.latency[0]), _busiest(inside, a)),
            (float(b.latency[0]), _busiest(between, b)),
            _busiest(own, o) - _busiest(inside, a),
            a.launch is None,
            a.messages,
        )
        for a, o, b in zip(*parts, strict=True)
    )


def _with(machine: Cluster, link: Link, nic: Link, library: Library) -> Cluster:
    (node, count), *_ = machine.nodes
    node = replace(node, network=replace(node.network, link=link), nic=nic, host=replace(node.host, pcie=None))
    return replace(machine, nodes=((node, count),), library=library)


def _busiest(machine: Cluster, phase: Phase) -> float:
    return float(np.max(phase.load / interconnect(machine).bandwidth[phase.link], initial=0.0))
