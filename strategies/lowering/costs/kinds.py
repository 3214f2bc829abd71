"""Kinds of blocks, and kinds of pipeline stages, under the shardings of a plan.

Occurrences of a block are of one kind where they are cut alike and their inputs arrive in the same layouts.

A plan names operators of a block, ``layers.up``, and so cuts them in all occurrences alike; or those of one
occurrence, ``layers.3.up``. A tensor that crosses from one block to the next keeps the layout in which the first
block leaves it; the next block redistributes it to the layout in which it reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from meshwise.simulator.operator_graph import Block, OperatorGraph
from meshwise.simulator.program import IntArray
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import OfStage, PerStage, of_stage
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec

Shardings = Mapping[str, OperatorSharding]
"""Shardings by the name of an operator in its block."""


class Kind(NamedTuple):
    """A block under the shardings of some of its occurrences, and the layouts in which its inputs arrive."""

    block: Block
    shardings: tuple[OperatorSharding, ...]
    arriving: tuple[ShardingSpec, ...]


class Kinds(NamedTuple):
    """The block kinds of a graph under a plan, by name, and the name of the kind of each occurrence.

    The usual kind of a block, cut as the plan cuts the block and with inputs that arrive as they are first read, has
    the name of the block; any other kind has the name of its first occurrence.
    """

    of_name: dict[str, Kind]
    names: dict[str, str]


def kinds(graph: OperatorGraph, shardings: tuple[OperatorSharding, ...]) -> Kinds:
    """Return the kinds of the occurrences of a graph's blocks."""
    given = {sharding.operator: sharding for sharding in shardings}
    usual = {block.name: _usual(block, given) for block in graph.blocks}
    single = {sharding.operator.rsplit(".", 1)[0] for sharding in shardings} - set(usual)
    found, names = dict[str, Kind](), dict[str, str]()
    known: dict[tuple[object, ...], tuple[str, list[_Crossing]]] = {}
    before: list[_Crossing] = []
    for name, block in graph.occurrences:
        plain, own = usual[block.name], name in single and block.repeat > 1
        kind = Kind(block, _shardings(block, (name, block.name), given), ()) if own else plain
        kind = kind._replace(arriving=_arriving(kind, before))
        key = (block.name, kind.shardings if own else None, kind.arriving)
        if key not in known:
            as_usual = block.repeat == 1 or kind[1:] == plain[1:]
            known[key] = block.name if as_usual else name, _leaving(kind)
            found[known[key][0]] = kind
        names[name], before = known[key]
    return Kinds(found, names)


_Crossing = tuple[tuple[str, ...], ShardingSpec]
"""The dims and the layout of a tensor that goes from one block to the next."""


def _usual(block: Block, given: Shardings) -> Kind:
    """Return a block as a plan cuts it, with inputs that arrive as they are first read."""
    kind = Kind(block, _shardings(block, (block.name,), given), ())
    return kind._replace(arriving=_arriving(kind, []))


def _arriving(kind: Kind, before: Sequence[_Crossing]) -> tuple[ShardingSpec, ...]:
    """Return the layouts in which inputs arrive: as the previous block leaves them, or else as they are first read."""
    first = _first_read(kind.block, kind.shardings)
    left = (_renamed(each, kind.block.tensor[name].dims) for each, name in zip(before, kind.block.inputs, strict=False))
    return (*left, *first[len(before) :])


def _leaving(kind: Kind) -> list[_Crossing]:
    """Return the outputs of a block as crossings to the next block."""
    found = produced(kind)
    return [(kind.block.tensor[name].dims, found[name]) for name in kind.block.outputs]


def produced(kind: Kind) -> dict[str, ShardingSpec]:
    """Return the layout of each tensor that flows through a block."""
    block = kind.block
    found = dict(zip(block.inputs, kind.arriving, strict=True))
    for operator, sharding in zip(block.operators, kind.shardings, strict=True):
        for name in operator.inputs:
            found.setdefault(name, sharding.of_kept(block.tensor[name]))
        for name in operator.outputs:
            found[name] = sharding.of_output(operator, block.tensor[name])
    return found


def _shardings(block: Block, names: tuple[str, ...], given: Shardings) -> tuple[OperatorSharding, ...]:
    """Return the shardings of a block's operators, looked up by ``names`` in order; other operators stay whole."""
    return tuple(
        next(
            (given[key] for key in (f"{name}.{operator.name}" for name in names) if key in given),
            OperatorSharding(operator.name, ()),
        )
        for operator in block.operators
    )


def _first_read(block: Block, shardings: tuple[OperatorSharding, ...]) -> tuple[ShardingSpec, ...]:
    """Return the layouts in which the inputs of a block are first read; whole for inputs that no operator reads."""
    found: dict[str, ShardingSpec] = {}
    for operator, sharding in zip(block.operators, shardings, strict=True):
        for name in operator.inputs:
            found.setdefault(name, sharding.of_kept(block.tensor[name]))
    return tuple(found.get(name, REPLICATED) for name in block.inputs)


def _renamed(crossing: _Crossing, others: tuple[str, ...]) -> ShardingSpec:
    """Return the layout of a tensor whose dims have other names in the next block."""
    dims, spec = crossing
    if dims == others:
        return spec
    place = dict(zip(dims, others, strict=False))
    return ShardingSpec(tuple((place[dim], axes) for dim, axes in spec.cuts if dim in place), spec.partial)


Runs = tuple[tuple[str, int], ...]
"""Blocks of a stage in order, each with how often it occurs in a row."""


@dataclass(frozen=True, eq=False)
class Division:
    """The kinds of a plan's stages: ``kind_of`` is for each stage the index of its kind in ``kinds``.

    Compared and hashed by identity: equal stages share one value.
    """

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
        """Return what a plan recomputes of the stages of a kind."""
        return of_stage(plan.recompute, self.first_of[kind])

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """The first stage of every kind."""
        return tuple(self.kind_of.index(kind) for kind in range(len(self.kinds)))


def runs_of(stages: tuple[Stage, ...], kinds: Mapping[str, str]) -> tuple[Runs, ...]:
    """Return the runs of block kinds of every stage; ``kinds`` are names of kinds by occurrence."""
    names = ([kinds[name] for name in stage.blocks] for stage in stages)
    return tuple(tuple((block, len(list(run))) for block, run in groupby(row)) for row in names)


def division(runs: tuple[Runs, ...], recompute: PerStage | None = None) -> Division:
    """Return the kinds of stages: stages of one kind have the same blocks and the same recomputation.

    >>> division(((("a", 1), ("b", 2)), (("b", 2),), (("b", 2),))).kind_of
    (0, 1, 1)
    """
    rows = [(each, of_stage(recompute, stage) if recompute else None) for stage, each in enumerate(runs)]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(rows))}
    return Division(tuple(each for each, _ in kinds), tuple(kinds[kind] for kind in rows))
