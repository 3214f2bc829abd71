"""Collectives that switches reduce and multicast, inside nodes and in the fabric."""

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.collectives.hierarchical import equal_ranks, inside_phase
from meshwise.simulator.collectives.placement import Placement, place
from meshwise.simulator.collectives.ring import inside
from meshwise.simulator.collectives.traffic import Phase, Traffic, launched, merged, phase, together, traffic
from meshwise.simulator.collectives.tree import between
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import BoolArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import FatTree, Graph, LeafSpine, Switch, Torus


def in_switch(cluster: Cluster, groups: IntArray, collective: Collective) -> tuple[Phase, ...]:
    """Return the phases of a collective that switches reduce [1]_ or multicast.

    Inside a node an all-reduce is one phase in which every device sends and receives ``1 + 1/n`` bytes for every byte
    of size: the switch reads all parts of all buffers, and each device multicasts the part that it got reduced [2]_.
    Across nodes of ``k`` ranks it is a reduce-scatter inside nodes, a reduction in the fabric for which every NIC sends
    and receives ``1/k`` of the size once, and an all-gather inside nodes; it pays one launch for all three. If only
    switches inside nodes reduce, double binary trees join the nodes. They share one phase with the reduction inside
    nodes, which runs chunk after chunk: NCCL's NVLS tree [3]_. The `CommunicationLibrary` has the fraction of the ports
    that is reached and the extra launch.

    References
    ----------
    .. [1] Graham et al., "Scalable hierarchical aggregation protocol (SHARP)", COM-HPC 2016.
    .. [2] Klenk et al., "An in-network architecture for accelerating shared-memory
       multiprocessor collectives", ISCA 2020.
    .. [3] NVIDIA/nccl, src/device/all_reduce.h: ``NCCL_ALGO_NVLS_TREE``.
    """
    ordered = np.sort(groups, axis=1)
    placement = place(cluster, ordered)
    reduces = switches_reduce(cluster, placement)
    kinds = list(zip((placement.nodes > 1).tolist(), reduces.tolist(), (placement.channels > 1).tolist(), strict=True))
    parts = []
    for kind in sorted(set(kinds)):
        chosen = np.flatnonzero([each == kind for each in kinds])
        part = placement if len(chosen) == len(groups) else place(cluster, ordered[chosen])
        spans, reduced, _ = kind
        if not spans:
            phases: tuple[Phase, ...] = (_switched(cluster, part, collective),)
        else:
            phases = _across(cluster, part, reduced) if fabric_reduces(cluster) else (_joined(cluster, part),)
        first, *others = launched(cluster, *phases)
        # No launch, no other protocol: collectives in switches run by `SIMPLE` alone.
        first = first._replace(latency=first.latency + cluster.library.reduction_launch)
        parts.append((chosen, tuple(each._replace(launch=None) for each in (first, *others))))
    return merged(len(groups), parts)


def switches_reduce(cluster: Cluster, placement: Placement) -> BoolArray:
    """Return for every group whether the switches inside all its nodes reduce."""
    kinds = np.array([isinstance(node.network, Switch) and node.network.reduces for node, _ in cluster.nodes])
    of_seat = kinds[cluster.node_kinds[cluster.device_nodes[placement.device[placement.start]]]]
    if isinstance(cluster.fabric, Torus | Graph):
        return np.zeros(placement.num_groups, dtype=np.bool_)
    reduces: BoolArray = np.bincount(placement.group, ~of_seat, placement.num_groups) == 0
    return reduces


def fabric_reduces(cluster: Cluster) -> bool:
    """Return whether the switches between nodes reduce."""
    return isinstance(cluster.fabric, LeafSpine | FatTree) and cluster.fabric.reduces


def _switched(cluster: Cluster, placement: Placement, collective: Collective) -> Phase:
    """Return the phase of a collective in the switches inside nodes; each pass through a switch costs one latency."""
    network, edges = interconnect(cluster), inside(cluster, placement)
    used = traffic(cluster, placement.num_groups, [edges])
    routes = network.routes(edges.source, edges.target)
    sends = np.zeros(network.num_links, dtype=bool)
    sends[routes.link[np.diff(routes.pair, prepend=-1) > 0]] = True  # a route starts with the sender's port
    part = 1.0 / placement.channels[used.group]
    sent = 1.0 * (collective is not Collective.ALL_GATHER) + part * (collective is not Collective.REDUCE_SCATTER)
    received = 1.0 * (collective is not Collective.REDUCE_SCATTER) + part * (collective is not Collective.ALL_GATHER)
    latency = used.latency * (2 if collective is Collective.ALL_REDUCE else 1)
    load = used.load * np.where(sends[used.link], sent, received) / cluster.library.reduction
    return Phase(latency, used.group, used.link, load)


def _joined(cluster: Cluster, placement: Placement) -> Phase:
    """Return the one phase of an all-reduce in the switches inside nodes and over trees between nodes."""
    within = _switched(cluster, placement, Collective.ALL_REDUCE)
    levels, steps = between(cluster, placement)
    zero = np.zeros(placement.num_groups)
    ports = Traffic(zero, zero, zero, within.group, within.link, within.load)
    twice = [level.times(np.full(placement.num_groups, 2.0)) for level in levels]
    return phase(together(cluster, ports, *twice), within.latency + 2 * steps)


def _across(cluster: Cluster, placement: Placement, reduces: bool) -> tuple[Phase, ...]:
    """Return the phases of an all-reduce in the fabric.

    A tree of switches carries the sum once up and once down every cable; a ring through the nodes in order of leaves
    puts the same bytes on every cable, and stands for it here.
    """
    used = traffic(cluster, placement.num_groups, [equal_ranks(placement)])
    reduced = phase(used, used.longest)
    if placement.channels[0] == 1:
        return (reduced,)
    if not reduces:
        within = inside_phase(cluster, placement)
        return within, reduced, within
    scatter, gather = (
        _switched(cluster, placement, each) for each in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    return scatter, reduced, gather
