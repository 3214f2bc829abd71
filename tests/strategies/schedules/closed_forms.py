"""What papers say of schedules: the idle seconds of a rank in a step, and the most activations that a rank holds.

Every bubble is a function of (ranks, microbatches, times), with chunks before the times where a rank has several
stages; every number of activations of (rank, ranks, microbatches), with chunks last. Activations are each of one
microbatch and chunk. ``p`` is the number of pipeline ranks, ``m`` of microbatches and ``v`` of chunks.

References
----------
.. [1] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
   SC 2021, section 2.2.1 (bubble and activations in flight) and 2.2.2 (interleaved).
.. [2] Huang et al., "GPipe", NeurIPS 2019, figure 2b (naive) and section 2.3 (bubble, figure 2c).
.. [3] Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023, section 3 (bubble of looped placements).
.. [4] Narayanan et al., "PipeDream", SOSP 2019, section 3.2.
.. [5] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 and table 2 (ZB-H1 and ZB-H2).
.. [6] Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241, section 6 (ZB-V).
.. [7] Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, table 1 (V-ZB).
.. [8] DeepSeek-AI, github.com/deepseek-ai/DualPipe, README, "Pipeline bubbles and memory usage" (DualPipeV).
"""

from typing import NamedTuple


class PassSeconds(NamedTuple):
    """Seconds of one microbatch in one stage: of forward, gradients of inputs and gradients of weights."""

    forward: float
    input: float
    weight: float

    @property
    def backward(self) -> float:
        """Seconds of a backward that is not split."""
        return self.input + self.weight

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def naive_bubble(ranks: int, microbatches: int, times: PassSeconds) -> float:
    """Return ``m (p - 1) (F + B)``, as only one rank works at a time [2]_."""
    return microbatches * (ranks - 1) * times.total


def naive_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    return 1


def flushed_bubble(ranks: int, microbatches: int, times: PassSeconds) -> float:
    """Return ``(p - 1) (F + B)``: of GPipe [2]_ a fraction ``(p - 1) / (m + p - 1)``, of 1F1B for any ``m`` [1]_."""
    return (ranks - 1) * times.total


def gpipe_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    return microbatches


def one_f_one_b_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return ``min(p - rank, m)``, at most ``p`` [1]_; of PipeDream ``p - rank`` in the steady state [4]_."""
    return min(ranks - rank, microbatches)


def looped_bubble(ranks: int, microbatches: int, chunks: int, times: PassSeconds) -> float:
    """Return ``(p - 1) (F + B)`` of one stage, which has ``1 / v`` of a rank's layers [1]_ [3]_.

    Breadth first it holds for ``m >= p``. It is ``1 / v`` of the bubble of 1F1B, or ``(p - 1) / (m v)`` of the work.
    """
    return (ranks - 1) * times.total


def interleaved_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return the forwards of a rank before its first backward [1]_, and one.

    A round has ``p`` microbatches where ``p`` divides their number, and up to ``2 p - 1`` elsewhere.
    """
    round_size = microbatches // max(1, microbatches // ranks)
    return min((chunks - 1) * round_size + 2 * (ranks - rank - 1) + 1, microbatches * chunks)


def looped_bfs_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return all [3]_."""
    return microbatches * chunks


def pipedream_bubble(ranks: int, microbatches: int, times: PassSeconds) -> float:
    """Return the idle seconds in a step of the steady state: 0 [4]_."""
    return 0.0


def zb1p_bubble(ranks: int, microbatches: int, times: PassSeconds) -> float:
    """Return ``(p - 1) (F + B - W)`` of the rank that is busy longest [5]_.

    Here ``B`` are the gradients of inputs. It holds for ``m >= p`` and ``W`` no longer than ``F`` and ``B``.
    """
    return (ranks - 1) * (times.forward + times.input - times.weight)


def zb2p_bubble(ranks: int, microbatches: int, times: PassSeconds) -> float:
    """Return ``(p - 1) (F + B - 2 W)`` between a rank's first and last action [5]_.

    Here ``B`` are the gradients of inputs. It holds for ``m >= 2 p - 1`` and ``W`` no longer than ``F`` and ``B``.
    Ranks end one after another, so the next step must start without waiting for all of them ([5]_, section 4).
    """
    return (ranks - 1) * (times.forward + times.input - 2 * times.weight)


def zb1p_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return ``min(p, m)`` [5]_: ``p - rank`` wait for their gradients of inputs, and ``rank`` for those of weights."""
    return min(ranks, microbatches)


def zb2p_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return ``min(2 p - 1, m)`` [5]_."""
    return min(2 * ranks - 1, microbatches)


def interleaved_zb_bubble(ranks: int, microbatches: int, chunks: int, times: PassSeconds) -> float:
    """Return ``(p - 1) (F + B - W)`` of one stage of the rank that is busy longest [5]_.

    Here ``B`` are the gradients of inputs. It holds for ``m >= p`` and equal times.
    """
    return zb1p_bubble(ranks, microbatches, times)


def interleaved_zb_in_flight(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return a rank's warm-up and ``rank``; with rounds of ``p`` microbatches that is ``p`` a chunk."""
    round_size = microbatches // max(1, microbatches // ranks)
    return min((chunks - 1) * round_size + ranks, microbatches * chunks)


def zbv_bubble(ranks: int, microbatches: int) -> float:
    """Return 0 between a rank's first and last action for ``m >= 2 p - 1`` and equal times [6]_."""
    return 0.0


def zbv_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return ``2 p`` for ``m >= 2 p - 1`` [7]_: a chunk has half the layers of a rank, so as much as ``p`` of 1F1B."""
    return 2 * ranks


def dualpipev_bubble(ranks: int, microbatches: int, times: PassSeconds, pair_seconds: float) -> float:
    """Return ``(p - 1) (F&B + B - 3 W)`` [8]_.

    ``B`` is a whole backward, ``F&B`` (``pair_seconds``) a forward and a backward as one, all of one stage; the source
    counts stages, two a rank. The formula holds for ``F = I = W`` and ``F&B = F + B``; it is an upper bound where the
    pair is shorter, or ``W`` shorter than the others.
    """
    return (ranks - 1) * (pair_seconds + times.backward - 3 * times.weight)


def dualpipev_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return ``2 p + 1`` [8]_."""
    return 2 * ranks + 1
