"""What the stages of a plan are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from simulator.program import IntArray
from strategies.plan import Plan, Stage
from strategies.recomputation import OfStage, PerStage, of_stage

Runs = tuple[tuple[str, int], ...]
"""Blocks of a stage in order, each with how often it occurs in a row."""


@dataclass(frozen=True, eq=False)
class Division:
    """The stages of a plan: ``kind_of`` says for each which of ``kinds`` it is. Each is a value of its own."""

    kinds: tuple[Runs, ...]
    kind_of: tuple[int, ...]

    @cached_property
    def index(self) -> IntArray:
        """``kind_of`` as an array."""
        return np.array(self.kind_of, dtype=np.int64)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The different blocks."""
        return tuple(dict.fromkeys(block for runs in self.kinds for block, _ in runs))

    def recompute(self, plan: Plan, kind: int) -> OfStage:
        """Return what a plan that has this division computes again of the stages of a kind."""
        return of_stage(plan.recompute, self.first_of[kind])

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """The first stage of every kind."""
        return tuple(self.kind_of.index(kind) for kind in range(len(self.kinds)))


def runs_of(stages: tuple[Stage, ...], kinds: Mapping[str, str]) -> tuple[Runs, ...]:
    """Return for every stage what its occurrences of blocks are, whose ``kinds`` have names."""
    names = ([kinds[name] for name in stage.blocks] for stage in stages)
    return tuple(tuple((block, len(list(run))) for block, run in groupby(row)) for row in names)


def division(runs: tuple[Runs, ...], recompute: PerStage | None = None) -> Division:
    """Return the division of stages: those of a kind have the same blocks and the same recomputation.

    >>> division(((("a", 1), ("b", 2)), (("b", 2),), (("b", 2),))).kind_of
    (0, 1, 1)
    """
    rows = [(each, of_stage(recompute, stage) if recompute else None) for stage, each in enumerate(runs)]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(rows))}
    return Division(tuple(each for each, _ in kinds), tuple(kinds[kind] for kind in rows))
