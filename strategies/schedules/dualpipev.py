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


def _collect_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Order, tuple[int, ...]]:
    """Return the actions of one rank, and the rows of the forwards that run as one with the backward in the next row.

    They are the eight phases of the schedule, with their names in the source [1]_.
    """
    first_stage, second_stage, num_behind = rank, 2 * num_ranks - 1 - rank, num_ranks - rank - 1
    rows: list[tuple[int, int, int]] = []
    pairs: list[int] = []
    num_done: Counter[tuple[int, bool]] = Counter()
    waiting_weights: deque[tuple[int, int, int]] = deque()

    def add_pass(stage: int, kind: int) -> None:
        """Add a forward or backward; every stage takes its microbatches in order."""
        direction = stage, kind == FORWARD
        rows.append((stage, kind, num_done[direction]))
        if kind == INPUT:
            waiting_weights.append((stage, WEIGHT, num_done[direction]))
        num_done[direction] += 1

    def add_weight() -> None:
        """Add the gradients of weights that have waited longest, if any wait."""
        if waiting_weights:
            rows.append(waiting_weights.popleft())

    def add_pair(forward_stage: int, backward_stage: int) -> None:
        """Add a forward of one stage and a backward of the other that run as one."""
        pairs.append(len(rows))
        add_pass(forward_stage, FORWARD)
        add_pass(backward_stage, BACKWARD)

    for _ in range(2 * num_behind):  # nF0
        add_pass(first_stage, FORWARD)
    for _ in range(rank + 1):  # nF0F1
        add_pass(first_stage, FORWARD)
        add_pass(second_stage, FORWARD)
    for _ in range(num_behind):  # nB1W1F1
        add_pass(second_stage, INPUT)
        add_weight()
        add_pass(second_stage, FORWARD)
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):  # nF0B1F1B0
        if turn == 0 and rank == num_ranks - 1:  # one after the other, for a smaller bubble
            add_pass(first_stage, FORWARD)
            add_pass(second_stage, BACKWARD)
        else:
            add_pair(first_stage, second_stage)
        add_pair(second_stage, first_stage)
    for _ in range(num_behind):  # nB1F1B0
        add_pass(second_stage, BACKWARD)
        add_pair(second_stage, first_stage)
    for turn in range(2 * (rank + 1)):  # nB1B0, the second half split
        add_pass(first_stage if turn % 2 else second_stage, BACKWARD if turn <= rank else INPUT)
    for _ in range(num_behind):  # nWB0
        add_weight()
        add_pass(first_stage, INPUT)
    for _ in range(rank + 1):  # nW
        add_weight()
    return np.array(rows), tuple(pairs)


def dualpipev_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of DualPipeV [1]_: forwards of one stage under backwards of the other [2]_."""
    return _collect_actions(rank, num_ranks, num_microbatches)[0]


def dualpipev_pairs(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rows of the forwards that run as one with the backward in the next row."""
    return _collect_actions(rank, num_ranks, num_microbatches)[1]


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
