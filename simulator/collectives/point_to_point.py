"""Collectives of messages between pairs of ranks: all-to-all, send, shift, and a central server."""

from collections.abc import Iterator

import numpy as np

from simulator.cluster import Cluster
from simulator.collectives.phase import Phase
from simulator.collectives.traffic import Edges, launched, phase, traffic
from simulator.interconnect.routes import IntArray

_PAIRS = 1 << 18
"""Messages whose routes are held at once."""
_MOST = 1 << 24
"""Messages of one group up to which an all-to-all looks at all of them."""


def pairwise(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase of a pairwise exchange: every rank sends ``1/n`` of the size to each other.

    In step ``t`` rank ``i`` sends to rank ``i + t`` [1]_; ``latency = launch + (n - 1) * mean
    latency of all messages``. Above 4,096 ranks an even choice of the steps stands for all.

    References
    ----------
    .. [1] Thakur, Rabenseifner and Gropp, "Optimization of collective communication
       operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    num_groups, ranks = groups.shape
    looked_at = min(ranks - 1, max(_MOST // ranks, 1))
    steps = 1 + np.arange(looked_at) * (ranks - 1) // looked_at
    used = traffic(cluster, num_groups, _exchange(groups, steps))
    scale = (ranks - 1) / looked_at / ranks
    return launched(cluster, phase(used, (ranks - 1) * used.latency, scale))


def _exchange(groups: IntArray, steps: IntArray) -> Iterator[Edges]:
    """Yield one byte by every rank to the rank that is each of ``steps`` further."""
    num_groups, ranks = groups.shape
    at_once = max(_PAIRS // groups.size, 1)
    for first in range(0, len(steps), at_once):
        step = steps[first : first + at_once]
        target = groups[:, (np.arange(ranks)[:, None] + step) % ranks].ravel()
        source = np.repeat(groups.ravel(), len(step))
        group = np.repeat(np.arange(num_groups), ranks * len(step))
        yield Edges(group, source, target, np.ones(len(source)))


def direct(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase of a message from the first rank of each pair to the second."""
    edges = Edges(np.arange(len(groups)), groups[:, 0], groups[:, 1], np.ones(len(groups)))
    used = traffic(cluster, len(groups), [edges])
    return launched(cluster, phase(used, used.latency))


def shift(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase in which every rank of a group sends its buffer to the next one, the last to the first."""
    num_groups, ranks = groups.shape
    group = np.repeat(np.arange(num_groups), ranks)
    target = np.roll(groups, -1, axis=1).ravel()
    used = traffic(cluster, num_groups, [Edges(group, groups.ravel(), target, np.ones(len(group)))])
    return launched(cluster, phase(used, used.longest))


def parameter_server(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the two phases of a central all-reduce: all send to the first rank, which answers all [1]_.

    References
    ----------
    .. [1] Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
    """
    num_groups, ranks = groups.shape
    group = np.repeat(np.arange(num_groups), ranks - 1)
    server, workers = np.repeat(groups[:, 0], ranks - 1), groups[:, 1:].ravel()
    phases = []
    for source, target in ((workers, server), (server, workers)):
        used = traffic(cluster, num_groups, [Edges(group, source, target, np.ones(len(group)))])
        phases.append(phase(used, used.longest))
    return launched(cluster, *phases)
