"""Schedules with unsplit backwards whose pipeline is flushed, emptied, at the end of every step.

Naive model parallelism runs one microbatch at a time through all stages, forward and backward; GPipe all microbatches
forward, then all backward; 1F1B one forward and one backward by turns. Interleaved 1F1B has several chunks a rank and
goes depth first; the breadth-first pipeline runs all microbatches through one chunk, then through the next. In
formulas ``p`` is the number of pipeline ranks, ``m`` of microbatches and ``v`` of chunks.

References
----------
.. [1] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.2
   (PipeDream-Flush); the order is that of Narayanan et al., "PipeDream", SOSP 2019.
.. [2] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.1 (bubble and activations in flight).
.. [3] torch.distributed.pipelining, ``Schedule1F1B`` (torch 2.13) refuses fewer microbatches than stages;
   Megatron-LM runs them, with ``min(p - rank - 1, m)`` forwards to warm up.
.. [4] Huang et al., "GPipe", NeurIPS 2019, figure 2b: only one accelerator is active at a time.
.. [5] Huang et al., "GPipe", NeurIPS 2019, section 2.3 (bubble, figure 2c).
.. [6] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.2.
.. [7] Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023, section 3 (bubble of looped placements) and 4.
.. [8] torch.distributed.pipelining, ``ScheduleLoopedBFS`` (torch 2.13): the last microbatch goes backward first.
"""

import numpy as np

from meshwise.strategies.schedules.rule import (
    AS_MANY_AS_RANKS,
    BACKWARD,
    FORWARD,
    WHOLE_ROUNDS,
    Order,
    PassSeconds,
    ScheduleRule,
    build_columns,
    build_rounds,
    merge_columns,
)


def one_f_one_b_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of flushed 1F1B [1]_: ``p - rank`` forwards, then backwards and forwards by turns."""
    warmup = min(num_ranks - rank, num_microbatches)
    turns = np.tile([BACKWARD, FORWARD], num_microbatches - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    columns = build_columns(rank, num_microbatches)
    return merge_columns(kinds, {FORWARD: columns, BACKWARD: columns})


def one_f_one_b_bubble(num_ranks: int, num_microbatches: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)``, as in GPipe, for any ``m`` [2]_ [3]_."""
    return (num_ranks - 1) * times.total


def one_f_one_b_in_flight(rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: ``min(p - rank, m)``, at most ``p`` [2]_."""
    return min(num_ranks - rank, num_microbatches)


ONE_F_ONE_B = ScheduleRule(
    "1f1b",
    one_f_one_b_order,
    'Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021 (PipeDream-Flush)',
    condition=AS_MANY_AS_RANKS,
)


def naive_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of naive model parallelism [4]_: every microbatch forward and backward by itself."""
    columns = build_columns(rank, num_microbatches)
    return merge_columns(np.tile([FORWARD, BACKWARD], num_microbatches), {FORWARD: columns, BACKWARD: columns})


def naive_bubble(num_ranks: int, num_microbatches: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step: ``m (p - 1) (F + B)``, as only one rank works at a time [4]_."""
    return num_microbatches * (num_ranks - 1) * times.total


def naive_in_flight(rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: 1."""
    return 1


NAIVE = ScheduleRule("naive", naive_order, 'Huang et al., "GPipe", NeurIPS 2019, figure 2b')


def gpipe_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of GPipe [5]_: all forwards, then all backwards."""
    columns = build_columns(rank, num_microbatches)
    return merge_columns(np.repeat([FORWARD, BACKWARD], num_microbatches), {FORWARD: columns, BACKWARD: columns})


def gpipe_bubble(num_ranks: int, num_microbatches: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)``, a fraction ``(p - 1) / (m + p - 1)`` [5]_."""
    return (num_ranks - 1) * times.total


def gpipe_in_flight(rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: all [5]_."""
    return num_microbatches


GPIPE = ScheduleRule("gpipe", gpipe_order, 'Huang et al., "GPipe", NeurIPS 2019')


def interleaved_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of interleaved 1F1B [6]_: rounds of ``p`` microbatches through each chunk."""
    total = num_microbatches * num_chunks
    warmup = _count_warmup(rank, num_ranks, num_microbatches, num_chunks)
    turns = np.tile([FORWARD, BACKWARD], total - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    forward, backward = build_rounds(rank, num_ranks, num_chunks, num_ranks, num_microbatches)
    return merge_columns(kinds, {FORWARD: forward, BACKWARD: backward})


def _count_warmup(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the forwards of a rank before its first backward [6]_."""
    return min((num_chunks - 1) * num_ranks + 2 * (num_ranks - rank - 1), num_microbatches * num_chunks)


def interleaved_bubble(num_ranks: int, num_microbatches: int, num_chunks: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)`` of one stage [6]_.

    A stage has ``1 / v`` of a rank's layers, so this is ``1 / v`` of the bubble of 1F1B.
    """
    return (num_ranks - 1) * times.total


def interleaved_in_flight(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: its warm-up and one [6]_."""
    return min(_count_warmup(rank, num_ranks, num_microbatches, num_chunks) + 1, num_microbatches * num_chunks)


INTERLEAVED = ScheduleRule(
    "interleaved",
    interleaved_order,
    'Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.2',
    chunks=(1, None),
    condition=WHOLE_ROUNDS,
)


def looped_bfs_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of breadth-first pipelining [7]_: all forwards chunk by chunk, then back [8]_."""
    (stages, numbers), _ = build_rounds(rank, num_ranks, num_chunks, num_microbatches, num_microbatches)
    kinds = np.repeat([FORWARD, BACKWARD], num_microbatches * num_chunks)
    return merge_columns(kinds, {FORWARD: (stages, numbers), BACKWARD: (stages[::-1], numbers[::-1])})


def looped_bfs_bubble(num_ranks: int, num_microbatches: int, num_chunks: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F + B)`` of one stage, for ``m >= p`` [7]_.

    That is the fraction ``(p - 1) / (m v)`` of the work, with ``v`` chunks a rank.
    """
    return (num_ranks - 1) * times.total


def looped_bfs_in_flight(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: all [7]_."""
    return num_microbatches * num_chunks


LOOPED_BFS = ScheduleRule(
    "looped_bfs",
    looped_bfs_order,
    'Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023',
    chunks=(1, None),
)
