"""The division of a row of blocks, which may all differ, into pipeline stages: exact for the sum and the slowest stage.

With times t_i of a microbatch on the stages, a step of m microbatches takes ``sum(t_i) + (m - 1) max(t_i)`` (Zheng et
al., "Alpa", OSDI 2022, section 5.2). A boundary, which a microbatch crosses forward and backward, counts as a stage of
its own (Fan et al., "DAPPLE", PPoPP 2021, section 4). For a given slowest time the least sum is a shortest path over
the blocks. Slowest times are tried in rising order, from the least that any division has, until they alone are too
much.
"""

from typing import NamedTuple

import numpy as np

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.stages.division import FloatArray

CLOSE = 1e-3
"""Fraction by which slowest times may differ and are tried once; the time of a division is least but for this."""


class BlockDivision(NamedTuple):
    """The end of every stage's blocks, and the time by the formula."""

    ends: tuple[int, ...]
    time: float


def divide_blocks(
    times: FloatArray, num_microbatches: int, crossing_times: FloatArray | None = None
) -> BlockDivision | None:
    """Return the division of least time; ``None`` where none is allowed.

    Parameters
    ----------
    times
        Time of a microbatch on a stage that has the blocks ``first`` to ``end``, of shape
        ``(stages, blocks + 1, blocks + 1)``; infinite where it may not have them. A stage has at least one block.
    crossing_times
        Time in which a microbatch crosses the boundary before each block, of shape ``(blocks + 1,)``; by default none.

    Examples
    --------
    Blocks of 1, 2 and 3 on two stages: 3 + 3 is better than 1 + 5.

    >>> totals = np.array([0.0, 1.0, 3.0, 6.0])
    >>> spans = totals[None, :] - totals[:, None]
    >>> divide_blocks(np.stack([spans, spans]), 4)
    BlockDivision(ends=(2, 3), time=15.0)
    """
    num_blocks = times.shape[1] - 1
    is_span = np.triu(np.ones((num_blocks + 1, num_blocks + 1), bool), 1)
    crossings = np.zeros(num_blocks + 1) if crossing_times is None else crossing_times.astype(float)
    crossings[[0, num_blocks]] = 0.0  # nothing crosses the ends of the row
    sums = np.where(is_span, times + crossings, np.inf)
    slowest = np.where(is_span, np.maximum(times, crossings), np.inf)
    least_division, least_slowest = _find_path(sums, np.add), _find_path(slowest, np.maximum)
    if least_division is None or least_slowest is None:
        return None
    slowest_times = np.unique(slowest[np.isfinite(slowest) & (slowest >= least_slowest.time)])
    # of times that differ by less than `CLOSE` the last stands for all
    is_last = np.append(np.diff(np.floor(np.log(np.maximum(slowest_times, 1e-300)) / np.log1p(CLOSE))) > 0, True)
    best: BlockDivision | None = None
    for slowest_time in slowest_times[is_last]:
        check_deadline()
        if best is not None and least_division.time + (num_microbatches - 1) * slowest_time >= best.time:
            break
        division = _find_path(np.where(slowest <= slowest_time, sums, np.inf), np.add)
        if division is None:
            continue
        stages = zip(range(len(times)), (0, *division.ends[:-1]), division.ends, strict=True)
        total_time = division.time + (num_microbatches - 1) * max(float(slowest[stage]) for stage in stages)
        if best is None or total_time < best.time:
            best = BlockDivision(division.ends, total_time)
    return best


def _find_path(times: FloatArray, combine: np.ufunc) -> BlockDivision | None:
    """Return the division whose times of stages, combined, are least; ``None`` where none is allowed."""
    num_blocks = times.shape[1] - 1
    best_times = np.full(num_blocks + 1, np.inf)
    best_times[0] = 0.0
    first_choices = []
    for stage_times in times:
        table = combine(best_times[:, None], stage_times)
        first_choices.append(table.argmin(axis=0))
        best_times = table.min(axis=0)
    if not np.isfinite(best_times[num_blocks]):
        return None
    ends = [num_blocks]
    for choices in reversed(first_choices[1:]):
        ends.append(int(choices[ends[-1]]))
    return BlockDivision(tuple(reversed(ends)), float(best_times[num_blocks]))
