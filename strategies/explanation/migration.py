"""What changing from one plan to another costs: the states that devices must receive that they do not hold.

Of every block a rank holds the share of its tensor rank, a contiguous part of the parameters; with ZeRO 3 of this the
share of its data rank, and with ZeRO 1 of the optimizer's states (Rajbhandari et al. 2020, "ZeRO", section 5;
contiguous shares as in Megatron-LM's distributed optimizer). Experts count as if all ranks had them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.cluster import Cluster
from strategies.mesh import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR, TENSOR_ROWS
from strategies.plan import Plan
from strategies.problem import Problem

Part = tuple[float, float]
"""The fractions of a block's states between which something lies."""


class Holding(NamedTuple):
    """What a rank holds: of the blocks of its pipeline position, parts of parameters and of optimizer states."""

    position: int
    parameters: Part
    optimizer: Part


@dataclass(frozen=True, slots=True)
class Migration:
    """States on the move.

    Parameters
    ----------
    received
        Bytes that all devices together receive.
    most
        Bytes that the device receives which receives most.
    lost
        Bytes that no device holds any more, and that must come from a checkpoint; a part of ``received``.
    seconds
        In which the busiest node receives its bytes over its NICs; of one node, the busiest device over its link.
    """

    received: float
    most: float
    lost: float
    seconds: float


def holdings(plan: Plan) -> list[Holding]:
    """Return what every rank of a plan holds."""
    mesh = plan.mesh
    position = mesh.coordinates(PIPELINE).tolist()
    tensor = (mesh.coordinates(TENSOR_ROWS) * mesh.size(TENSOR) + mesh.coordinates(TENSOR)).tolist()
    share = (mesh.coordinates(DATA) * mesh.size(EXPERT) + mesh.coordinates(EXPERT)) * mesh.size(CONTEXT)
    shares = (share + mesh.coordinates(CONTEXT)).tolist()
    cuts = mesh.size(TENSOR_ROWS) * mesh.size(TENSOR)
    result = []
    for rank in range(mesh.num_ranks):
        whole = _part((0.0, 1.0), tensor[rank], cuts)
        own = _part(whole, shares[rank], plan.shards)
        result.append(Holding(position[rank], own if plan.zero >= 3 else whole, own if plan.zero else whole))
    return result


def migration(problem: Problem, before: Plan, after: Plan, kept: Sequence[int], cluster: Cluster) -> Migration:
    """Return what changing from plan ``before`` to ``after`` costs.

    Parameters
    ----------
    kept
        For every rank of ``after`` the rank of ``before`` whose device it runs on; -1 for a new device. Devices that
        are kept and run nothing any more come after those.
    cluster
        The machine of ``after``.
    """
    shared = _shared(problem, before, after)
    training = problem.training
    old, new = holdings(before), holdings(after)
    received = []
    for rank, holding in enumerate(new):
        had = old[kept[rank]] if kept[rank] >= 0 else None
        size = 0.0
        for each, elements in shared[holding.position].items():
            same = had is not None and had.position == each
            for own, width, has in (
                (holding.parameters, training.parameter_bytes, had.parameters if had else (0.0, 0.0)),
                (holding.optimizer, training.optimizer_bytes, had.optimizer if had else (0.0, 0.0)),
            ):
                size += elements * width * (own[1] - own[0] - (_overlap(own, has) if same else 0.0))
        received.append(size)
    lost = _lost(problem, before, old, kept)
    return Migration(sum(received), max(received, default=0.0), lost, _seconds(cluster, received))


def _part(whole: Part, index: int, count: int) -> Part:
    width = (whole[1] - whole[0]) / count
    return whole[0] + index * width, whole[0] + (index + 1) * width


def _overlap(one: Part, other: Part) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _shared(problem: Problem, before: Plan, after: Plan) -> list[dict[int, float]]:
    """Return for every pipeline position after the change the elements that it has in common with each before."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    was = {name: at for at, stage in zip(before.positions, before.stages, strict=True) for name in stage.blocks}
    found: list[Counter[int]] = [Counter() for _ in range(after.pipeline)]
    for at, stage in zip(after.positions, after.stages, strict=True):
        for name in stage.blocks:
            found[at][was[name]] += elements[name]
    return [{position: float(count) for position, count in each.items()} for each in found]


def _lost(problem: Problem, before: Plan, old: list[Holding], kept: Sequence[int]) -> float:
    """Return the bytes of states that no rank holds which is kept."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    held: Counter[int] = Counter()
    for at, stage in zip(before.positions, before.stages, strict=True):
        held[at] += sum(elements[name] for name in stage.blocks)
    left = [old[rank] for rank in kept if rank >= 0]
    result, training = 0.0, problem.training
    for position, count in held.items():
        here = [each for each in left if each.position == position]
        result += count * training.parameter_bytes * (1 - _covered([each.parameters for each in here]))
        result += count * training.optimizer_bytes * (1 - _covered([each.optimizer for each in here]))
    return result


def _covered(parts: list[Part]) -> float:
    """Return the length of a union of parts.

    >>> _covered([(0.5, 0.75), (0.0, 0.25), (0.125, 0.5)])
    0.75
    """
    reached = total = 0.0
    for first, end in sorted(set(parts)):
        total += max(0.0, end - max(first, reached))
        reached = max(reached, end)
    return 1.0 if abs(total - 1) < 1e-9 else total


def _seconds(cluster: Cluster, received: list[float]) -> float:
    if cluster.num_nodes == 1:
        return max(received, default=0.0) / cluster.first.network.link.bandwidth
    of_node = np.bincount(cluster.device_nodes[: len(received)], received, cluster.num_nodes)
    wide = [cluster.nodes[kind][0].nics * cluster.nodes[kind][0].nic.bandwidth for kind in cluster.node_kinds.tolist()]
    return float((of_node / np.array(wide)).max())
