"""The bucket algorithm on a torus: rings along all axes, in both directions, at the same time."""

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.collectives.traffic import (
    Edges,
    Phase,
    Traffic,
    build_phase,
    merge_phases,
    merge_traffic,
    traffic,
    with_launch,
)
from meshwise.simulator.interconnect.routes import FloatArray, IntArray
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Torus


def torus_ring(cluster: Cluster, fabric: Torus, groups: IntArray, collective: Collective) -> tuple[Phase, ...]:
    """Return the phases of rings on a torus: the bucket algorithm for boxes, a single ring in order for other groups.

    A group is a box if its coordinates are all combinations of some coordinates on every axis; so a group with every
    second device of an axis is one, too.
    """
    lengths = _box_lengths(fabric, groups)
    parts = []
    for shape in np.unique(lengths, axis=0):
        members = np.flatnonzero((lengths == shape).all(axis=1))
        if shape.any():
            boxes = np.sort(groups[members], axis=1).reshape(-1, *shape[shape > 1])
            parts.append((members, _bucket_phases(cluster, boxes, collective)))
        else:
            parts.append((members, _ordered_ring(cluster, groups[members], collective)))
    return merge_phases(len(groups), parts)


def _box_lengths(fabric: Torus, groups: IntArray) -> IntArray:
    """Return the number of coordinates of every group on each axis; all 0 for groups that are not boxes."""
    num_groups, ranks = groups.shape
    lengths = np.empty((num_groups, len(fabric.shape)), dtype=np.int64)
    for axis, coordinate in enumerate(np.unravel_index(groups, fabric.shape)):
        is_present = np.zeros((num_groups, fabric.shape[axis]), dtype=bool)
        is_present[np.arange(num_groups)[:, None], coordinate] = True
        lengths[:, axis] = is_present.sum(axis=1)
    # As many ranks as combinations of coordinates: all of them are in the group.
    return np.where((lengths.prod(axis=1) == ranks)[:, None], lengths, 0)


def _bucket_phases(cluster: Cluster, boxes: IntArray, collective: Collective) -> tuple[Phase, ...]:
    """Return the phases of the multi-dimensional bucket algorithm on ``boxes[group, x, y, ...]``.

    The data is cut into two parts for each axis, one for each direction. In the ``p``-th phase of a reduce-scatter the
    parts of axis ``a`` run around axis ``a + p``, after the axes before it have cut them: all wires are busy in all
    phases [1]_ [2]_. An all-gather (and a broadcast, at the same cost) is its mirror image; an all-reduce is both.

    References
    ----------
    .. [1] Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus
       interconnects", ICS 2010.
    .. [2] Jouppi et al., "TPU v4: an optically reconfigurable supercomputer for machine
       learning with hardware support for embeddings", ISCA 2023.
    """
    axes = [_axis_rings(cluster, boxes, axis) for axis in range(1, boxes.ndim)]
    scatter = [_scatter_phase(cluster, axes, boxes.shape[1:], index) for index in range(len(axes))]
    gather = scatter[::-1]
    phases = {Collective.ALL_REDUCE: scatter + gather, Collective.REDUCE_SCATTER: scatter}.get(collective, gather)
    return with_launch(cluster, *phases)


def _ordered_ring(cluster: Cluster, groups: IntArray, collective: Collective) -> tuple[Phase, ...]:
    """Return the one phase of rings in both directions through the ranks in their order."""
    link_traffic = _axis_rings(cluster, groups, 1)
    rate = (2 if collective is Collective.ALL_REDUCE else 1) * (groups.shape[1] - 1) / groups.shape[1]
    return with_launch(cluster, build_phase(link_traffic, rate * link_traffic.delay, rate))


def _axis_rings(cluster: Cluster, boxes: IntArray, axis: int) -> Traffic:
    """Return the traffic of rings along one axis; every device sends half a byte in each direction."""
    group = np.repeat(np.arange(len(boxes)), boxes[0].size)
    source = boxes.ravel()
    rings = [
        Edges(group, source, np.roll(boxes, direction, axis).ravel(), np.full(len(group), 0.5)) for direction in (-1, 1)
    ]
    return traffic(cluster, len(boxes), rings)


def _scatter_phase(cluster: Cluster, axes: list[Traffic], lengths: tuple[int, ...], index: int) -> Phase:
    """Return the ``index``-th phase of the reduce-scatter, in which every axis carries the parts of another one."""
    count = len(axes)
    axis_traffic, latencies = [], []
    for axis, length in enumerate(lengths):
        num_parts = np.prod([lengths[(axis - offset) % count] for offset in range(1, index + 1)])
        size = (length - 1) / length / count / float(num_parts)
        axis_traffic.append(axes[axis]._replace(load=axes[axis].load * size))
        latencies.append((length - 1) * axes[axis].latency)
    latency: FloatArray = np.max(latencies, axis=0)
    return build_phase(merge_traffic(cluster, *axis_traffic), latency)
