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
    Placement,
    ScheduleRule,
)


class _ActionList:
    """Collects the actions of one rank; every stage takes its microbatches in order.

    ``pairs`` are the rows of the forwards that run as one with the backward in the next row.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.pairs: list[int] = []
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.weights: deque[tuple[int, int]] = deque()

    def add_forward(self, stage: int) -> None:
        self.rows.append((stage, FORWARD, self.forwards[stage]))
        self.forwards[stage] += 1

    def add_backward(self, stage: int, kind: int = BACKWARD) -> None:
        microbatch = self.backwards[stage]
        self.rows.append((stage, kind, microbatch))
        self.backwards[stage] += 1
        if kind == INPUT:
            self.weights.append((stage, microbatch))

    def add_weight(self) -> None:
        """Add the gradients of weights that have waited longest, if any wait."""
        if self.weights:
            stage, microbatch = self.weights.popleft()
            self.rows.append((stage, WEIGHT, microbatch))

    def add_pair(self, forward_stage: int, backward_stage: int) -> None:
        """Add a forward of one stage and a backward of the other that run as one."""
        self.pairs.append(len(self.rows))
        self.add_forward(forward_stage)
        self.add_backward(backward_stage)


def _collect_actions(rank: int, num_ranks: int, num_microbatches: int) -> _ActionList:
    """Return the actions of one rank: the eight phases of the schedule, with their names in the source [1]_."""
    actions, first_stage, second_stage, num_behind = _ActionList(), rank, 2 * num_ranks - 1 - rank, num_ranks - rank - 1
    for _ in range(2 * num_behind):  # nF0
        actions.add_forward(first_stage)
    for _ in range(rank + 1):  # nF0F1
        actions.add_forward(first_stage)
        actions.add_forward(second_stage)
    for _ in range(num_behind):  # nB1W1F1
        actions.add_backward(second_stage, INPUT)
        actions.add_weight()
        actions.add_forward(second_stage)
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):  # nF0B1F1B0
        if turn == 0 and rank == num_ranks - 1:  # one after the other, for a smaller bubble
            actions.add_forward(first_stage)
            actions.add_backward(second_stage)
        else:
            actions.add_pair(first_stage, second_stage)
        actions.add_pair(second_stage, first_stage)
    for _ in range(num_behind):  # nB1F1B0
        actions.add_backward(second_stage)
        actions.add_pair(second_stage, first_stage)
    for turn in range(2 * (rank + 1)):  # nB1B0, the second half split
        actions.add_backward(first_stage if turn % 2 else second_stage, BACKWARD if turn <= rank else INPUT)
    for _ in range(num_behind):  # nWB0
        actions.add_weight()
        actions.add_backward(first_stage, INPUT)
    for _ in range(rank + 1):  # nW
        actions.add_weight()
    return actions


def dualpipev_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of DualPipeV [1]_: forwards of one stage under backwards of the other [2]_."""
    return np.array(_collect_actions(rank, num_ranks, num_microbatches).rows)


def dualpipev_pairs(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rows of the forwards that run as one with the backward in the next row."""
    return tuple(_collect_actions(rank, num_ranks, num_microbatches).pairs)


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
