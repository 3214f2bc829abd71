"""Zero-bubble schedules with one stage a rank: gradients of weights fill what would be idle.

References
----------
.. [1] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2 (ZB-H1 and ZB-H2, figure 3) and table 2.
"""

import numpy as np

from strategies.schedules.order import FORWARD, INPUT, WEIGHT, Order, PassTimes, in_turn, merged
from strategies.schedules.rule import ScheduleRule


def zb1p_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of ZB-H1 [1]_: 1F1B whose gradients of weights come ``rank`` microbatches later."""
    return _one_stage(rank, microbatches, ranks - rank, rank)


def zb2p_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of ZB-H2 [1]_: so many forwards first that no rank waits for its first gradient."""
    return _one_stage(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank)


def _one_stage(rank: int, microbatches: int, warmup: int, delay: int) -> Order:
    columns = in_turn(rank, microbatches)
    kinds = split_kinds(microbatches, warmup, delay)
    return merged(kinds, {FORWARD: columns, INPUT: columns, WEIGHT: columns})


def split_kinds(total: int, warmup: int, delay: int) -> Order:
    """Return the kinds of ``total`` forwards and split backwards in their order.

    After ``warmup`` forwards come, by turns, gradients of inputs, gradients of the weights that are ``delay`` turns
    older, and a forward.

    >>> "".join("FBIW"[kind] for kind in split_kinds(4, 2, 1))
    'FFIFIWFIWIWW'
    """
    kinds = [FORWARD] * min(warmup, total)
    for turn in range(total):
        kinds.append(INPUT)
        if turn >= delay:
            kinds.append(WEIGHT)
        if warmup + turn < total:
            kinds.append(FORWARD)
    return np.array(kinds + [WEIGHT] * min(delay, total))


def zb1p_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds of the rank that is busy longest: ``(p - 1) (F + B - W)`` [1]_.

    ``B`` are here the gradients of inputs. Holds for ``m >= p`` and ``W`` no longer than ``F`` and ``B``.
    """
    return (ranks - 1) * (times.forward + times.input - times.weight)


def zb2p_bubble(ranks: int, microbatches: int, times: PassTimes) -> float:
    """Return the idle seconds between a rank's first and last action: ``(p - 1) (F + B - 2 W)`` [1]_.

    ``B`` are here the gradients of inputs. Holds for ``m >= 2 p - 1`` and ``W`` no longer than ``F`` and ``B``;
    ranks end one after another, so that the next step must not wait for all of them ([1]_, section 4).
    """
    return (ranks - 1) * (times.forward + times.input - 2 * times.weight)


def zb1p_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most microbatches of which a rank holds activations: ``min(p, m)`` [1]_.

    That is ``p - rank`` waiting for their gradients and ``rank`` for those of the weights.
    """
    return min(ranks, microbatches)


def zb2p_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most microbatches of which a rank holds activations: ``min(2 p - 1, m)`` [1]_."""
    return min(2 * ranks - 1, microbatches)


ZB1P = ScheduleRule(
    "zb1p",
    zb1p_order,
    'Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 (ZB-H1)',
    splits_backward=True,
)
ZB2P = ScheduleRule(
    "zb2p",
    zb2p_order,
    'Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.2 (ZB-H2)',
    splits_backward=True,
)
