"""One forward, one backward (1F1B) with a flush after every step.

References
----------
.. [1] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.2
   (PipeDream-Flush); the order is that of Narayanan et al., "PipeDream", SOSP 2019.
.. [2] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.1 (bubble and activations in flight).
.. [3] torch.distributed.pipelining, ``Schedule1F1B`` (torch 2.13) refuses fewer microbatches than stages;
   Megatron-LM runs them, with ``min(p - rank - 1, m)`` forwards to warm up.
"""

import numpy as np

from strategies.schedules.order import BACKWARD, FORWARD, Order, PassTimes, in_turn, merged
from strategies.schedules.rule import AS_MANY_AS_RANKS, ScheduleRule


def one_f_one_b_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of flushed 1F1B [1]_: ``ranks - rank`` forwards, then by turns."""
    warmup = min(ranks - rank, microbatches)
    turns = np.tile([BACKWARD, FORWARD], microbatches - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    columns = in_turn(rank, microbatches)
    return merged(kinds, {FORWARD: columns, BACKWARD: columns})


def one_f_one_b_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)``, as of GPipe, for any ``m`` [2]_ [3]_."""
    return (ranks - 1) * times.total


def one_f_one_b_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: ``min(p - rank, m)``, at most ``p`` [2]_."""
    return min(ranks - rank, microbatches)


ONE_F_ONE_B = ScheduleRule(
    "1f1b",
    one_f_one_b_order,
    'Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021 (PipeDream-Flush)',
    condition=AS_MANY_AS_RANKS,
)
