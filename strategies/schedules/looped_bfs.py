"""Breadth-first pipeline: all microbatches through one chunk, then through the next.

References
----------
.. [1] Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023, section 3 (bubble of looped placements) and 4.
.. [2] torch.distributed.pipelining, ``ScheduleLoopedBFS`` (torch 2.13): the last microbatch goes backward first.
"""

import numpy as np

from strategies.schedules.order import BACKWARD, FORWARD, Order, PassTimes, merged, rounds
from strategies.schedules.rule import ScheduleRule


def looped_bfs_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of breadth-first pipelining [1]_: all forwards chunk by chunk, then back [2]_."""
    (stages, numbers), _ = rounds(rank, ranks, chunks, microbatches, microbatches)
    kinds = np.repeat([FORWARD, BACKWARD], microbatches * chunks)
    return merged(kinds, {FORWARD: (stages, numbers), BACKWARD: (stages[::-1], numbers[::-1])})


def looped_bfs_bubble(ranks: int, microbatches: int, chunks: int, times: PassTimes) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)`` of one stage, for ``m >= p`` [1]_.

    Of the work that is ``(p - 1) / (m v)``, with ``v`` chunks a rank.
    """
    return (ranks - 1) * times.total


def looped_bfs_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: all [1]_."""
    return microbatches * chunks


LOOPED_BFS = ScheduleRule(
    "looped_bfs",
    looped_bfs_order,
    'Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023',
    chunks=(1, None),
)
