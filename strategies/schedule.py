"""The order of forward and backward passes on every pipeline rank.

A schedule is data: per pipeline rank a tuple of actions, which print and parse as
``2F0`` (stage 2, forward, microbatch 0), the form torch.distributed.pipelining reads too.
Stage ``s`` of a looped placement lives on pipeline rank ``s % ranks``.

References
----------
.. [1] Huang et al., "GPipe", NeurIPS 2019.
.. [2] Narayanan et al., "PipeDream", SOSP 2019; the flushed 1F1B of "Memory-efficient
   pipeline-parallel DNN training", ICML 2021.
.. [3] Narayanan et al., "Efficient large-scale language model training on GPU clusters
   using Megatron-LM", SC 2021, section 2.2 (interleaved 1F1B).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ActionKind(StrEnum):
    """What a pipeline rank does with one microbatch of one stage."""

    FORWARD = "F"
    BACKWARD = "B"


_ACTION = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as ``text``.

        >>> Action.parse("2F0")
        Action(stage=2, kind=<ActionKind.FORWARD: 'F'>, microbatch=0)
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"an action is a stage, F or B and a microbatch, as in 2F0; met {text!r}")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """Orders of actions, one tuple a pipeline rank."""

    name: str
    orders: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        if self.num_stages % len(self.orders):
            raise ValueError(f"stages = chunks * ranks, met {self.num_stages} stages on {len(self.orders)} ranks")
        for rank, order in enumerate(self.orders):
            expected = 2 * self.num_microbatches * (self.num_stages // len(self.orders))
            misplaced = next((a for a in order if a.stage % len(self.orders) != rank), None)
            if misplaced is not None:
                raise ValueError(f"stage {misplaced.stage} is not on pipeline rank {rank}, met {misplaced}")
            if len(order) != expected or len(set(order)) != expected:
                raise ValueError(f"pipeline rank {rank} runs every action once: {expected} actions, met {len(order)}")

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds ``stage``."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, first chunk first."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def in_flight(self, rank: int) -> int:
        """Return the most microbatch activations, summed over chunks, that a rank holds at once."""
        held = peak = 0
        for action in self.orders[rank]:
            held += 1 if action.kind is ActionKind.FORWARD else -1
            peak = max(peak, held)
        return peak

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in order) for order in self.orders)

    @classmethod
    def parse(cls, text: str, name: str = "custom") -> "Schedule":
        """Return the schedule that prints as ``text``: one line a pipeline rank."""
        orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines())
        actions = [action for order in orders for action in order]
        if not actions:
            raise ValueError("a schedule has at least one action")
        return cls(name, orders, 1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions))


Order = NDArray[np.int64]
"""The actions of one pipeline rank as rows: stage, 0 for forward or 1 for backward, microbatch."""


def gpipe_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of GPipe [1]_: all forwards, then all backwards."""
    _one_chunk("gpipe", chunks)
    kinds = np.repeat([0, 1], microbatches)
    return _merged(kinds, *[(np.full(microbatches, rank), np.arange(microbatches))] * 2)


def one_f_one_b_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of flushed 1F1B [2]_: ``ranks - rank`` forwards, then by turns."""
    _one_chunk("1f1b", chunks)
    warmup = min(ranks - rank, microbatches)
    turns = np.tile([1, 0], microbatches - warmup)
    kinds = np.concatenate([np.zeros(warmup, np.int64), turns, np.ones(warmup, np.int64)])
    return _merged(kinds, *[(np.full(microbatches, rank), np.arange(microbatches))] * 2)


def interleaved_order(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Return one rank's actions of interleaved 1F1B [3]_: rounds of ``ranks`` microbatches through each chunk."""
    if microbatches % ranks:
        raise ValueError(f"interleaved: microbatches are a multiple of pipeline({ranks}), met {microbatches}")
    total = microbatches * chunks
    turn = np.arange(total)
    chunk, microbatch = turn // ranks % chunks, turn // (ranks * chunks) * ranks + turn % ranks
    warmup = min((chunks - 1) * ranks + 2 * (ranks - rank - 1), total)
    turns = np.tile([0, 1], total - warmup)
    kinds = np.concatenate([np.zeros(warmup, np.int64), turns, np.ones(warmup, np.int64)])
    forward, backward = (chunk * ranks + rank, microbatch), ((chunks - 1 - chunk) * ranks + rank, microbatch)
    return _merged(kinds, forward, backward)


def _merged(kinds: Order, forward: tuple[Order, Order], backward: tuple[Order, Order]) -> Order:
    """Return rows in the order of ``kinds``, each kind's stages and microbatches in turn."""
    rows = np.stack([kinds, kinds, kinds], axis=1)
    for kind, (stages, microbatches) in enumerate((forward, backward)):
        rows[kinds == kind, 0], rows[kinds == kind, 2] = stages, microbatches
    return rows


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ValueError(f"{name}: chunks is 1, met {chunks}; the schedule with chunks is interleaved")


SCHEDULES: dict[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": gpipe_order,
    "1f1b": one_f_one_b_order,
    "interleaved": interleaved_order,
}
"""By name, the function that gives a rank's actions of a number of ranks, microbatches and chunks."""


def rank_order(name: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Order:
    """Return the actions of one pipeline rank of a schedule by name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, met {name}")
    return SCHEDULES[name](rank, ranks, microbatches, chunks)


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule by name; the same value for the same arguments.

    >>> print(schedule("gpipe", 1, 2))
    0F0 0F1 0B0 0B1
    >>> print(schedule("1f1b", 2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    kinds = tuple(ActionKind)
    orders = (rank_order(name, rank, ranks, microbatches, chunks).tolist() for rank in range(ranks))
    actions = tuple(tuple(Action(stage, kinds[kind], microbatch) for stage, kind, microbatch in o) for o in orders)
    return Schedule(name, actions, ranks * chunks, microbatches)


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return GPipe [1]_: all forwards, then all backwards; one chunk a rank."""
    return schedule("gpipe", ranks, microbatches, chunks)


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return flushed 1F1B [2]_: rank r warms up with ``ranks - r`` forwards, then alternates; one chunk a rank."""
    return schedule("1f1b", ranks, microbatches, chunks)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B [3]_: ``chunks`` model chunks a rank, rounds of ``ranks`` microbatches.

    Raises
    ------
    ValueError
        Where ``microbatches`` is no multiple of ``ranks``, as the published schedule asks.
    """
    return schedule("interleaved", ranks, microbatches, chunks)
