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
    launch
        For every group the part of ``latency`` that is paid once, not in steps; ``None`` where the
        library has no other protocol for the phase.
    messages
        Whether it is sends or an all-to-all, not steps of a collective.
    """

    latency: FloatArray
    group: IntArray
    link: IntArray
    load: FloatArray
    launch: FloatArray | None = None
    messages: bool = False


def merged(num_groups: int, parts: Sequence[tuple[IntArray, tuple[Phase, ...]]]) -> tuple[Phase, ...]:
    """Return the phases of all groups from those of some: (their indices, their phases).

    A group whose algorithm has fewer phases than another's idles in the last ones.
    """
    if len(parts) == 1:
        return parts[0][1]
    phases = []
    for index in range(max((len(part) for _, part in parts), default=0)):
        met = [(groups, part[index]) for groups, part in parts if index < len(part)]
        latency, launch = np.zeros((2, num_groups))
        several = all(phase.launch is not None for _, phase in met)
        for groups, phase in met:
            latency[groups] = phase.latency
            launch[groups] = 0.0 if phase.launch is None else phase.launch
        rows = [np.concatenate(column) for column in zip(*((g[p.group], p.link, p.load) for g, p in met), strict=True)]
        order = np.lexsort((rows[1], rows[0]))
        found = Phase(latency, rows[0][order], rows[1][order], rows[2][order], launch if several else None)
        phases.append(found)
    return tuple(phases)
