"""PipeDream and PipeDream-2BW: 1F1B without flush, on older versions of the weights.

The pipeline never empties: the first forwards of a step run among the last backwards of the step before it. The
orders here are those of a pipeline that starts empty and stops after the last microbatch. The orders of ``n`` steps are
those of ``n m`` microbatches; step ``k`` has microbatches ``k m`` to ``(k + 1) m - 1``. So a step in the steady state
takes the time that ``m`` more microbatches add.

References
----------
.. [1] Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 (1F1B) and 3.3 (weight stashing).
.. [2] Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1 (2BW).
"""

from meshwise.strategies.schedules.flushed import one_f_one_b_order
from meshwise.strategies.schedules.rule import AS_MANY_AS_RANKS, Order, PassSeconds, ScheduleRule


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


def pipedream_bubble(num_ranks: int, num_microbatches: int, times: PassSeconds) -> float:
    """Return the idle seconds of a rank in a step of the steady state: 0 ([1]_, section 3.2)."""
    return 0.0


def pipedream_in_flight(rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Return the most microbatches whose activations a rank holds: ``p - rank`` in the steady state [1]_.

    There are fewer where the pipeline stops after fewer microbatches.
    """
    return min(num_ranks - rank, num_microbatches)


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
