"""DualPipeV: two stages a rank, down and up again, with pairs of a forward and a backward that run as one.

References
----------
.. [1] DeepSeek-AI, "DeepSeek-V3 technical report", arXiv 2412.19437, section 3.2.1 and table 2 (DualPipe); the
   half of it that is DualPipeV: github.com/deepseek-ai/DualPipe, README, "Pipeline bubbles and memory usage".
.. [2] torch.distributed.pipelining, ``ScheduleDualPipeV`` (torch 2.13).
"""

from collections import Counter, deque

import numpy as np

from meshwise.strategies.schedules.rule import (
    AS_MANY_AS_STAGES,
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Order,
    PassTimes,
    Placement,
    ScheduleRule,
)


class _Actions:
    """Collects the actions of one rank; every stage takes its microbatches in order.

    ``pairs`` are the rows of the forwards that run as one with the backward in the next row.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.pairs: list[int] = []
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.weights: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        self.rows.append((stage, FORWARD, self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int, kind: int = BACKWARD) -> None:
        microbatch = self.backwards[stage]
        self.rows.append((stage, kind, microbatch))
        self.backwards[stage] += 1
        if kind == INPUT:
            self.weights.append((stage, microbatch))

    def weight(self) -> None:
        """Add the gradients of weights that have waited longest, if any wait."""
        if self.weights:
            stage, microbatch = self.weights.popleft()
            self.rows.append((stage, WEIGHT, microbatch))

    def together(self, forward: int, backward: int) -> None:
        """Add a forward of one stage and a backward of the other that run as one."""
        self.pairs.append(len(self.rows))
        self.forward(forward)
        self.backward(backward)


def _actions(rank: int, ranks: int, microbatches: int) -> _Actions:
    """Return the actions of one rank: the eight phases of the schedule, with their names in the source [1]_."""
    actions, first, second, behind = _Actions(), rank, 2 * ranks - 1 - rank, ranks - rank - 1
    for _ in range(2 * behind):  # nF0
        actions.forward(first)
    for _ in range(rank + 1):  # nF0F1
        actions.forward(first)
        actions.forward(second)
    for _ in range(behind):  # nB1W1F1
        actions.backward(second, INPUT)
        actions.weight()
        actions.forward(second)
    for turn in range(microbatches - 2 * ranks + rank + 1):  # nF0B1F1B0
        if turn == 0 and rank == ranks - 1:  # one after the other, for a smaller bubble
            actions.forward(first)
            actions.backward(second)
        else:
            actions.together(first, second)
        actions.together(second, first)
    for _ in range(behind):  # nB1F1B0
        actions.backward(second)
        actions.together(second, first)
    for turn in range(2 * (rank + 1)):  # nB1B0, the second half split
        actions.backward(first if turn % 2 else second, BACKWARD if turn <= rank else INPUT)
    for _ in range(behind):  # nWB0
        actions.weight()
        actions.backward(first, INPUT)
    for _ in range(rank + 1):  # nW
        actions.weight()
    return actions


def dualpipev_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of DualPipeV [1]_: forwards of one stage under backwards of the other [2]_."""
    return np.array(_actions(rank, ranks, microbatches).rows)


def dualpipev_pairs(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the rows of the forwards that run as one with the backward in the next row."""
    return tuple(_actions(rank, ranks, microbatches).pairs)


def dualpipev_bubble(ranks: int, microbatches: int, times: PassTimes, together: float) -> float:
    """Return the idle seconds of a rank in a step: ``(p - 1) (F&B + B - 3 W)`` [1]_.

    ``B`` is a whole backward, ``F&B`` (``pair_seconds``) a forward and a backward as one, all of one stage; the source
    counts stages, two a rank. The formula holds for ``F = I = W`` and ``F&B = F + B``; it is an upper bound where the
    pair is shorter, or ``W`` shorter than the others.
    """
    return (ranks - 1) * (together + times.backward - 3 * times.weight)


def dualpipev_in_flight(rank: int, ranks: int, microbatches: int) -> int:
    """Return the most activations, each of one microbatch and chunk, that a rank holds: ``2 p + 1`` [1]_."""
    return 2 * ranks + 1


DUALPIPEV = ScheduleRule(
    "dualpipev",
    dualpipev_order,
    'DeepSeek-AI, "DeepSeek-V3 technical report", arXiv 2412.19437; github.com/deepseek-ai/DualPipe (DualPipeV)',
    placement=Placement.V,
    chunks=(2, 2),
    condition=AS_MANY_AS_STAGES,
    splits_backward=True,
    pairs=dualpipev_pairs,
)
