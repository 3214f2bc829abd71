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
from strategies.mesh import DATA, EXPERT_DATA
from strategies.plan import Plan

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced when so many bytes of them are ready (DistributedDataParallel's default)."""


def overlaps(cluster: Cluster, plan: Plan) -> bool:
    """Return whether gradients are reduced while backward still makes others."""
    return plan.replicas > 1 and plan.overlap_gradients and not cluster.accelerator.computes_collectives


class Bucket(NamedTuple):
    """Gradients that groups of one ``kind`` reduce together: ready when the last of their ``blocks`` ends backward."""

    blocks: tuple[str, ...]
    parameters: int
    kind: str = DATA

    @property
    def last(self) -> str:
        """The block that ends backward last of all in the bucket."""
        return self.blocks[-1]


def buckets(
    names: Sequence[str], stage: StageCost, gradient_bytes: int, limit: float = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the buckets of a stage, whose blocks have ``names``, in the order in which backward fills them.

    Gradients of experts have buckets of their own: fewer ranks share them.
    """
    blocks = list(zip(reversed(names), reversed(stage.blocks), strict=True))
    result = _filled([(name, cost.parameters - cost.experts) for name, cost in blocks], DATA, gradient_bytes, limit)
    if stage.experts:
        result += _filled([(name, cost.experts) for name, cost in blocks], EXPERT_DATA, gradient_bytes, limit)
        turn = {name: index for index, (name, _) in enumerate(blocks)}
        result.sort(key=lambda bucket: turn[bucket.last])
    return tuple(result)


def _filled(blocks: Sequence[tuple[str, int]], kind: str, gradient_bytes: int, limit: float) -> list[Bucket]:
    result: list[Bucket] = []
    filled: tuple[str, ...] = ()
    elements = 0
    for name, parameters in blocks:
        filled, elements = (*filled, name), elements + parameters
        if elements * gradient_bytes >= limit or name == blocks[-1][0]:
            result.append(Bucket(filled, elements, kind))
            filled, elements = (), 0
    return result


def reduction(plan: Plan) -> Collective:
    """Return the collective that sums gradients over the data axis: with ZeRO each rank keeps its share."""
    return Collective.REDUCE_SCATTER if plan.zero else Collective.ALL_REDUCE
