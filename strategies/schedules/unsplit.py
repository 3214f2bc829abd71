"""Schedules with unsplit backwards: those that are flushed, emptied, at the end of every step, and PipeDream.

Naive model parallelism runs one microbatch at a time through all stages, forward and backward; GPipe all microbatches
forward, then all backward; 1F1B one forward and one backward by turns. Interleaved 1F1B has several chunks a rank and
goes depth first; the breadth-first pipeline runs all microbatches through one chunk, then through the next. In
formulas ``p`` is the number of pipeline ranks.

PipeDream and PipeDream-2BW are 1F1B without flush, on older versions of the weights. The pipeline never empties: the
first forwards of a step run among the last backwards of the step before it. The orders here are those of a pipeline
that starts empty and stops after the last microbatch. The orders of ``n`` steps are those of ``n m`` microbatches; step
``k`` has microbatches ``k m`` to ``(k + 1) m - 1``. So a step in the steady state takes the time that ``m`` more
microbatches add.

References
----------
.. [1] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.2
   (PipeDream-Flush); the order is that of Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 (1F1B) and 3.3 (weight
   stashing).
.. [2] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1 (2BW).
.. [3] torch.distributed.pipelining, ``Schedule1F1B`` (torch 2.13) refuses fewer microbatches than stages;
   Megatron-LM runs them, with ``min(p - rank - 1, m)`` forwards to warm up.
.. [4] Huang et al., "GPipe", NeurIPS 2019, figure 2b: only one accelerator is active at a time.
.. [5] Huang et al., "GPipe", NeurIPS 2019, section 2.3 (figure 2c).
.. [6] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.2.
.. [7] Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023, section 4.
.. [8] torch.distributed.pipelining, ``ScheduleLoopedBFS`` (torch 2.13): the last microbatch goes backward first.
.. [9] torch.distributed.pipelining, ``ScheduleInterleaved1F1B`` (torch 2.13), ``microbatches_per_round``; Megatron-LM
   is told with ``--microbatch-group-size-per-virtual-pipeline-stage``.
"""

import numpy as np

from meshwise.strategies.schedules.rule import (
    AS_MANY_AS_RANKS,
    BACKWARD,
    FORWARD,
    WHOLE_ROUNDS,
    Order,
    ScheduleRule,
    build_columns,
    build_rounds,
    find_round_size,
    merge_columns,
)


def naive_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of naive model parallelism [4]_: every microbatch forward and backward by itself."""
    return _order_one_stage(rank, num_microbatches, np.tile([FORWARD, BACKWARD], num_microbatches))


def gpipe_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of GPipe [5]_: all forwards, then all backwards."""
    return _order_one_stage(rank, num_microbatches, np.repeat([FORWARD, BACKWARD], num_microbatches))


def one_f_one_b_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of flushed 1F1B [1]_: ``p - rank`` forwards, then backwards and forwards by turns.

    There may be fewer microbatches than ranks [3]_.
    """
    warmup = min(num_ranks - rank, num_microbatches)
    turns = np.tile([BACKWARD, FORWARD], num_microbatches - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    return _order_one_stage(rank, num_microbatches, kinds)


def _order_one_stage(rank: int, num_microbatches: int, kinds: Order) -> Order:
    """Return the order of a rank with one stage, whose actions are of these kinds."""
    columns = build_columns(rank, num_microbatches)
    return merge_columns(kinds, {FORWARD: columns, BACKWARD: columns})


def interleaved_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of interleaved 1F1B [6]_: rounds of microbatches through each chunk.

    A round has ``p`` microbatches, and more where ``p`` does not divide their number [9]_.
    """
    total = num_microbatches * num_chunks
    round_size = find_round_size(num_ranks, num_microbatches)
    warmup = min((num_chunks - 1) * round_size + 2 * (num_ranks - rank - 1), total)
    turns = np.tile([FORWARD, BACKWARD], total - warmup)
    kinds = np.concatenate([np.repeat(FORWARD, warmup), turns, np.repeat(BACKWARD, warmup)])
    forward, backward = build_rounds(rank, num_ranks, num_chunks, round_size, num_microbatches)
    return merge_columns(kinds, {FORWARD: forward, BACKWARD: backward})


def looped_bfs_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of breadth-first pipelining [7]_: all forwards chunk by chunk, then back [8]_."""
    (stages, numbers), _ = build_rounds(rank, num_ranks, num_chunks, num_microbatches, num_microbatches)
    kinds = np.repeat([FORWARD, BACKWARD], num_microbatches * num_chunks)
    return merge_columns(kinds, {FORWARD: (stages, numbers), BACKWARD: (stages[::-1], numbers[::-1])})


def pipedream_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of PipeDream [1]_: as many forwards as ranks remain, then by turns without flush.

    Weights are updated after every backward.
    """
    return one_f_one_b_order(rank, num_ranks, num_microbatches, num_chunks)


def pipedream_2bw_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of PipeDream-2BW [2]_: those of PipeDream, weights updated once a step."""
    return one_f_one_b_order(rank, num_ranks, num_microbatches, num_chunks)


def keep_stashed_versions(rank: int, num_ranks: int) -> int:
    """Return how many versions of its weights a rank of PipeDream keeps: ``p - rank`` [1]_.

    It keeps one for every microbatch in flight, so that a backward sees the weights of its forward.
    """
    return num_ranks - rank


def keep_two_versions(rank: int, num_ranks: int) -> int:
    """Return how many versions of its weights a rank of PipeDream-2BW keeps: 2 [2]_."""
    return 2


NAIVE = ScheduleRule("naive", naive_order, 'Huang et al., "GPipe", NeurIPS 2019, figure 2b')
GPIPE = ScheduleRule("gpipe", gpipe_order, 'Huang et al., "GPipe", NeurIPS 2019')
ONE_F_ONE_B = ScheduleRule(
    "1f1b",
    one_f_one_b_order,
    'Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021 (PipeDream-Flush)',
    condition=AS_MANY_AS_RANKS,
)
INTERLEAVED = ScheduleRule(
    "interleaved",
    interleaved_order,
    'Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021, section 2.2.2',
    chunks=(1, None),
    condition=WHOLE_ROUNDS,
)
LOOPED_BFS = ScheduleRule(
    "looped_bfs",
    looped_bfs_order,
    'Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023',
    chunks=(1, None),
)
PIPEDREAM = ScheduleRule(
    "pipedream",
    pipedream_order,
    'Narayanan et al., "PipeDream", SOSP 2019',
    is_asynchronous=True,
    weight_versions=keep_stashed_versions,
    updates_every_microbatch=True,
)
PIPEDREAM_2BW = ScheduleRule(
    "pipedream_2bw",
    pipedream_2bw_order,
    'Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1',
    condition=AS_MANY_AS_RANKS,
    is_asynchronous=True,
    weight_versions=keep_two_versions,
)
