"""Who communicates with whom, and over which links: what a page says of a communication beside its bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.cluster import Cluster
from simulator.interconnect.interconnect import Interconnect, interconnect
from simulator.program import StreamKind, TaskKind
from simulator.units import format_bandwidth
from strategies.mesh import CONTEXT, DATA, EXPERT, GROUPS, OPERATOR_AXES, PIPELINE, REPLICA, Mesh
from strategies.plan import Plan

_AXES = {
    TaskKind.TENSOR_COMMUNICATION: OPERATOR_AXES,
    TaskKind.EXPERT_COMMUNICATION: GROUPS[EXPERT],
    TaskKind.CONTEXT_COMMUNICATION: GROUPS[CONTEXT],
}
"""The mesh axes of the groups of a kind of communication inside passes."""


def groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the groups of ranks that communicate: their kind, axes, and links at every pipeline position.

    A group with a ``stream`` is that of the kind's communication on this stream alone.
    """
    some = "data (or a part of it, for experts)" if plan.expert > 1 else "data"
    data = (TaskKind.DATA_COMMUNICATION, some, GROUPS[DATA], "")
    asked = [(kind, kind.value.split()[0], axes, "") for kind, axes in _AXES.items()]
    replicas = (TaskKind.DATA_COMMUNICATION, "replica", GROUPS[REPLICA], str(StreamKind.REPLICA))
    links = interconnect(cluster)
    return [
        {
            "kind": str(kind),
            "name": name,
            "stream": stream,
            "axes": [axis for axis in axes if plan.mesh.size(axis) > 1],
            "links": _links_of_positions(plan, axes, links),
        }
        for kind, name, axes, stream in (*asked, replicas, data)
        if any(plan.mesh.size(axis) > 1 for axis in axes)
    ]


def hops(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the stage boundaries: both stages, and the links from the first rank of the one to that of the other."""
    positions, links = plan.positions, interconnect(cluster)
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    return [
        {"from": one, "to": two, "links": _links(plan, [positions[one] * stride, positions[two] * stride], links)}
        for stage in range(len(positions) - 1)
        for one, two in ((stage, stage + 1), (stage + 1, stage))
        if positions[one] != positions[two]
    ]


def mesh_axes(mesh: Mesh) -> list[dict[str, Any]]:
    """Return the axes along which there is more than one rank."""
    return [{"name": a.name, "size": a.size, "stride": mesh.stride(a.name)} for a in mesh.axes if a.size > 1]


def _links_of_positions(plan: Plan, axes: Sequence[str], links: Interconnect) -> list[str]:
    """Return for the first group at every pipeline position the links of a ring through its ranks."""
    stride = plan.mesh.stride(PIPELINE) if plan.pipeline > 1 else 0
    (group, *_) = plan.mesh.rows(*(axis for axis in axes if plan.mesh.size(axis) > 1)).tolist()
    rings = [[rank + position * stride for rank in (*group, group[0])] for position in range(plan.pipeline)]
    return [_links(plan, ring, links) for ring in rings]


def _links(plan: Plan, ranks: Sequence[int], links: Interconnect) -> str:
    """Return the kinds of links from each of ``ranks`` to the next, the slowest first, with their bandwidth."""
    devices = np.array([plan.placement[rank] if plan.placement else rank for rank in ranks])
    used = np.unique(links.routes(devices[:-1], devices[1:]).link)
    slowest: dict[str, float] = {}
    for link in used[np.argsort(links.bandwidth[used], kind="stable")].tolist():
        slowest.setdefault(links.kind(link), float(links.bandwidth[link]))
    return ", ".join(f"{kind} at {format_bandwidth(rate)}" for kind, rate in slowest.items())
