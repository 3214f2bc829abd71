"""Data parallel: gradients are summed over the data axis, in buckets as backward makes them.

References
----------
Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
VLDB 2020 (buckets); Narayanan et al., SC 2021, section 3.3 (one reduction a step).
"""

from collections.abc import Sequence
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.collective_kinds import Collective
from strategies.lowering.stage import StageCost
from strategies.plan import Plan

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced when so many bytes of them are ready (DistributedDataParallel's default)."""


def overlaps(cluster: Cluster, plan: Plan) -> bool:
    """Return whether gradients are reduced while backward still makes others."""
    return plan.data > 1 and plan.overlap_gradients and not cluster.accelerator.computes_collectives


class Bucket(NamedTuple):
    """Gradients that are reduced together: ready when the first of its ``blocks`` ends backward."""

    blocks: tuple[str, ...]
    parameters: int

    @property
    def last(self) -> str:
        """The block that ends backward last of all in the bucket."""
        return self.blocks[-1]


def buckets(
    names: Sequence[str], stage: StageCost, gradient_bytes: int, limit: float = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the buckets of a stage, whose blocks have ``names``, in the order in which backward fills them."""
    result: list[Bucket] = []
    filled: tuple[str, ...] = ()
    elements = 0
    for name, cost in zip(reversed(names), reversed(stage.blocks), strict=True):
        filled, elements = (*filled, name), elements + cost.parameters
        if elements * gradient_bytes >= limit or name == names[0]:
            result.append(Bucket(filled, elements))
            filled, elements = (), 0
    return tuple(result)


def reduction(plan: Plan) -> Collective:
    """Return the collective that sums gradients over the data axis: with ZeRO each rank keeps its share."""
    return Collective.REDUCE_SCATTER if plan.zero else Collective.ALL_REDUCE
