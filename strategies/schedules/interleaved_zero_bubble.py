"""Interleaved 1F1B whose gradients of weights come later, as ZB-H1 does with one stage a rank.

References
----------
.. [1] torch.distributed.pipelining, ``ScheduleInterleavedZeroBubble`` (torch 2.13).
.. [2] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 and table 2 (ZB-H1).
"""

from strategies.schedules.order import FORWARD, INPUT, WEIGHT, Order, PassTimes, merged, rounds
from strategies.schedules.rule import Condition, ScheduleRule
from strategies.schedules.zero_bubble import split_kinds


def interleaved_zero_bubble_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of torch's interleaved zero bubble [1]_: weights' gradients ``rank`` turns later."""
    size = microbatches // _num_rounds(ranks, microbatches)
    warmup = (chunks - 1) * size + ranks - rank
    forward, backward = rounds(rank, ranks, chunks, size, microbatches)
    kinds = split_kinds(microbatches * chunks, warmup, rank)
    return merged(kinds, {FORWARD: forward, INPUT: backward, WEIGHT: backward})


def _num_rounds(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)


def interleaved_zb_bubble(ranks: int, microbatches: int, chunks: int, times: PassTimes) -> float:
    """Return the idle seconds of the rank that is busy longest: ``(p - 1) (F + B - W)`` of one stage [2]_.

    ``B`` are here the gradients of inputs. Holds for ``m >= p`` and equal times.
    """
    return (ranks - 1) * (times.forward + times.input - times.weight)


def interleaved_zb_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: its warm-up and ``rank``.

    With rounds of ``p`` microbatches that is ``p`` a chunk.
    """
    size = microbatches // _num_rounds(ranks, microbatches)
    return min((chunks - 1) * size + ranks, microbatches * chunks)


INTERLEAVED_ZERO_BUBBLE = ScheduleRule(
    "interleaved_zero_bubble",
    interleaved_zero_bubble_order,
    "torch.distributed.pipelining, ScheduleInterleavedZeroBubble, after Qi et al., ICLR 2024",
    chunks=(1, None),
    condition=Condition(
        lambda ranks, m: m % _num_rounds(ranks, m) == 0,
        lambda ranks, m: f"microbatches({m}) % ({m} // pipeline({ranks})) = 0",
    ),
    splits_backward=True,
)
