"""Naive model parallelism: one microbatch at a time through all stages, forward and backward.

References
----------
.. [1] Huang et al., "GPipe", NeurIPS 2019, figure 2b: only one accelerator is active at a time.
"""

import numpy as np

from strategies.schedules.order import BACKWARD, FORWARD, Order, PassTimes, in_turn, merged
from strategies.schedules.rule import ScheduleRule


def naive_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of naive model parallelism [1]_: every microbatch forward and backward by itself."""
    columns = in_turn(rank, microbatches)
    return merged(np.tile([FORWARD, BACKWARD], microbatches), {FORWARD: columns, BACKWARD: columns})


def naive_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds of a rank in a step: ``m (p - 1) (F + B)``, as only one rank works at a time [1]_."""
    return microbatches * (ranks - 1) * times.total


def naive_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: 1."""
    return 1


NAIVE = ScheduleRule("naive", naive_order, 'Huang et al., "GPipe", NeurIPS 2019, figure 2b')
