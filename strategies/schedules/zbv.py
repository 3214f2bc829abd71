"""ZB-V: two stages a rank, down and up again, without bubble and with the activations of 1F1B.

References
----------
.. [1] Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241, section 6 (ZB-V).
.. [2] torch.distributed.pipelining, ``ScheduleZBVZeroBubble`` (torch 2.13).
.. [3] Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, table 1 (V-ZB).
"""

from collections import Counter

import numpy as np

from strategies.schedules.order import FORWARD, INPUT, WEIGHT, Order, PassTimes
from strategies.schedules.rule import Placement, ScheduleRule


def zbv_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of ZB-V [1]_: a forward, its gradients and those of the weights by turns.

    The order is that of at least ``2 ranks - 1`` microbatches, without those that do not exist [2]_.
    """
    total, first, second = max(2 * ranks - 1, microbatches), rank, 2 * ranks - 1 - rank
    rows: list[tuple[int, int, int]] = []
    done: Counter[tuple[int, int]] = Counter()

    def run(stage: int, *kinds: int) -> None:
        for kind in kinds:
            rows.append((stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(first, FORWARD)
    for _ in range(rank):
        run(second, FORWARD)
        run(first, FORWARD)
    for _ in range(ranks - rank):
        run(second, FORWARD, INPUT, WEIGHT)
    for _ in range(total - ranks):
        if done[first, FORWARD] < total:
            run(first, FORWARD)
        run(first, INPUT, WEIGHT)
        run(second, FORWARD, INPUT, WEIGHT)
    for _ in range(rank):
        run(first, INPUT)
        run(second, INPUT)
    for _ in range(ranks - rank):
        run(first, INPUT, WEIGHT)
    for stage in (second, first):
        run(stage, *[WEIGHT] * (total - done[stage, WEIGHT]))
    order = np.array(rows)
    return order[order[:, 2] < microbatches]


def zbv_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds between a rank's first and last action: 0 for ``m >= 2 p - 1`` [1]_.

    Raises
    ------
    ValueError
        Where the three times differ: no closed form is published for those.
    """
    if not times.forward == times.input == times.weight:
        raise ValueError(f"the bubble of zbv is known for forward = input = weight, met {tuple(times)}")
    return 0.0


def zbv_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: ``2 p`` for ``m >= 2 p - 1``.

    A chunk has half the layers of a rank, so that this is the ``p`` of 1F1B ([3]_).
    """
    return 2 * ranks


ZBV = ScheduleRule(
    "zbv",
    zbv_order,
    'Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241, section 6 (ZB-V)',
    placement=Placement.V,
    chunks=(2, 2),
    splits_backward=True,
)
