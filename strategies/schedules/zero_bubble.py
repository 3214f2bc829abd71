"""Zero-bubble schedules: backwards are split, and gradients of weights fill time that would be idle.

ZB-H1 and ZB-H2 have one stage a rank. ZB-V has two, down and up again: no bubble, with the activations of 1F1B [4]_.
Interleaved 1F1B with delayed gradients of weights does with several stages a rank what ZB-H1 does with one.

References
----------
.. [1] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2 (ZB-H1 and ZB-H2, figure 3).
.. [2] Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241, section 6 (ZB-V).
.. [3] torch.distributed.pipelining, ``ScheduleZBVZeroBubble`` (torch 2.13).
.. [4] Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, table 1 (V-ZB).
.. [5] torch.distributed.pipelining, ``ScheduleInterleavedZeroBubble`` (torch 2.13).
"""

from collections import Counter

import numpy as np

from meshwise.strategies.schedules.rule import (
    FORWARD,
    INPUT,
    WEIGHT,
    Condition,
    Order,
    Placement,
    ScheduleRule,
    build_columns,
    build_rounds,
    count_rounds,
    find_round_size,
    merge_columns,
)


def zb1p_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of ZB-H1 [1]_: 1F1B whose gradients of weights come ``rank`` microbatches later."""
    return _order_one_stage(rank, num_microbatches, num_ranks - rank, rank)


def zb2p_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of ZB-H2 [1]_: so many forwards first that no rank waits for its first gradient."""
    return _order_one_stage(rank, num_microbatches, 2 * (num_ranks - rank) - 1, 2 * rank)


def _order_one_stage(rank: int, num_microbatches: int, warmup: int, delay: int) -> Order:
    """Return the order of a rank with one stage, of the kinds that `list_split_kinds` lists."""
    columns = build_columns(rank, num_microbatches)
    kinds = list_split_kinds(num_microbatches, warmup, delay)
    return merge_columns(kinds, {FORWARD: columns, INPUT: columns, WEIGHT: columns})


def list_split_kinds(total: int, warmup: int, delay: int) -> Order:
    """Return the kinds of the actions of ``total`` forwards and split backwards, in order.

    After ``warmup`` forwards come by turns: gradients of inputs, gradients of weights of ``delay`` turns before, and a
    forward.

    >>> "".join("FBIW"[kind] for kind in list_split_kinds(4, 2, 1))
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


def zbv_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of ZB-V [2]_: a forward, its gradients and those of the weights by turns.

    With fewer than ``2 p - 1`` microbatches it is the order of that many, without those that do not exist [3]_.
    """
    total, first_stage, second_stage = max(2 * num_ranks - 1, num_microbatches), rank, 2 * num_ranks - 1 - rank
    rows: list[tuple[int, int, int]] = []
    num_done: Counter[tuple[int, int]] = Counter()

    def add_passes(stage: int, *kinds: int) -> None:
        for kind in kinds:
            rows.append((stage, kind, num_done[stage, kind]))
            num_done[stage, kind] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        add_passes(first_stage, FORWARD)
    for _ in range(rank):
        add_passes(second_stage, FORWARD)
        add_passes(first_stage, FORWARD)
    for _ in range(num_ranks - rank):
        add_passes(second_stage, FORWARD, INPUT, WEIGHT)
    for _ in range(total - num_ranks):
        if num_done[first_stage, FORWARD] < total:
            add_passes(first_stage, FORWARD)
        add_passes(first_stage, INPUT, WEIGHT)
        add_passes(second_stage, FORWARD, INPUT, WEIGHT)
    for _ in range(rank):
        add_passes(first_stage, INPUT)
        add_passes(second_stage, INPUT)
    for _ in range(num_ranks - rank):
        add_passes(first_stage, INPUT, WEIGHT)
    for stage in (second_stage, first_stage):
        add_passes(stage, *[WEIGHT] * (total - num_done[stage, WEIGHT]))
    order = np.array(rows)
    return order[order[:, 2] < num_microbatches]


ZBV = ScheduleRule(
    "zbv",
    zbv_order,
    'Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241, section 6 (ZB-V)',
    placement=Placement.V,
    chunks=(2, 2),
    splits_backward=True,
)


def interleaved_zero_bubble_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return one rank's actions of torch's interleaved zero bubble [5]_: weights' gradients ``rank`` turns later."""
    round_size = find_round_size(num_ranks, num_microbatches)
    warmup = (num_chunks - 1) * round_size + num_ranks - rank
    forward, backward = build_rounds(rank, num_ranks, num_chunks, round_size, num_microbatches)
    kinds = list_split_kinds(num_microbatches * num_chunks, warmup, rank)
    return merge_columns(kinds, {FORWARD: forward, INPUT: backward, WEIGHT: backward})


INTERLEAVED_ZERO_BUBBLE = ScheduleRule(
    "interleaved_zero_bubble",
    interleaved_zero_bubble_order,
    "torch.distributed.pipelining, ScheduleInterleavedZeroBubble, after Qi et al., ICLR 2024",
    chunks=(1, None),
    condition=Condition(
        lambda ranks, m: m % count_rounds(ranks, m) == 0,
        lambda ranks, m: f"microbatches({m}) % ({m} // pipeline({ranks})) = 0",
    ),
    splits_backward=True,
)
