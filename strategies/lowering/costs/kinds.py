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
from meshwise.strategies.lowering.costs.layout import BlockKind
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.recomputation import PerStage, find_stage_recompute
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec

Shardings = Mapping[str, OperatorSharding]
"""Shardings by the name of an operator in its block."""


class BlockKinds(NamedTuple):
    """The block kinds of a graph under a plan, by name, and the name of the kind of each occurrence.

    The usual kind of a block, cut as the plan cuts the block and with inputs that arrive as they are first read, has
    the name of the block; any other kind has the name of its first occurrence.
    """

    by_name: dict[str, BlockKind]
    kind_names: dict[str, str]


def classify_blocks(graph: OperatorGraph, shardings: tuple[OperatorSharding, ...]) -> BlockKinds:
    """Return the kinds of the occurrences of a graph's blocks."""
    sharding_of = {sharding.operator: sharding for sharding in shardings}
    usual_kinds = {block.name: _build_usual_kind(block, sharding_of) for block in graph.blocks}
    cut_occurrences = {sharding.operator.rsplit(".", 1)[0] for sharding in shardings} - set(usual_kinds)
    kinds_by_name, kind_names = dict[str, BlockKind](), dict[str, str]()
    known: dict[tuple[object, ...], tuple[str, list[_Crossing]]] = {}
    crossings: list[_Crossing] = []
    for name, block in graph.occurrences:
        usual_kind, has_own = usual_kinds[block.name], name in cut_occurrences and block.repeat > 1
        kind = (
            BlockKind(block, _select_shardings(block, (name, block.name), sharding_of), ()) if has_own else usual_kind
        )
        kind = kind._replace(input_layouts=_find_input_layouts(kind, crossings))
        key = (block.name, kind.shardings if has_own else None, kind.input_layouts)
        if key not in known:
            is_usual = block.repeat == 1 or kind[1:] == usual_kind[1:]
            known[key] = block.name if is_usual else name, _list_crossings(kind)
            kinds_by_name[known[key][0]] = kind
        kind_names[name], crossings = known[key]
    return BlockKinds(kinds_by_name, kind_names)


_Crossing = tuple[tuple[str, ...], ShardingSpec]
"""The dims and the layout of a tensor that goes from one block to the next."""


def _build_usual_kind(block: Block, sharding_of: Shardings) -> BlockKind:
    """Return a block as a plan cuts it, with inputs that arrive as they are first read."""
    kind = BlockKind(block, _select_shardings(block, (block.name,), sharding_of), ())
    return kind._replace(input_layouts=_find_input_layouts(kind, []))


def _find_input_layouts(kind: BlockKind, crossings: Sequence[_Crossing]) -> tuple[ShardingSpec, ...]:
    """Return the layouts in which inputs arrive: as the previous block leaves them, or else as they are first read."""
    read_layouts = _find_read_layouts(kind.block, kind.shardings)
    crossed_layouts = (
        _rename_dims(crossing, kind.block.tensor[name].dims)
        for crossing, name in zip(crossings, kind.block.inputs, strict=False)
    )
    return (*crossed_layouts, *read_layouts[len(crossings) :])


def _list_crossings(kind: BlockKind) -> list[_Crossing]:
    """Return the outputs of a block as crossings to the next block."""
    layouts = find_produced_layouts(kind)
    return [(kind.block.tensor[name].dims, layouts[name]) for name in kind.block.outputs]


def find_produced_layouts(kind: BlockKind) -> dict[str, ShardingSpec]:
    """Return the layout of each tensor that flows through a block."""
    block = kind.block
    layouts = dict(zip(block.inputs, kind.input_layouts, strict=True))
    for operator, sharding in zip(block.operators, kind.shardings, strict=True):
        for name in operator.inputs:
            layouts.setdefault(name, sharding.find_kept_spec(block.tensor[name]))
        for name in operator.outputs:
            layouts[name] = sharding.find_output_spec(operator, block.tensor[name])
    return layouts


def _select_shardings(block: Block, names: tuple[str, ...], sharding_of: Shardings) -> tuple[OperatorSharding, ...]:
    """Return the shardings of a block's operators, looked up by ``names`` in order; other operators stay whole."""
    return tuple(
        next(
            (sharding_of[key] for key in (f"{name}.{operator.name}" for name in names) if key in sharding_of),
            OperatorSharding(operator.name, ()),
        )
        for operator in block.operators
    )


def _find_read_layouts(block: Block, shardings: tuple[OperatorSharding, ...]) -> tuple[ShardingSpec, ...]:
    """Return the layouts in which the inputs of a block are first read; whole for inputs that no operator reads."""
    layouts: dict[str, ShardingSpec] = {}
    for operator, sharding in zip(block.operators, shardings, strict=True):
        for name in operator.inputs:
            layouts.setdefault(name, sharding.find_kept_spec(block.tensor[name]))
    return tuple(layouts.get(name, REPLICATED) for name in block.inputs)


def _rename_dims(crossing: _Crossing, new_dims: tuple[str, ...]) -> ShardingSpec:
    """Return the layout of a tensor whose dims have other names in the next block."""
    dims, spec = crossing
    if dims == new_dims:
        return spec
    new_dim = dict(zip(dims, new_dims, strict=False))
    return ShardingSpec(tuple((new_dim[dim], axes) for dim, axes in spec.cuts if dim in new_dim), spec.partial)


Runs = tuple[tuple[str, int], ...]
"""Blocks of a stage in order, each with how often it occurs in a row."""


@dataclass(frozen=True, eq=False)
class StageKinds:
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

    @cached_property
    def first_stages(self) -> tuple[int, ...]:
        """The first stage of every kind."""
        return tuple(self.kind_of.index(kind) for kind in range(len(self.kinds)))


def list_stage_runs(stages: tuple[Stage, ...], kinds: Mapping[str, str]) -> tuple[Runs, ...]:
    """Return the runs of block kinds of every stage; ``kinds`` are names of kinds by occurrence."""
    stage_blocks = ([kinds[name] for name in stage.blocks] for stage in stages)
    return tuple(tuple((block, len(list(run))) for block, run in groupby(row)) for row in stage_blocks)


def classify_stages(runs: tuple[Runs, ...], recompute: PerStage | None = None) -> StageKinds:
    """Return the kinds of stages: stages of one kind have the same blocks and the same recomputation.

    >>> classify_stages(((("a", 1), ("b", 2)), (("b", 2),), (("b", 2),))).kind_of
    (0, 1, 1)
    """
    stage_keys = [
        (stage_runs, find_stage_recompute(recompute, stage) if recompute else None)
        for stage, stage_runs in enumerate(runs)
    ]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(stage_keys))}
    return StageKinds(tuple(stage_runs for stage_runs, _ in kinds), tuple(kinds[kind] for kind in stage_keys))
