"""Collectives that switches reduce and multicast, inside nodes and in the fabric."""

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.collectives.hierarchical import equal_rank_rings, inside_phase
from meshwise.simulator.collectives.placement import Placement, place_groups
from meshwise.simulator.collectives.ring import node_rings
from meshwise.simulator.collectives.traffic import (
    Phase,
    Traffic,
    build_phase,
    merge_phases,
    merge_traffic,
    traffic,
    with_launch,
)
from meshwise.simulator.collectives.tree import node_trees
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import BoolArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import FatTree, Graph, LeafSpine, Switch, Torus


def in_switch_phases(cluster: Cluster, groups: IntArray, collective: Collective) -> tuple[Phase, ...]:
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
    sorted_groups = np.sort(groups, axis=1)
    placement = place_groups(cluster, sorted_groups)
    reduces = switches_reduce(cluster, placement)
    kinds = list(zip((placement.nodes > 1).tolist(), reduces.tolist(), (placement.channels > 1).tolist(), strict=True))
    parts = []
    for kind in sorted(set(kinds)):
        members = np.flatnonzero([entry == kind for entry in kinds])
        part = placement if len(members) == len(groups) else place_groups(cluster, sorted_groups[members])
        spans_nodes, is_reduced, _ = kind
        if not spans_nodes:
            phases: tuple[Phase, ...] = (_switch_phase(cluster, part, collective),)
        else:
            phases = (
                _fabric_phases(cluster, part, is_reduced) if fabric_reduces(cluster) else (_tree_phase(cluster, part),)
            )
        head, *tail = with_launch(cluster, *phases)
        # No launch, no other protocol: collectives in switches run by `SIMPLE` alone.
        head = head._replace(latency=head.latency + cluster.library.reduction_launch)
        parts.append((members, tuple(entry._replace(launch=None) for entry in (head, *tail))))
    return merge_phases(len(groups), parts)


def switches_reduce(cluster: Cluster, placement: Placement) -> BoolArray:
    """Return for every group whether the switches inside all its nodes reduce."""
    kinds = np.array([isinstance(node.network, Switch) and node.network.reduces for node, _ in cluster.nodes])
    seat_reduces = kinds[cluster.node_kinds[cluster.device_nodes[placement.device[placement.start]]]]
    if isinstance(cluster.fabric, Torus | Graph):
        return np.zeros(placement.num_groups, dtype=np.bool_)
    reduces: BoolArray = np.bincount(placement.group, ~seat_reduces, placement.num_groups) == 0
    return reduces


def fabric_reduces(cluster: Cluster) -> bool:
    """Return whether the switches between nodes reduce."""
    return isinstance(cluster.fabric, LeafSpine | FatTree) and cluster.fabric.reduces


def _switch_phase(cluster: Cluster, placement: Placement, collective: Collective) -> Phase:
    """Return the phase of a collective in the switches inside nodes; each pass through a switch costs one latency."""
    network, edges = interconnect(cluster), node_rings(cluster, placement)
    link_traffic = traffic(cluster, placement.num_groups, [edges])
    routes = network.routes(edges.source, edges.target)
    sends = np.zeros(network.num_links, dtype=bool)
    sends[routes.link[np.diff(routes.pair, prepend=-1) > 0]] = True  # a route starts with the sender's port
    part = 1.0 / placement.channels[link_traffic.group]
    out_load = 1.0 * (collective is not Collective.ALL_GATHER) + part * (collective is not Collective.REDUCE_SCATTER)
    in_load = 1.0 * (collective is not Collective.REDUCE_SCATTER) + part * (collective is not Collective.ALL_GATHER)
    latency = link_traffic.latency * (2 if collective is Collective.ALL_REDUCE else 1)
    load = link_traffic.load * np.where(sends[link_traffic.link], out_load, in_load) / cluster.library.reduction
    return Phase(latency, link_traffic.group, link_traffic.link, load)


def _tree_phase(cluster: Cluster, placement: Placement) -> Phase:
    """Return the one phase of an all-reduce in the switches inside nodes and over trees between nodes."""
    node_phase = _switch_phase(cluster, placement, Collective.ALL_REDUCE)
    levels, steps = node_trees(cluster, placement)
    zero = np.zeros(placement.num_groups)
    ports = Traffic(zero, zero, zero, node_phase.group, node_phase.link, node_phase.load)
    two_rounds = [level.with_size(np.full(placement.num_groups, 2.0)) for level in levels]
    return build_phase(merge_traffic(cluster, ports, *two_rounds), node_phase.latency + 2 * steps)


def _fabric_phases(cluster: Cluster, placement: Placement, reduces: bool) -> tuple[Phase, ...]:
    """Return the phases of an all-reduce in the fabric.

    A tree of switches carries the sum once up and once down every cable; a ring through the nodes in order of leaves
    puts the same bytes on every cable, and stands for it here.
    """
    link_traffic = traffic(cluster, placement.num_groups, [equal_rank_rings(placement)])
    fabric_phase = build_phase(link_traffic, link_traffic.max_latency)
    if placement.channels[0] == 1:
        return (fabric_phase,)
    if not reduces:
        node_phase = inside_phase(cluster, placement)
        return node_phase, fabric_phase, node_phase
    scatter, gather = (
        _switch_phase(cluster, placement, collective)
        for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    return scatter, fabric_phase, gather
