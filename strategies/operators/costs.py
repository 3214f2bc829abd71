"""Costs of the choices of operators: of each alone, and of each pair.

What every choice of every operator costs, taken from the lowering of whole plans.

The ticks of a choice are those of its compute and its own collectives, forward and backward, for all
microbatches, with its part of what ends a step; those of a pair of choices are the redistributions between
them, of the tensor forward and of its gradient backward. Their sum is the step of the plan on an idle network,
but for what is not a sum:

* two readers of a tensor that want it in one layout share a redistribution, which is counted for each;
* gradients that ranks along an axis sum are summed together once a step, and counted at the rate of all
  parameters together, which leaves out part of a collective's latency where they are fewer.

The bytes that a choice keeps are its parameters, gradients and optimizer states and what it saves for all
microbatches under way; a tensor that several operators save is counted with the first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.collective import Collective
from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.operator_graph import Block, Operator, Tensor
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import resident
from meshwise.strategies.lowering.costs.operator import (
    BlockLayout,
    BlockSteps,
    OperatorSteps,
    adds_before_cut,
    arriving_steps,
    gathers,
    gathers_in_backward,
    operator_steps,
    returning_steps,
)
from meshwise.strategies.lowering.costs.optimizer import SQUARES, Parameters, begin_in_step, norm_ticks, optimizer_ticks
from meshwise.strategies.lowering.costs.recompute import moments
from meshwise.strategies.lowering.costs.rewrites import is_cut_product, sums, weight_gradient_ticks, with_accumulation
from meshwise.strategies.lowering.costs.stage import StageCosts
from meshwise.strategies.lowering.costs.steps import Step, chain_ticks
from meshwise.strategies.lowering.costs.weights import factored_elements, quantised_elements, replicated_elements
from meshwise.strategies.lowering.rank_classes.machine import Machine, Rank
from meshwise.strategies.lowering.rank_classes.placement import NORM
from meshwise.strategies.operators.choices import choices
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, IntArray
from meshwise.strategies.operators.operator_plan import Degrees, operator_plan, shared
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec


@dataclass(frozen=True, eq=False)
class Setting:
    """A plan that cuts no operator, on a machine; ``costs`` are what the lowering of whole plans has measured there."""

    problem: Problem
    plan: Plan
    costs: StageCosts

    @property
    def training(self) -> Training:
        """The training of the problem."""
        return self.problem.training

    @cached_property
    def machine(self) -> Machine:
        """The devices with the groups of the plan's mesh."""
        return self.costs.machine(self.plan)

    @cached_property
    def rank(self) -> Rank:
        """A rank of the machine, which stands for all."""
        return self.machine.rank(0)

    def layout(self, block: Block, shardings: Mapping[str, OperatorSharding] | None = None) -> BlockLayout:
        """Return the layout of a block whose operators are cut so; whole where nothing is said."""
        training = self.training
        summed = training.gradient_bytes if training.conventions.fused_gradients else 0
        return BlockLayout(
            block,
            self.plan.mesh,
            shardings or {},
            self.plan.sequences,
            training.precision,
            gradient_bytes=summed,
            frozen=training.frozen,
        )

    def alone(self, block: Block, operator: Operator, sharding: OperatorSharding) -> BlockLayout:
        """Return the layout of an operator whose inputs come as it reads them."""
        alone = replace(
            block, operators=(operator,), inputs=operator.inputs, outputs=operator.outputs, repeat=1, layer=block.layer
        )
        return self.layout(alone, {f"{block.name}.{operator.name}": sharding})

    def steps(self, layout: BlockLayout) -> OperatorSteps:
        """Return the steps of the one operator of a layout."""
        return operator_steps(layout, self.rank.accelerator, self.rank.groups, layout.block.operators[0])


Columns = tuple[IntArray, IntArray, IntArray]
"""Ticks, bytes kept and bytes held besides, of each choice."""


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """The costs of choices of operators; those of an operator that occurs again are known."""

    setting: Setting
    _columns: dict[tuple[str, tuple[OperatorSharding, ...]], Columns] = field(default_factory=dict)

    def of(self, block: Block, operator: Operator, options: tuple[OperatorSharding, ...]) -> Columns:
        """Return the ticks, the bytes kept and the bytes held while it runs, of each choice of an operator."""
        key = (f"{block.name}.{operator.name}", options)
        if key not in self._columns:
            rows = [self._of_choice(block, operator, each) for each in options]
            ticks, kept, transient = np.array(rows, dtype=np.int64).T.copy()
            self._columns[key] = ticks, kept, transient
        return self._columns[key]

    def _of_choice(self, block: Block, operator: Operator, sharding: OperatorSharding) -> tuple[int, int, int]:
        check_deadline()
        layout = self.setting.alone(block, operator, sharding)
        steps = self.setting.steps(layout)
        backward = self._accumulated(layout, steps.backward)
        chain = (*steps.gathers, steps.forward, *steps.before, *backward, *steps.after)
        ticks = chain_ticks(chain) * self.setting.plan.num_microbatches + self._ending(layout)
        return ticks, *self._bytes(layout, block)

    def _accumulated(self, layout: BlockLayout, backward: Step) -> tuple[Step, ...]:
        """Return the backward of an operator, and the addition of its gradients where that is one of its own."""
        if not self.setting.costs.blocks.adds_gradients(self.setting.plan):
            return (backward,)
        accelerator, size = self.setting.rank.accelerator, self.setting.training.gradient_bytes
        return with_accumulation(layout, accelerator, BlockSteps((), (backward,)), size).backward

    def _held(self, layout: BlockLayout) -> Parameters:
        seconds = {second for _, second in self.setting.problem.graph.tied}
        once = [each for each in layout.block.parameters if (layout.block.name, each.name) not in seconds]
        return Parameters(
            sum(map(layout.parameter_share, once)),
            len(layout.block.parameters),
            factored_elements(layout, once),
            quantised_elements(layout),
        )

    def _ending(self, layout: BlockLayout) -> int:
        """Return the ticks of an operator's part of what ends a step: its gradients are summed, and its update."""
        ticks = self._update(self._held(layout)) - self._update(Parameters(0, 0))
        parts = replicated_elements(layout, self.setting.training.conventions)
        for axis, elements in zip(OPERATOR_AXES, parts, strict=True):
            if elements:
                ticks += round(elements * self.setting.training.gradient_bytes * self._rates[axis])
        return ticks

    def _update(self, held: Parameters) -> int:
        """Return the ticks in which a rank updates parameters, and reads their gradients where they are clipped."""
        step = self.setting.rank.accelerator, self.setting.training, self.setting.plan, held
        return optimizer_ticks(*step) + (norm_ticks(*step) if self.setting.training.gradient_clipping else 0)

    @cached_property
    def once(self) -> int:
        """Ticks of the end of a step that no choice changes."""
        machine = self.setting.machine
        norm = machine.communicator(NORM, 0).ticks(*SQUARES) if NORM in machine.table.tables else 0
        return self._update(Parameters(0, 0)) + norm

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Ticks of a byte of gradients that ranks along each axis sum, at the rate of all parameters together."""
        size = float(self.setting.problem.graph.num_parameters * self.setting.training.gradient_bytes)
        groups = self.setting.rank.groups
        sums = ((axis, groups[axis].ticks(Collective.ALL_REDUCE, size)) for axis in OPERATOR_AXES if axis in groups)
        return {axis: ticks / size for axis, ticks in sums}

    def _bytes(self, layout: BlockLayout, block: Block) -> tuple[int, int]:
        """Return the bytes that an operator keeps, and those it holds besides while it runs."""
        training, plan = self.setting.training, self.setting.plan
        held, bare = self._held(layout), _bare(self.setting.rank)
        states = sum(change.size for change in resident(bare, training, plan, held, 0, 0))
        if begin_in_step(training, plan):
            states += held.elements * training.gradient_bytes  # all are there as the last microbatch begins
        live = Liveness(layout, training.conventions)
        found = moments(live, Recompute.NONE).memory()
        (operator,) = layout.block.operators
        first = [name for name in live.saved(operator) if _first_to_save(block, name) == operator.name]
        saved = sum(dict(live.kept(operator, name) for name in first).values())
        saved += sum(live.unnamed(operator).values())
        besides = found.kept - saved + max(found.forward, found.backward)
        return states + saved, besides + self._around(layout)

    def _around(self, layout: BlockLayout) -> int:
        """Return the bytes of what an operator reads and makes, which others hold for it or wait for."""
        (operator,) = layout.block.operators
        names = dict.fromkeys((*operator.inputs, *operator.outputs))
        return sum(layout.tensor_bytes(name, layout.produced[name].complete) for name in names)

    @property
    def resident(self) -> int:
        """Bytes on a device whatever is chosen: what the runtime reserves, and buffers."""
        (buffers,) = self.setting.costs.buffers(self.setting.plan)
        return int(self.setting.rank.accelerator.reserved) + buffers


def _first_to_save(block: Block, name: str) -> str:
    return next(operator.name for operator in block.operators if name in operator.saved)


def _bare(rank: Rank) -> Accelerator:
    """Return the accelerator of a rank without what its runtime reserves, which no choice changes."""
    return replace(rank.accelerator, reserved=0.0)


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
        made, reads = {have: i for i, have in enumerate(dict.fromkeys(haves))}, dict.fromkeys(readers)
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


Allowed = Callable[[str, tuple[OperatorSharding, ...]], tuple[OperatorSharding, ...]]
"""Which of the legal shardings of an operator, named by the occurrence of its block, may be chosen."""


class Node(NamedTuple):
    """An operator of one occurrence of a block."""

    occurrence: str
    block: Block
    operator: Operator

    @property
    def name(self) -> str:
        """The name by which a plan means this operator alone."""
        return f"{self.occurrence}.{self.operator.name}"


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """The costs of every choice, and what each means.

    Parameters
    ----------
    choices
        For every node its shardings, by the block's name.
    resident
        Bytes on a device whatever is chosen: what the framework keeps.
    """

    problem: Problem
    degrees: Degrees
    microbatch: int
    nodes: tuple[Node, ...]
    choices: tuple[tuple[OperatorSharding, ...], ...]
    graph: CostGraph
    resident: int

    __repr__ = brief()

    @property
    def limit(self) -> int:
        """Bytes that choices may take on a device."""
        return int(self.problem.usable(self.problem.cluster.accelerator)) - self.resident

    @cached_property
    def tied(self) -> tuple[tuple[tuple[int, str], tuple[int, str]], ...]:
        """The nodes that use one parameter, each with its name there."""

        def user(end: tuple[str, str]) -> tuple[int, str]:
            users = (n for n, o in enumerate(self.nodes) if o.occurrence == end[0] and end[1] in o.operator.parameters)
            return next(users), end[1]

        return tuple((user(first), user(second)) for first, second in self.problem.graph.tied)

    def keeps(self, node: int, choice: int, parameter: str) -> dict[str, tuple[str, ...]]:
        """Return how a choice keeps a parameter: the axes of each dim."""
        return dict(self.choices[node][choice].of_kept(self.nodes[node].block.tensor[parameter]).cuts)

    def only(self, allowed: Mapping[int, Sequence[int]]) -> "OperatorCosts":
        """Return the costs where some nodes have only some of their choices."""
        graph = self.graph
        index = [np.array(allowed.get(n, range(size)), np.int64) for n, size in enumerate(graph.sizes)]

        def some(columns: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
            return tuple(each[index[n]] if n in allowed else each for n, each in enumerate(columns))

        edges = (
            edge._replace(times=edge.times[np.ix_(index[edge.source], index[edge.target])])
            if edge.source in allowed or edge.target in allowed
            else edge
            for edge in graph.edges
        )
        copies = tuple(-1 if n in allowed else number for n, number in enumerate(graph.copies))
        columns = some(graph.times), some(graph.kept), some(graph.transient)
        choices = tuple(tuple(own[i] for i in index[n]) for n, own in enumerate(self.choices))
        return replace(self, choices=choices, graph=CostGraph(*columns, tuple(edges), copies))

    def plan(self, chosen: Iterable[int]) -> Plan:
        """Return the plan of one choice a node."""
        found = {
            node.name: replace(options[choice], operator=node.name)
            for node, options, choice in zip(self.nodes, self.choices, chosen, strict=True)
        }
        return operator_plan(self.problem, self.degrees, self.microbatch, shared(self.problem, found))


def operator_costs(
    problem: Problem,
    degrees: Degrees,
    microbatch: int,
    *,
    costs: StageCosts | None = None,
    allowed: Allowed | None = None,
) -> OperatorCosts:
    """Return the costs of all choices of all operators on the operator axes of a mesh that has no others."""
    plan = operator_plan(problem, degrees, microbatch)
    return _Table(Setting(problem, plan, costs or StageCosts(problem)), degrees, allowed).costs()


@dataclass(frozen=True, eq=False)
class _Table:
    """The costs of all choices while they are taken."""

    setting: Setting
    degrees: Degrees
    allowed: Allowed | None
    _choices: dict[str, tuple[OperatorSharding, ...]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every operator of every occurrence, in execution order."""
        graph = self.setting.problem.graph
        return tuple(Node(name, block, operator) for name, block in graph.occurrences for operator in block.operators)

    def costs(self) -> OperatorCosts:
        """Return all costs."""
        options, own = tuple(map(self._options, self.nodes)), NodeCosts(self.setting)
        columns = [own.of(node.block, node.operator, each) for node, each in zip(self.nodes, options, strict=True)]
        times, kept, transient = ([column[i] for column in columns] for i in range(3))
        times[0] = times[0] + own.once
        edges = tuple(EdgeCosts(self.setting).all(options))
        graph = CostGraph(tuple(times), tuple(kept), tuple(transient), edges, self._copies(options))
        problem, microbatch = self.setting.problem, self.setting.plan.sequences
        return OperatorCosts(problem, self.degrees, microbatch, self.nodes, options, graph, own.resident)

    def _options(self, node: Node) -> tuple[OperatorSharding, ...]:
        check_deadline()
        key = f"{node.block.name}.{node.operator.name}"
        if key not in self._choices:
            sequences = self.setting.plan.sequences
            self._choices[key] = choices(node.block.name, node.block, node.operator, self.degrees, sequences)
        legal = self._choices[key]
        return legal if self.allowed is None else self.allowed(node.name, legal)

    def _copies(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> tuple[int, ...]:
        classes: dict[tuple[str, str, tuple[OperatorSharding, ...]], int] = {}
        keys = ((node.block.name, node.operator.name, own) for node, own in zip(self.nodes, options, strict=True))
        numbers = [classes.setdefault(key, len(classes)) for key in keys]
        return tuple(n if node.block.repeat > 1 else -1 for node, n in zip(self.nodes, numbers, strict=True))
