"""What redistributions cost between the choices of an operator that makes a tensor and of one that reads it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from simulator.deadline import check_deadline
from simulator.operator_graph import Block, Operator, Tensor
from strategies.lowering.operator import (
    BlockLayout,
    adds_before_cut,
    arriving_steps,
    gathers,
    gathers_in_backward,
    returning_steps,
)
from strategies.lowering.step import chain_ticks
from strategies.lowering.tensor_overlap import is_cut_product, sums, weight_gradient_ticks
from strategies.operators.cost_graph import Edge, IntArray
from strategies.operators.setting import Setting
from strategies.sharding import OperatorSharding, ShardingSpec


class _Reader(NamedTuple):
    """How a choice reads a tensor: what it asks for, and what it leaves of the gradient.

    ``again`` are the ticks of its backward beside which it gathers again what it gathers forward, and ``hidden`` those
    of the gradient of its weight, beside which the gradient of what it reads is summed; 0 where it does not.
    """

    wanted: ShardingSpec
    gradient: ShardingSpec
    again: int | None
    hidden: int


@dataclass(frozen=True, eq=False)
class EdgeCosts:
    """The costs of redistributions; those between the same choices of the same operators are known."""

    setting: Setting
    _known: dict[tuple[object, ...], IntArray] = field(default_factory=dict)

    @cached_property
    def _whole(self) -> dict[str, BlockLayout]:
        return {block.name: self.setting.layout(block) for block in self.setting.problem.graph.blocks}

    def all(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> list[Edge]:
        """Return the redistributions between every operator that makes a tensor and every one that reads it.

        ``options`` are the choices of every operator of every occurrence of a block, in execution order.
        """
        result = []
        crossing: list[_Source | None] = []  # by place; what nobody has read yet has no layout
        number = 0
        for _, block in self.setting.problem.graph.occurrences:
            met = zip(block.inputs, crossing, strict=False)
            sources = {name: each.into(block.tensor[name]) for name, each in met if each is not None}
            for operator in block.operators:
                for name in dict.fromkeys(operator.inputs):
                    if name in sources:
                        times = self._between(sources[name], options, block, operator, name, options[number])
                        if times.any():
                            result.append(Edge(sources[name].node, number, times))
                    else:
                        sources[name] = _Source(number, block, operator, name, block.tensor[name].dims, read=True)
                for name in operator.outputs:
                    sources[name] = _Source(number, block, operator, name, block.tensor[name].dims)
                number += 1
            crossing = [sources.get(name) for name in block.outputs]
        return result

    def _between(
        self,
        source: "_Source",
        options: tuple[tuple[OperatorSharding, ...], ...],
        block: Block,
        reader: Operator,
        name: str,
        own: tuple[OperatorSharding, ...],
    ) -> IntArray:
        made = (source.block.name, source.operator.name, source.name, source.dims, source.read, options[source.node])
        key = (*made, block.name, reader.name, name, own)
        if key not in self._known:
            haves = [source.layout(each) for each in options[source.node]]
            readers = [self._reads(block, reader, name, each) for each in own]
            self._known[key] = self._times(block, reader, name, haves, readers)
        return self._known[key]

    def _reads(self, block: Block, operator: Operator, name: str, sharding: OperatorSharding) -> _Reader:
        check_deadline()
        tensor = block.tensor[name]
        layout = self.setting.alone(block, operator, sharding)
        steps = self.setting.steps(layout)
        again = gathers_in_backward(layout, operator, keeps_gathered=self.setting.training.conventions.keeps_gathered)
        backward = steps.backward.ticks if again else None
        hides = self.setting.costs.blocks.hides_gradients(self.setting.plan) and is_cut_product(layout, operator)
        weights = weight_gradient_ticks(layout, self.setting.rank.accelerator, operator, steps.backward) if hides else 0
        next_to = not steps.after  # what follows the product is the sum
        return _Reader(sharding.of_input(tensor), sharding.of_gradient(tensor), backward, weights if next_to else 0)

    def _times(
        self, block: Block, reader: Operator, name: str, haves: list[ShardingSpec], readers: list[_Reader]
    ) -> IntArray:
        """Return the ticks of a tensor between every layout in which it is made and every way to read it."""
        made, reads = {each: i for i, each in enumerate(dict.fromkeys(haves))}, dict.fromkeys(readers)
        of_read = {each: i for i, each in enumerate(reads)}
        unique = np.array([[self._ticks(block, reader, name, have, each) for each in reads] for have in made], np.int64)
        found: IntArray = unique[np.ix_([made[have] for have in haves], [of_read[each] for each in readers])]
        return found * self.setting.plan.num_microbatches

    def _ticks(self, block: Block, reader: Operator, name: str, have: ShardingSpec, read: _Reader) -> int:
        layout, groups = self._whole[block.name], self.setting.rank.groups
        whole = adds_before_cut(reader, have, read.wanted)
        arriving = arriving_steps(layout, groups, name, have, read.wanted, whole=whole)
        returning = returning_steps(layout, groups, name, read.gradient, have)
        ticks = chain_ticks((*arriving, *returning))
        hides = bool(returning) and sums(returning[0], (name,))
        if hides:
            ticks -= min(returning[0].ticks, read.hidden)
        if read.again is None:
            return ticks
        gathered = sum(step.ticks for step in arriving if gathers(step))
        return ticks + max(gathered - read.again + hides * read.hidden, 0)


class _Source(NamedTuple):
    """What makes a tensor, or reads it first where it comes from outside; its name there, its dims where it is read."""

    node: int
    block: Block
    operator: Operator
    name: str
    dims: tuple[str, ...]
    read: bool = False

    def into(self, tensor: Tensor) -> "_Source":
        """Return the same in the next block, where its dims have the names of ``tensor``'s."""
        return self._replace(dims=tensor.dims)

    def layout(self, sharding: OperatorSharding) -> ShardingSpec:
        """Return the layout in which the tensor is there, given how its maker is cut."""
        tensor = self.block.tensor[self.name]
        made = sharding.of_kept(tensor) if self.read else sharding.of_output(self.operator, tensor)
        renamed = dict(zip(tensor.dims, self.dims, strict=False))
        return ShardingSpec(tuple((renamed[dim], axes) for dim, axes in made.cuts if dim in renamed), made.partial)
