"""Interleaved 1F1B: several chunks a rank, depth first.

References
----------
.. [1] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.2.
"""

import numpy as np

from strategies.schedules.order import BACKWARD, FORWARD, Order, PassTimes, merged, rounds
from strategies.schedules.rule import WHOLE_ROUNDS, ScheduleRule


def interleaved_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of interleaved 1F1B [1]_: rounds of ``ranks`` microbatches through each chunk."""
    total = microbatches * chunks
    warmup = _warmup(rank, ranks, microbatches, chunks)
    turns = np.tile([FORWARD, BACKWARD], total - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    forward, backward = rounds(rank, ranks, chunks, ranks, microbatches)
    return merged(kinds, {FORWARD: forward, BACKWARD: backward})


def _warmup(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    return min((chunks - 1) * ranks + 2 * (ranks - rank - 1), microbatches * chunks)


def interleaved_bubble(ranks: int, microbatches: int, chunks: int, times: PassTimes) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)`` of one stage [1]_.

    A stage has the ``v``-th part of a rank's layers, so that this is ``1 / v`` of the bubble of 1F1B.
    """
    return (ranks - 1) * times.total


def interleaved_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: its warm-up and one [1]_."""
    return min(_warmup(rank, ranks, microbatches, chunks) + 1, microbatches * chunks)


INTERLEAVED = ScheduleRule(
    "interleaved",
    interleaved_order,
    'Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.2',
    chunks=(1, None),
    condition=WHOLE_ROUNDS,
)
