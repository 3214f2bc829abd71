"""The most bytes that passes take on each pipeline rank, from the order of its passes alone."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import Change, IntArray
from meshwise.strategies.lowering.costs.memory import BlockMemory, StageMemory
from meshwise.strategies.lowering.tasks.fully_sharded import NO_CHANGES, BlockChanges, Sharing
from meshwise.strategies.lowering.tasks.variants import FIRST_OFFSET
from meshwise.strategies.schedules.orders import Actions
from meshwise.strategies.schedules.schedule import ActionKind


def peak_activations(rows: Actions, stages: Sequence[StageMemory]) -> IntArray:
    """Return the most bytes of activations and working memory that each pipeline rank holds.

    Memory changes only on the ranks' compute streams, so that the order of actions gives the peak, whatever time they
    take.
    """
    changes = np.array([memory.changes for memory in stages], dtype=np.int64)
    working_bytes = np.array([memory.working_bytes for memory in stages], dtype=np.int64)
    levels = np.cumsum(
        changes[rows.stage, rows.kind]
    )  # a rank gives back all it takes, so the next begins with nothing
    levels += working_bytes[rows.stage, rows.kind]
    result: IntArray = np.maximum.reduceat(levels, rows.start[:-1])
    return result


class PassMemory(NamedTuple):
    """Bytes of one pass of one stage on one rank: its lasting change, and its peak above the level before it."""

    change: int
    peak: int


def pass_memory(blocks: Sequence[BlockMemory], block_changes: Sequence[BlockChanges], kind: ActionKind) -> PassMemory:
    """Return the memory of a pass whose blocks, in its order, keep activations and also have ``block_changes``.

    >>> block = BlockMemory(kept_bytes=10, recomputed_bytes=5, forward=20, backward=20)
    >>> from meshwise.simulator.program import Category
    >>> unit = (Change(Category.PARAMETERS, 7),)
    >>> pass_memory([block, block], [BlockChanges((), unit, unit)] * 2, ActionKind.FORWARD)
    PassMemory(change=20, peak=47)
    >>> head = BlockMemory(kept_bytes=10, recomputed_bytes=0, forward=20, backward=30, loss=5)
    >>> pass_memory([head], [BlockChanges((), unit, unit)], ActionKind.BACKWARD)
    PassMemory(change=-10, peak=32)
    """
    level = peak = 0
    for memory, block_change in zip(blocks, block_changes or (NO_CHANGES,) * len(blocks), strict=True):
        acquired_bytes, released_bytes = memory.changes(kind)
        level += acquired_bytes + memory.working_bytes(kind) + _sum_sizes(block_change.acquired)
        peak = max(peak, level)
        level += _sum_sizes(block_change.gathered) - memory.loss_bytes(kind)
        peak = max(peak, level)
        level -= (
            released_bytes + memory.working_bytes(kind) - memory.loss_bytes(kind) + _sum_sizes(block_change.released)
        )
        peak = max(peak, level + block_change.copied_bytes)
        level -= _sum_sizes(block_change.released_late)
    return PassMemory(level, peak)


def _sum_sizes(change_list: Sequence[Change]) -> int:
    """Return the bytes of changes together."""
    return sum(change.size for change in change_list)


def find_pass_peaks(rows: Actions, shared_states: Sharing, stages: Sequence[Mapping[int, PassMemory]]) -> IntArray:
    """Return the most bytes that each pipeline rank holds beyond the resident ones.

    Parameters
    ----------
    stages
        For every stage, the memory of its passes by variant: those that its schedule has.
    """
    table = np.zeros((len(stages), 2 * FIRST_OFFSET, 2), np.int64)
    for stage, passes in enumerate(stages):
        table[stage, list(passes)] = list(passes.values())
    pass_rows = table[rows.stage, shared_states.list_variants(rows)]
    levels = np.cumsum(pass_rows[:, 0]) - pass_rows[:, 0]
    levels -= np.repeat(levels[rows.start[:-1]], np.diff(rows.start))  # of other ranks
    peaks = levels + pass_rows[:, 1]
    result: IntArray = np.maximum.reduceat(peaks, rows.start[:-1])
    return result
