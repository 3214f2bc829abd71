"""Data parallelism: gradients are summed over the data axis, in buckets as backward makes them.

References
----------
Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
VLDB 2020 (buckets); Narayanan et al., SC 2021, section 3.3 (one reduction a step); Li et al.,
"Scaling distributed machine learning with the parameter server", OSDI 2014 (central reduction).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.plan.mesh import DATA, EXPERT_DATA
from meshwise.strategies.plan.plan import SharedStates
from meshwise.strategies.plan.problem import Training

SHARING_KINDS = (DATA, EXPERT_DATA)
"""Kinds of the groups that share states: of parameters of no expert, and of experts."""

BUCKET_BYTES = 25 * 2**20
"""Bytes of ready gradients that are reduced together (DistributedDataParallel's default)."""


def overlaps_gradients(cluster: Cluster, plan: SharedStates) -> bool:
    """Return whether gradients are reduced while backward still makes others."""
    return asks_for_overlap(plan) and not cluster.accelerator.computes_collectives


def asks_for_overlap(plan: SharedStates) -> bool:
    """Return whether a plan has gradients to reduce, and asks to do so beneath backward."""
    return plan.replicas > 1 and plan.overlap_gradients


def reduces_in_buckets(cluster: Cluster, plan: SharedStates) -> bool:
    """Return whether gradients are reduced bucket by bucket: beneath backward, or for every microbatch."""
    return overlaps_gradients(cluster, plan) or (plan.shards > 1 and plan.zero >= 2)


class Bucket(NamedTuple):
    """Gradients that groups of one ``kind`` reduce together, ready when the last of their ``blocks`` ends backward."""

    blocks: tuple[str, ...]
    parameters: int
    kind: str = DATA

    @property
    def last_block(self) -> str:
        """The last block of the bucket to end backward."""
        return self.blocks[-1]


class BucketFilling(NamedTuple):
    """How gradients that groups of one ``kind`` reduce fill buckets, in the order of backward.

    ``elements`` are those of every block, ``blocks`` the number of blocks of every bucket.
    """

    kind: str
    elements: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def bucket_ends(self) -> tuple[int, ...]:
        """For every block, the number of blocks that have ended when its bucket leaves."""
        pairs = zip(accumulate(self.blocks), self.blocks, strict=True)
        return tuple(end for end, count in pairs for _ in range(count))


def fill_buckets(
    parameters: Sequence[int], experts: Sequence[int], gradient_bytes: int, limit: float = BUCKET_BYTES
) -> tuple[BucketFilling, ...]:
    """Return how gradients fill buckets, given the elements of every block in the order of backward.

    Gradients of ``experts``, which are part of ``parameters``, have buckets of their own: fewer ranks share them.

    >>> [filling.blocks for filling in fill_buckets([3, 3, 9, 1], [0, 0, 5, 0], 4, 20)]
    [(2, 2), (3, 1)]
    """
    dense_counts = tuple(total - expert_count for total, expert_count in zip(parameters, experts, strict=True))
    kinds = [(DATA, dense_counts)] + ([(EXPERT_DATA, tuple(experts))] if any(experts) else [])
    return tuple(BucketFilling(kind, counts, _count_blocks(counts, gradient_bytes, limit)) for kind, counts in kinds)


def with_whole_units(
    filling_list: Sequence[BucketFilling], elements: Sequence[int], expert_elements: Sequence[int]
) -> tuple[BucketFilling, ...]:
    """Return fillings with the elements of every block whose gradients are whole at once: of no expert, of experts."""
    parts = {DATA: tuple(elements), EXPERT_DATA: tuple(expert_elements)}
    return tuple(filling._replace(elements=parts[filling.kind]) for filling in filling_list)


def _count_blocks(elements: Sequence[int], gradient_bytes: int, limit: float) -> tuple[int, ...]:
    """Return the number of blocks of each bucket."""
    result: list[int] = []
    blocks = num_filled = 0
    for index, count in enumerate(elements):
        blocks, num_filled = blocks + 1, num_filled + count
        if num_filled * gradient_bytes >= limit or index == len(elements) - 1:
            result.append(blocks)
            blocks = num_filled = 0
    return tuple(result)


def build_buckets(
    names: Sequence[str],
    gradients: Sequence[int],
    expert_gradients: Sequence[int],
    gradient_bytes: int,
    limit: float = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Return the buckets of a stage, in the order in which backward fills them.

    ``names`` are those of its blocks, ``gradients`` the elements whose gradients are whole when each block's backward
    ends, and ``expert_gradients`` those among them of experts.
    """
    order, elements, experts = names[::-1], gradients[::-1], expert_gradients[::-1]
    numbered_buckets: list[tuple[int, Bucket]] = []
    for filling in fill_buckets(elements, experts, gradient_bytes, limit):
        for start, end in pairwise(accumulate(filling.blocks, initial=0)):
            numbered_buckets.append(
                (end, Bucket(tuple(order[start:end]), sum(filling.elements[start:end]), filling.kind))
            )
    # Buckets of both kinds leave in the order in which their last blocks end.
    return tuple(bucket for _, bucket in sorted(numbered_buckets, key=lambda entry: entry[0]))


def bucket_limit(plan: SharedStates) -> int:
    """Return the bytes that fill a bucket.

    With ZeRO 3, and where parameters come from the host, every block is one bucket: the unit that is gathered.
    """
    return 0 if plan.zero >= 3 or plan.offloads_parameters else BUCKET_BYTES


def choose_reduction(plan: SharedStates) -> Collective:
    """Return the collective that sums gradients over the data axis: with ZeRO each rank keeps its share."""
    if plan.gradient_reduction == "parameter_server":
        return Collective.PUSH_PULL
    return Collective.REDUCE_SCATTER if plan.zero else Collective.ALL_REDUCE


def reduction_bytes(training: Training, plan: SharedStates) -> float:
    """Return the bytes of one parameter in the `choose_reduction` collective: those of its gradient.

    A server receives gradients and returns parameters, so that its bytes are the mean of both.
    """
    gradient = training.gradient_bytes
    return (gradient + training.updated_bytes) / 2 if choose_reduction(plan) is Collective.PUSH_PULL else gradient


def replica_sum(training: Training, plan: SharedStates, kind: str, elements: int) -> tuple[Collective, float]:
    """Return the collective that sums a rank's share of ``elements`` gradients over replicas, and its bytes.

    The share is that of a group of a kind.
    """
    shards = plan.expert_shards if kind == EXPERT_DATA else plan.shards
    return Collective.ALL_REDUCE, float(ceil(elements / shards) * training.gradient_bytes)
