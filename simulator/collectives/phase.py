"""One phase of a collective: latency first, then bytes over links."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.interconnect.routes import FloatArray, IntArray


class Phase(NamedTuple):
    """One phase of a collective on each of several groups, for one byte of its size.

    Parameters
    ----------
    latency
        For every group, seconds before its bytes move.
    group, link, load
        Sparse: bytes over ``link`` for every byte of size; one row a group and link, sorted.
    """

    latency: FloatArray
    group: IntArray
    link: IntArray
    load: FloatArray


def merged(num_groups: int, parts: Sequence[tuple[IntArray, tuple[Phase, ...]]]) -> tuple[Phase, ...]:
    """Return the phases of all groups from those of some: (their indices, their phases).

    A group whose algorithm has fewer phases than another's idles in the last ones.
    """
    if len(parts) == 1:
        return parts[0][1]
    phases = []
    for index in range(max((len(part) for _, part in parts), default=0)):
        latency = np.zeros(num_groups)
        met = [(groups, part[index]) for groups, part in parts if index < len(part)]
        for groups, phase in met:
            latency[groups] = phase.latency
        rows = [np.concatenate(column) for column in zip(*((g[p.group], p.link, p.load) for g, p in met), strict=True)]
        order = np.lexsort((rows[1], rows[0]))
        phases.append(Phase(latency, rows[0][order], rows[1][order], rows[2][order]))
    return tuple(phases)
