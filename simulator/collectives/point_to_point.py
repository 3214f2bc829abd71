"""Collectives of messages between pairs of ranks: all-to-all, send, shift and parameter server."""

from collections.abc import Iterator

import numpy as np

from meshwise.simulator.collectives.traffic import Edges, Phase, build_phase, traffic, with_launch
from meshwise.simulator.interconnect.routes import IntArray
from meshwise.simulator.machine.cluster import Cluster

_PAIRS = 1 << 18
"""Messages whose routes are in memory at the same time."""
_MOST = 1 << 24
"""Messages of a group up to which an all-to-all routes all of them; of more it routes a sample."""


def pairwise_exchange(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase of a pairwise all-to-all: every rank sends ``1/n`` of the size to every other rank.

    Rank ``i`` sends to rank ``i + t`` for all ``t``. Its messages are under way at the same time, as NCCL's grouped
    sends are: ``latency = launch + the longest latency of a message``. Above 4,096 ranks evenly spaced ``t`` stand for
    all. Inside a node the copy of a rank's own part counts (`CommunicationLibrary`).
    """
    num_groups, ranks = groups.shape
    num_steps = min(ranks - 1, max(_MOST // ranks, 1))
    steps = 1 + np.arange(num_steps) * (ranks - 1) // num_steps
    link_traffic = traffic(cluster, num_groups, _exchange(groups, steps))
    nodes = cluster.device_nodes[groups]
    # Division by the number of routed steps: they stand for all ranks - 1.
    self_copy = np.where((nodes == nodes[:, :1]).all(axis=1), cluster.library.own, 0.0)
    return with_launch(
        cluster,
        build_phase(link_traffic, link_traffic.max_latency, (ranks - 1 + self_copy) / num_steps / ranks, messages=True),
    )


def _exchange(groups: IntArray, steps: IntArray) -> Iterator[Edges]:
    """Yield messages of one byte from every rank to the ranks that are ``steps`` further, some steps at a time."""
    num_groups, ranks = groups.shape
    chunk_size = max(_PAIRS // groups.size, 1)
    for begin in range(0, len(steps), chunk_size):
        step = steps[begin : begin + chunk_size]
        target = groups[:, (np.arange(ranks)[:, None] + step) % ranks].ravel()
        source = np.repeat(groups.ravel(), len(step))
        group = np.repeat(np.arange(num_groups), ranks * len(step))
        yield Edges(group, source, target, np.ones(len(source)))


def send_phases(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase of a message from the first rank of each pair to the second."""
    edges = Edges(np.arange(len(groups)), groups[:, 0], groups[:, 1], np.ones(len(groups)))
    link_traffic = traffic(cluster, len(groups), [edges])
    return with_launch(cluster, build_phase(link_traffic, link_traffic.latency, messages=True))


def shift_phases(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the one phase in which every rank of a group sends its buffer to the next, and the last to the first."""
    num_groups, ranks = groups.shape
    group = np.repeat(np.arange(num_groups), ranks)
    target = np.roll(groups, -1, axis=1).ravel()
    link_traffic = traffic(cluster, num_groups, [Edges(group, groups.ravel(), target, np.ones(len(group)))])
    return with_launch(cluster, build_phase(link_traffic, link_traffic.max_latency, messages=True))


def parameter_server(cluster: Cluster, groups: IntArray) -> tuple[Phase, ...]:
    """Return the two phases of an all-reduce by a parameter server: all send to the first rank, which answers all [1]_.

    References
    ----------
    .. [1] Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
    """
    num_groups, ranks = groups.shape
    group = np.repeat(np.arange(num_groups), ranks - 1)
    server, workers = np.repeat(groups[:, 0], ranks - 1), groups[:, 1:].ravel()
    phases = []
    for source, target in ((workers, server), (server, workers)):
        link_traffic = traffic(cluster, num_groups, [Edges(group, source, target, np.ones(len(group)))])
        phases.append(build_phase(link_traffic, link_traffic.max_latency, messages=True))
    return with_launch(cluster, *phases)
