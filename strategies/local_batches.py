"""Local batches: the sequences of a microbatch on every data rank, where they are not all equal.

Devices of several types finish together where each has work for its speed. All data ranks run as many
microbatches, and those of faster ranks have more sequences. The gradients of all sequences are summed and
divided by the global batch, so that what is reduced, and its bytes, are those of equal microbatches.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (intra-TaskGraph load
balance: the batch of a replica in proportion to the FLOP/s of its device, as long as the memory holds it).
Zhang et al. 2024, "Poplar: efficient scaling of distributed DNN training on heterogeneous GPU clusters" (the same
with every stage of ZeRO, by measured speeds).
"""

from collections.abc import Sequence

from simulator.program import IntArray
from strategies.mesh import DATA, EXPERT, REPLICA, Mesh

Microbatch = int | tuple[int, ...]
"""Sequences of a microbatch: the same on all data ranks, or of each of them."""


def microbatch(sizes: int | Sequence[int]) -> Microbatch:
    """Return the sizes of all data ranks, as one number where they are equal.

    >>> microbatch([2, 2]), microbatch([3, 1])
    (2, (3, 1))
    """
    if isinstance(sizes, int):
        return sizes
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def data_ranks(mesh: Mesh) -> IntArray:
    """Return the data rank of every rank: those of a replica are neighbours, and so are those that share experts.

    >>> from strategies.mesh import Axis
    >>> data_ranks(Mesh((Axis("data", 2), Axis("expert", 2), Axis("tensor", 2)))).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    outer = mesh.coordinates(REPLICA) * mesh.size(DATA) + mesh.coordinates(DATA)
    return outer * mesh.size(EXPERT) + mesh.coordinates(EXPERT)
