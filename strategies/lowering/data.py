"""Data parallel: gradients are summed over the data axis, in buckets as backward makes them.

References
----------
Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
VLDB 2020 (buckets); Narayanan et al., SC 2021, section 3.3 (one reduction a step).
"""

from typing import NamedTuple

from simulator.cluster import Cluster, Collective
from simulator.program import TaskKind
from strategies.lowering.operator import GroupShape, Step, collective_step
from strategies.lowering.stage import StageCost
from strategies.plan import Plan
from strategies.training import Training

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced when so many bytes of them are ready (DistributedDataParallel's default)."""


def overlaps(cluster: Cluster, plan: Plan) -> bool:
    """Return whether gradients are reduced while backward still makes others."""
    return plan.data > 1 and plan.overlap_gradients and not cluster.accelerator.computes_collectives


class Bucket(NamedTuple):
    """Gradients that are reduced together: ready when the first of its ``blocks`` ends backward."""

    blocks: tuple[str, ...]
    parameters: int


def buckets(stage: StageCost, gradient_bytes: int, limit: float = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return the buckets of a stage in the order in which backward fills them."""
    result: list[Bucket] = []
    names: tuple[str, ...] = ()
    elements = 0
    for name, cost in reversed(stage.blocks):
        names, elements = (*names, name), elements + cost.parameters
        if elements * gradient_bytes >= limit or name == stage.blocks[0][0]:
            result.append(Bucket(names, elements))
            names, elements = (), 0
    return tuple(result)


def gradient_step(
    cluster: Cluster, training: Training, plan: Plan, shape: GroupShape, parameters: int, what: str
) -> Step:
    """Return the reduction of gradients over the data axis: all-reduce, or reduce-scatter with ZeRO."""
    collective = Collective.REDUCE_SCATTER if plan.zero else Collective.ALL_REDUCE
    size = parameters * training.gradient_bytes
    return collective_step(cluster, TaskKind.DATA_COMMUNICATION, collective, shape, size, f"gradients of {what}")


def parameter_step(cluster: Cluster, training: Training, shape: GroupShape, parameters: int) -> Step:
    """Return ZeRO's all-gather of the updated parameters."""
    size = parameters * training.parameter_bytes
    kind = TaskKind.DATA_COMMUNICATION
    return collective_step(cluster, kind, Collective.ALL_GATHER, shape, size, "parameters")
