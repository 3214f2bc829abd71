"""When steps end, from the ends of their passes: reductions, replicated and tied gradients, optimizer, gather."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.engine.compiled import compiled, pays
from simulator.engine.longest_path import Ints
from simulator.program import IntArray
from strategies.walk import Walked

Rows = Sequence[Ints]


class Endings(NamedTuple):
    """Ways in which steps of one schedule end, a row of ticks each.

    Parameters
    ----------
    first
        The first bucket of every stage among all, and after the last stage their number.
    leaving
        The reduction of every bucket.
    late, replicated, optimizer, gather, squares
        For every pipeline position, as in `strategies.durations.Ending`.
    norm
        The sum of the norm of gradients; empty where they are not clipped.
    tied
        The sum of every tied parameter's gradients.
    """

    first: IntArray
    leaving: IntArray
    late: IntArray
    replicated: IntArray
    optimizer: IntArray
    gather: IntArray
    squares: IntArray
    norm: IntArray
    tied: IntArray


class Steps(NamedTuple):
    """For every step the row of its passes in `Walked`, and that of its ending."""

    lane: IntArray
    ending: IntArray


def finish(
    steps: Steps, walked: Walked, filled: IntArray, endings: Endings, last: IntArray, pairs: IntArray
) -> IntArray:
    """Return the ticks of every step.

    Parameters
    ----------
    filled
        For every row of passes, the ticks from the start of a stage's last backward until each bucket leaves.
    last
        The stages of every position, in the order in which their buckets leave.
    pairs
        The two positions that keep each tied parameter.
    """
    result = np.zeros(len(steps.lane), np.int64)
    columns = (*steps, *walked, filled, *endings, last, pairs)
    if pays(len(steps.lane) * (filled.shape[1] + last.size)):
        compiled(_finish)(result, *columns)
        return result
    ticks = [0] * len(result)
    _finish(ticks, *(column.tolist() for column in columns))
    return np.array(ticks, dtype=np.int64)


def _finish(
    result: Ints,
    lane: Ints,
    ending: Ints,
    ends: Rows,
    starts: Rows,
    filled: Rows,
    first: Rows,
    leaving: Rows,
    late: Rows,
    replicated: Rows,
    optimizer: Rows,
    gather: Rows,
    squares: Rows,
    norm: Rows,
    tied: Rows,
    last: Rows,
    pairs: Rows,
) -> None:
    """Fill ``result``; buckets leave one after another, and the device goes on when all have arrived."""
    for step in range(len(result)):
        row, how = lane[step], ending[step]
        done = [0] * len(last)
        for position in range(len(last)):
            free = 0
            for stage in last[position]:
                for bucket in range(first[how][stage], first[how][stage + 1]):
                    free = max(free, starts[row][stage] + filled[row][bucket]) + leaving[how][bucket]
            done[position] = max(free, ends[row][position] + late[how][position]) + replicated[how][position]
        for pair in range(len(pairs)):
            one, other = pairs[pair][0], pairs[pair][1]
            done[one] = done[other] = max(done[one], done[other]) + tied[how][pair]
        for index in range(len(norm[how])):
            together = 0
            for position in range(len(last)):
                together = max(together, done[position] + squares[how][position])
            for position in range(len(last)):
                done[position] = together + norm[how][index]
        for position in range(len(last)):
            result[step] = max(result[step], done[position] + optimizer[how][position] + gather[how][position])
