"""GPipe: all microbatches forward, then all backward.

References
----------
.. [1] Huang et al., "GPipe", NeurIPS 2019, section 2.3 (bubble, figure 2c).
"""

import numpy as np

from strategies.schedules.order import BACKWARD, FORWARD, Order, PassTimes, in_turn, merged
from strategies.schedules.rule import ScheduleRule


def gpipe_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of GPipe [1]_: all forwards, then all backwards."""
    columns = in_turn(rank, microbatches)
    return merged(np.repeat([FORWARD, BACKWARD], microbatches), {FORWARD: columns, BACKWARD: columns})


def gpipe_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)``, the part ``(p - 1) / (m + p - 1)`` [1]_."""
    return (ranks - 1) * times.total


def gpipe_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: all [1]_."""
    return microbatches


GPIPE = ScheduleRule("gpipe", gpipe_order, 'Huang et al., "GPipe", NeurIPS 2019')
