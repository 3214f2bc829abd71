"""Pipeline schedules: the order of forward and backward passes on every pipeline rank, as data, text and CSV.

A schedule is data: per pipeline rank a tuple of actions, which print and parse as ``2F0`` (stage 2, forward,
microbatch 0), a form that torch.distributed.pipelining prints and reads too. A backward is one action, ``2B0``, or two:
``2I0`` for the gradients of inputs, which the previous stage waits for, and later ``2W0`` for those of weights
(Qi et al., "Zero bubble pipeline parallelism", ICLR 2024). ``(0F3;7B0)OVERLAP_F_B`` is a forward and a backward that
run as one.

The published schedules are in `meshwise.strategies.schedules`, by name in `SCHEDULES`.

The CSV form is torch.distributed.pipelining's, a row a pipeline rank and a cell an action: its runtime schedules read
it with ``_load_csv(FILE, format="compute_only")`` and write it with ``_dump_csv``. Empty cells, in which a rank idles,
are skipped, because an order has no clock.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.schedules.dualpipev import DUALPIPEV
from meshwise.strategies.schedules.rule import CUSTOM_NAME, ScheduleRule, build_written_rule
from meshwise.strategies.schedules.rule import Order as Order
from meshwise.strategies.schedules.unsplit import (
    GPIPE,
    INTERLEAVED,
    LOOPED_BFS,
    NAIVE,
    ONE_F_ONE_B,
    PIPEDREAM,
    PIPEDREAM_2BW,
)
from meshwise.strategies.schedules.zero_bubble import INTERLEAVED_ZERO_BUBBLE, ZB1P, ZB2P, ZBV


class ActionKind(StrEnum):
    """What a pipeline rank does with one microbatch of one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


KINDS = tuple(ActionKind)
"""The kinds of actions; a kind's index is its number in an `Order`."""

MAKES_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT)
"""The kinds that compute gradients of weights."""

MAX_ACTIONS = 100_000
"""Actions of a written schedule, at most: 64 ranks with 780 microbatches have as many."""
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
# anywhere in a text: one that has any action is meant as a schedule, and is told what is wrong with it
_TEXT = re.compile(r"(^|[\s(;])[0-9]+[FBIW][0-9]+($|[\s;)])")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class OrderError(ValueError):
    """Says what is wrong with the order of a pipeline ``rank``, which is also the rank's line in the text form."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


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
            raise ValueError(f"an action is a stage, F, B, I or W and a microbatch, as in 2F0; met {text[:40]!r}")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


Pair = tuple[Action, Action]
"""A forward and a backward that run as one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank, in order.

    Parameters
    ----------
    stage_ranks
        The pipeline rank of every stage.
    overlapped_pairs
        The pairs that run as one; each forward stands just before its backward.

    Raises
    ------
    OrderError
        Where an action runs on another rank than ``stage_ranks`` says or a rank has no stage; where a microbatch does
        not run forward and backward exactly once through every stage; or where its gradients of weights come before
        those of inputs.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    overlapped_pairs: tuple[Pair, ...] = ()

    __repr__ = brief_repr("name", "num_microbatches", "stage_ranks")

    def __post_init__(self) -> None:
        stages: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.stage_ranks):
            stages.setdefault(rank, []).append(stage)
        for rank, order in enumerate(self.orders):
            with _blame_rank(rank):
                _check_placement(order, rank, self.stage_ranks, stages)
        # after all placements, so that an action on a wrong rank is not reported as missing on the right one
        for rank, order in enumerate(self.orders):
            with _blame_rank(rank):
                _check_passes(order, stages[rank], self.num_microbatches)
        if self.overlapped_pairs:
            _check_pairs(self.overlapped_pairs, {pair for order in self.orders for pair in pairwise(order)})

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """The number of stages, of all ranks."""
        return len(self.stage_ranks)

    def find_rank(self, stage: int) -> int:
        """Return the pipeline rank that holds ``stage``."""
        return self.stage_ranks[stage]

    def list_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, first chunk first."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    @property
    def last_gradients(self) -> tuple[Action, ...]:
        """For every stage the action that computes the last gradients of its weights in a step."""
        return tuple(self.find_last_gradient(stage) for stage in range(self.num_stages))

    def find_last_gradient(self, stage: int) -> Action:
        """Return the action that computes the last gradients of a stage's weights in a step."""
        order = reversed(self.orders[self.stage_ranks[stage]])
        return next(action for action in order if action.stage == stage and action.kind in MAKES_GRADIENTS)

    @property
    def first_gradients(self) -> tuple[Action, ...]:
        """For every stage the action that computes the first gradients of its weights in a step."""
        backwards = (action for order in self.orders for action in reversed(order) if action.kind in MAKES_GRADIENTS)
        first_actions = {action.stage: action for action in backwards}
        return tuple(first_actions[stage] for stage in range(self.num_stages))

    def __str__(self) -> str:
        return "\n".join(" ".join(self._format_order(order)) for order in self.orders)

    def _format_order(self, order: tuple[Action, ...]) -> Iterator[str]:
        pairs = dict(self.overlapped_pairs)
        backwards = {backward for _, backward in self.overlapped_pairs}
        for action in order:
            if action in pairs:
                yield f"({action};{pairs[action]})OVERLAP_F_B"
            elif action not in backwards:
                yield str(action)

    @classmethod
    def parse(cls, text: str, name: str = CUSTOM_NAME) -> "Schedule":
        """Return the schedule that prints as ``text``: one line a pipeline rank.

        >>> Schedule.parse("0F0 3F0 3B0 0B0 \\n 1F0 2F0 2I0 1I0 2W0 1W0").stage_ranks
        (0, 1, 1, 0)
        """
        if text.count(" ") + text.count("\n") > MAX_ACTIONS:
            raise ValueError(f"a written schedule has at most {MAX_ACTIONS} actions and blanks, met more")
        lines: list[list[tuple[Action, ...]]] = []
        for rank, line in enumerate(text.strip().splitlines()):
            with _blame_rank(rank):
                lines.append([_parse_word(word) for word in line.split()])
        orders = tuple(tuple(action for word in words for action in word) for words in lines)
        holders = {action.stage: rank for rank in reversed(range(len(orders))) for action in orders[rank]}
        if not holders:
            raise ValueError("a schedule has at least one action")
        missing_stage = next((stage for stage in range(len(holders)) if stage not in holders), None)
        if missing_stage is not None:
            raise ValueError(f"stages are 0 to {max(holders)} without a gap, stage {missing_stage} has no action")
        pairs = tuple((word[0], word[1]) for words in lines for word in words if len(word) == 2)
        stage_ranks = tuple(holders[stage] for stage in range(len(holders)))
        return cls(name, orders, stage_ranks, 1 + max(item.microbatch for order in orders for item in order), pairs)


@contextmanager
def _blame_rank(rank: int) -> Iterator[None]:
    """Turn a ValueError raised inside into an `OrderError` of a rank."""
    try:
        yield
    except ValueError as error:
        raise OrderError(str(error), rank) from None


def _parse_word(word: str) -> tuple[Action, ...]:
    """Return the action that ``word`` spells, or the two actions of a pair."""
    pair = _PAIR.fullmatch(word)
    return (Action.parse(word),) if pair is None else (Action.parse(pair[1]), Action.parse(pair[2]))


def _check_placement(
    order: tuple[Action, ...], rank: int, stage_ranks: tuple[int, ...], stages: Mapping[int, list[int]]
) -> None:
    """Raise ValueError where a rank has no stage, or an action of an unknown stage or of another rank's."""
    for action in order:
        if action.stage >= len(stage_ranks):
            raise ValueError(f"stages are 0 to {len(stage_ranks) - 1}, met {action}")
        stage_rank = stage_ranks[action.stage]
        if stage_rank != rank:
            place_text = f"stage {action.stage} is on rank {stage_rank}, met {action} on rank {rank}"
            raise ValueError(f"every stage is on one pipeline rank: {place_text}")
    if rank not in stages:
        raise ValueError(f"every pipeline rank has a stage, rank {rank} has none")


def _check_passes(order: tuple[Action, ...], stages: Sequence[int], num_microbatches: int) -> None:
    """Raise ValueError where a microbatch does not run forward and backward once through every stage of a rank."""
    positions = {action: index for index, action in enumerate(order)}
    if len(positions) < len(order):
        repeated_action = next(action for index, action in enumerate(order) if positions[action] != index)
        raise ValueError(f"every action runs once, met {repeated_action} twice")
    num_found = 0
    for stage in stages:
        for microbatch in range(num_microbatches):
            forward, backward, inputs, weights = (positions.get(Action(stage, kind, microbatch)) for kind in KINDS)
            if forward is None:
                raise ValueError(
                    f"every microbatch runs forward once through every stage, {stage}F{microbatch} is missing"
                )
            is_split = inputs is not None and weights is not None
            if (backward is None) == (not is_split) or (inputs is None) != (weights is None):
                expected_actions = (Action(stage, kind, microbatch) for kind in KINDS[1:])
                present_texts = [str(action) for action in expected_actions if action in positions]
                raise ValueError(
                    f"a backward is {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}; "
                    f"met {' and '.join(present_texts) or 'none of them'}"
                )
            if inputs is not None and weights is not None and weights < inputs:
                raise ValueError(f"{stage}W{microbatch} comes after {stage}I{microbatch}, met it before")
            num_found += 3 if is_split else 2
    if num_found < len(order):
        excess_action = next(action for action in order if action.microbatch >= num_microbatches)
        raise ValueError(f"microbatches are 0 to {num_microbatches - 1}, met {excess_action}")


def _check_pairs(pairs: tuple[Pair, ...], neighbours: set[Pair]) -> None:
    """Raise ValueError where the two actions of a pair cannot run as one."""
    for forward, backward in pairs:
        is_pair = forward.kind is ActionKind.FORWARD and backward.kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        if not is_pair or forward.microbatch == backward.microbatch:
            raise ValueError(
                f"a forward and a backward of different microbatches overlap, met {forward} and {backward}"
            )
        if (forward, backward) not in neighbours:
            raise ValueError(f"a backward that overlaps a forward comes next to it, met {forward} and {backward}")


_RULES = (
    *(NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS),
    *(ZB1P, ZB2P, INTERLEAVED_ZERO_BUBBLE, ZBV, DUALPIPEV),
    *(PIPEDREAM, PIPEDREAM_2BW),
)
SCHEDULES: dict[str, ScheduleRule] = {rule.name: rule for rule in _RULES}
"""The published schedules by name."""


def build_rank_order(name: str, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return the actions of one pipeline rank of a schedule, given by name or text.

    Raises
    ------
    ValueError
        Where no such order exists; the message is the equation that does not hold.
    """
    rule = _find_defined_rule(name, num_ranks, num_microbatches, num_chunks)
    return rule.order(rank, num_ranks, num_microbatches, num_chunks)


def is_text(name: str) -> bool:
    """Return whether ``name`` is the text form of a schedule, not a name.

    >>> is_text("1f1b"), is_text("0F0 0B0")
    (False, True)
    """
    return _TEXT.search(name) is not None


def find_rule(name: str) -> ScheduleRule:
    """Return the rule of a schedule, given by name or text.

    Raises
    ------
    ValueError
        Where no schedule has that name, or the text is no schedule.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if not is_text(name):
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, met {name!a:.60}")
    return _parse_rule(name)


@lru_cache(maxsize=64)
def _parse_rule(text: str) -> ScheduleRule:
    """Return the rule of a schedule in its text form; cached, because every plan that has it asks again."""
    schedule = Schedule.parse(text)
    numbers = {kind: number for number, kind in enumerate(KINDS)}
    rows = [
        np.array([(item.stage, numbers[item.kind], item.microbatch) for item in order], np.int64)
        for order in schedule.orders
    ]
    forwards = {forward for forward, _ in schedule.overlapped_pairs}
    pairs = [tuple(row for row, action in enumerate(order) if action in forwards) for order in schedule.orders]
    return build_written_rule(rows, pairs, schedule.stage_ranks, schedule.num_microbatches)


def _find_defined_rule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> ScheduleRule:
    """Return the rule of a schedule; raise ValueError where it has no order of these sizes."""
    rule = find_rule(name)
    fault = rule.explain_undefined(num_ranks, num_microbatches, num_chunks)
    if fault is not None:
        raise ValueError(fault)
    return rule


@lru_cache(maxsize=256)
def build_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return a schedule, given by name or text; cached: the same object for the same arguments.

    >>> print(build_schedule("gpipe", 1, 2))
    0F0 0F1 0B0 0B1
    >>> print(build_schedule("1f1b", 2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    rule = _find_defined_rule(name, num_ranks, num_microbatches, num_chunks)
    orders: list[tuple[Action, ...]] = []
    pairs: list[Pair] = []
    for rank in range(num_ranks):
        rows = rule.order(rank, num_ranks, num_microbatches, num_chunks).tolist()
        order = tuple(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in rows)
        pairs += [(order[row], order[row + 1]) for row in rule.pairs(rank, num_ranks, num_microbatches, num_chunks)]
        orders.append(order)
    return Schedule(
        rule.name, tuple(orders), rule.list_stage_ranks(num_ranks, num_chunks), num_microbatches, tuple(pairs)
    )


def to_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV: a row a pipeline rank, a cell an action.

    >>> from meshwise.strategies.schedules.schedule import build_schedule
    >>> print(to_csv(build_schedule("gpipe", 1, 2)), end="")
    0F0,0F1,0B0,0B1
    """
    return "".join(",".join(line.split()) + "\n" for line in str(schedule).splitlines())


def from_csv(text: str) -> Schedule:
    """Return the schedule of a CSV text: a row a pipeline rank, a cell an action; empty cells are skipped.

    Raises
    ------
    ValueError
        Where the text is no schedule; an `OrderError` has the row as its rank.

    >>> print(from_csv("0F0,,0B0,\\n,1F0,1B0,\\n"))
    0F0 0B0
    1F0 1B0
    """
    try:
        rows = [[cell for cell in map(str.strip, row) if cell] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ValueError(f"a schedule is rows of actions, met no CSV: {error}") from None
    if any(" " in cell for row in rows for cell in row):
        raise ValueError("a cell is one action, met several")
    while rows and not rows[-1]:
        rows.pop()
    return Schedule.parse("\n".join(" ".join(row) for row in rows) or " ")
