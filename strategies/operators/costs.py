"""The cost graph of a problem: ticks and bytes of every sharding of every operator, and of every redistribution.

All costs come from the lowering of whole plans. The ticks of a choice are those of its compute and its own
collectives, forward and backward, for all microbatches, with its part of the end of a step. The ticks of a pair of
choices are the redistributions between them, of the tensor forward and of its gradient backward. Their sum is the step
time of the plan on an idle network, with two exceptions that are no sums:

* two readers that ask for a tensor in the same layout share one redistribution, but it is counted for each;
* gradients of all operators are summed along an axis together, once a step. They are counted at the rate of all
  parameters together, which leaves out part of the collective's latency where fewer parameters are summed.

The kept bytes of a choice are its parameters, gradients and optimizer states and the tensors that it saves for
backward; a tensor that several operators save is counted with the first of them.
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
    BlockTraining,
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
    """The plan whose operators are to be cut, here all whole, with the stage costs of the lowering of whole plans."""

    problem: Problem
    plan: Plan
    costs: StageCosts

    @property
    def training(self) -> Training:
        """The training of the problem."""
        return self.problem.training

    @cached_property
    def machine(self) -> Machine:
        """The devices, with the process groups of the plan's mesh."""
        return self.costs.machine(self.plan)

    @cached_property
    def rank(self) -> Rank:
        """Rank 0, which stands for all: all ranks of these plans do the same."""
        return self.machine.rank(0)

    def layout(self, block: Block, shardings: Mapping[str, OperatorSharding] | None = None) -> BlockLayout:
        """Return the layout of a block whose operators are cut so; whole where nothing is said."""
        training = BlockTraining.of(self.training)
        return BlockLayout(block, self.plan.mesh, shardings or {}, self.plan.sequences, training)

    def alone(self, block: Block, operator: Operator, sharding: OperatorSharding) -> BlockLayout:
        """Return the layout of a block of one operator, whose inputs already have the layouts that it reads."""
        alone = replace(
            block, operators=(operator,), inputs=operator.inputs, outputs=operator.outputs, repeat=1, layer=block.layer
        )
        return self.layout(alone, {f"{block.name}.{operator.name}": sharding})

    def steps(self, layout: BlockLayout) -> OperatorSteps:
        """Return the segments, compute and collectives, of the one operator of a layout."""
        return operator_steps(layout, self.rank.accelerator, self.rank.groups, layout.block.operators[0])


Columns = tuple[IntArray, IntArray, IntArray]
"""Ticks, kept bytes and transient bytes of each choice."""


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """The costs of the choices of single operators, cached: copies of a block cost the same."""

    setting: Setting
    _columns: dict[tuple[str, tuple[OperatorSharding, ...]], Columns] = field(default_factory=dict)

    def of(self, block: Block, operator: Operator, options: tuple[OperatorSharding, ...]) -> Columns:
        """Return the ticks, the kept bytes and the transient bytes of each choice of an operator."""
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
        """Return the backward of an operator, and the addition to its gradients where that is a segment of its own."""
        if not self.setting.costs.blocks.adds_gradients(self.setting.plan):
            return (backward,)
        accelerator, size = self.setting.rank.accelerator, self.setting.training.gradient_bytes
        return with_accumulation(layout, accelerator, BlockSteps((), (backward,)), size).backward

    def _held(self, layout: BlockLayout) -> Parameters:
        # the second user of a tied parameter has it from the first: it is updated and kept once
        seconds = {second for _, second in self.setting.problem.graph.tied}
        once = [each for each in layout.block.parameters if (layout.block.name, each.name) not in seconds]
        return Parameters(
            sum(map(layout.parameter_share, once)),
            len(layout.block.parameters),
            factored_elements(layout, once),
            quantised_elements(layout),
        )

    def _ending(self, layout: BlockLayout) -> int:
        """Return the ticks of an operator's part of the end of a step: the sum of its gradients, and its update."""
        # what an update of no parameters takes is in `fixed_ticks`, once for the whole step
        ticks = self._update(self._held(layout)) - self._update(Parameters(0, 0))
        parts = replicated_elements(layout, self.setting.training.conventions)
        for axis, elements in zip(OPERATOR_AXES, parts, strict=True):
            if elements:
                ticks += round(elements * self.setting.training.gradient_bytes * self._rates[axis])
        return ticks

    def _update(self, held: Parameters) -> int:
        """Return the ticks in which a rank updates parameters, and computes the norm of gradients that are clipped."""
        step = self.setting.rank.accelerator, self.setting.training, self.setting.plan, held
        return optimizer_ticks(*step) + (norm_ticks(*step) if self.setting.training.gradient_clipping else 0)

    @cached_property
    def once(self) -> int:
        """The ticks of the end of a step that do not depend on any choice."""
        machine = self.setting.machine
        norm = machine.communicator(NORM, 0).ticks(*SQUARES) if NORM in machine.table.tables else 0
        return self._update(Parameters(0, 0)) + norm

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Ticks to sum a byte of gradients along each axis, at the rate of an all-reduce of all parameters together."""
        size = float(self.setting.problem.graph.num_parameters * self.setting.training.gradient_bytes)
        groups = self.setting.rank.groups
        sums = ((axis, groups[axis].ticks(Collective.ALL_REDUCE, size)) for axis in OPERATOR_AXES if axis in groups)
        return {axis: ticks / size for axis, ticks in sums}

    def _bytes(self, layout: BlockLayout, block: Block) -> tuple[int, int]:
        """Return the kept bytes and the transient bytes of the one operator of a layout."""
        training, plan = self.setting.training, self.setting.plan
        held, bare = self._held(layout), _bare(self.setting.rank)
        states = sum(change.size for change in resident(bare, training, plan, held, 0, 0))
        if begin_in_step(training, plan):
            states += held.elements * training.gradient_bytes  # all of them exist when the last microbatch begins
        live = Liveness(layout, training.conventions)
        found = moments(live, Recompute.NONE).memory()
        (operator,) = layout.block.operators
        first = [name for name in live.saved(operator) if _first_to_save(block, name) == operator.name]
        saved = sum(dict(live.kept(operator, name) for name in first).values())
        saved += sum(live.unnamed(operator).values())
        besides = found.kept - saved + max(found.forward, found.backward)
        return states + saved, besides + self._around(layout)

    def _around(self, layout: BlockLayout) -> int:
        """Return the bytes of an operator's inputs and outputs, which exist while it runs whoever made them."""
        (operator,) = layout.block.operators
        names = dict.fromkeys((*operator.inputs, *operator.outputs))
        return sum(layout.tensor_bytes(name, layout.produced[name].complete) for name in names)

    @property
    def resident(self) -> int:
        """Bytes on a device that do not depend on any choice: the reserve of the runtime, and buffers."""
        (buffers,) = self.setting.costs.buffers(self.setting.plan)
        return int(self.setting.rank.accelerator.reserved) + buffers


def _first_to_save(block: Block, name: str) -> str:
    """Return the name of the first operator of a block that saves a tensor for backward."""
    return next(operator.name for operator in block.operators if name in operator.saved)


def _bare(rank: Rank) -> Accelerator:
    """Return the accelerator of a rank without the reserve of its runtime, which no choice changes."""
    return replace(rank.accelerator, reserved=0.0)


class _Reader(NamedTuple):
    """How a choice reads a tensor: the layout that it asks for, and the layout in which it leaves the gradient.

    ``gather_cover`` are the ticks of its backward that can hide the repeated gather of a tensor gathered in forward,
    None where backward gathers nothing again. ``sum_cover`` are the ticks of its weight gradient that can hide the sum
    of the tensor's gradient; 0 where nothing is hidden.
    """

    wanted: ShardingSpec
    gradient: ShardingSpec
    again: int | None
    hidden: int


@dataclass(frozen=True, eq=False)
class EdgeCosts:
    """The costs of redistributions, cached by the operators and their choices."""

    setting: Setting
    _known: dict[tuple[object, ...], IntArray] = field(default_factory=dict)

    @cached_property
    def _whole(self) -> dict[str, BlockLayout]:
        return {block.name: self.setting.layout(block) for block in self.setting.problem.graph.blocks}

    def list_edges(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> list[Edge]:
        """Return the redistributions between the operator that makes a tensor and every operator that reads it.

        ``options`` are the choices of every operator of every occurrence of a block, in execution order. A tensor that
        no operator makes, such as an input of the model, has the layout of its first reader.
        """
        result = []
        crossing: list[_Source | None] = []  # by position; a tensor that nobody has read yet has no layout
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
        next_to = not steps.after  # only then the sum directly follows the product that hides it
        return _Reader(sharding.of_input(tensor), sharding.of_gradient(tensor), backward, weights if next_to else 0)

    def _times(
        self, block: Block, reader: Operator, name: str, haves: list[ShardingSpec], readers: list[_Reader]
    ) -> IntArray:
        """Return the ticks of redistributing a tensor from every layout of its source to every layout of its reader."""
        made, reads = {have: i for i, have in enumerate(dict.fromkeys(haves))}, dict.fromkeys(readers)
        of_read = {each: i for i, each in enumerate(reads)}
        # many choices make or read a tensor in one layout: each distinct pair is priced once
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
    """The operator that makes a tensor, or with ``is_reader`` the first reader of one that no operator makes.

    ``name`` is the tensor's name in the operator's block, ``dims`` are the names of its dims where it is read next.
    """

    node: int
    block: Block
    operator: Operator
    name: str
    dims: tuple[str, ...]
    read: bool = False

    def into(self, tensor: Tensor) -> "_Source":
        """Return the source as the next block sees it, where the tensor is ``tensor`` and its dims have other names."""
        return self._replace(dims=tensor.dims)

    def layout(self, sharding: OperatorSharding) -> ShardingSpec:
        """Return the layout in which the source has the tensor if its operator is cut by ``sharding``."""
        tensor = self.block.tensor[self.name]
        made = sharding.of_kept(tensor) if self.read else sharding.of_output(self.operator, tensor)
        renamed = dict(zip(tensor.dims, self.dims, strict=False))
        return ShardingSpec(tuple((renamed[dim], axes) for dim, axes in made.cuts if dim in renamed), made.partial)


Allowed = Callable[[str, tuple[OperatorSharding, ...]], tuple[OperatorSharding, ...]]
"""Returns those of an operator's legal shardings that may be chosen; the name is that of ``Node.name``."""


class Node(NamedTuple):
    """An operator of one occurrence of a block."""

    occurrence: str
    block: Block
    operator: Operator

    @property
    def name(self) -> str:
        """The name by which a plan names this occurrence of the operator alone."""
        return f"{self.occurrence}.{self.operator.name}"


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """The cost graph of a problem on a mesh, with the sharding that each choice stands for.

    Parameters
    ----------
    microbatch
        Sequences of a microbatch.
    choices
        For every node its shardings, named by the block.
    resident_bytes
        Bytes on a device that do not depend on any choice: what the framework keeps.
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
        """Bytes on a device that are left for choices."""
        return int(self.problem.usable(self.problem.cluster.accelerator)) - self.resident

    @cached_property
    def tied(self) -> tuple[tuple[tuple[int, str], tuple[int, str]], ...]:
        """Pairs of nodes that use one tied parameter, each with the parameter's name there."""

        def user(end: tuple[str, str]) -> tuple[int, str]:
            users = (n for n, o in enumerate(self.nodes) if o.occurrence == end[0] and end[1] in o.operator.parameters)
            return next(users), end[1]

        return tuple((user(first), user(second)) for first, second in self.problem.graph.tied)

    def keeps(self, node: int, choice: int, parameter: str) -> dict[str, tuple[str, ...]]:
        """Return the axes that cut each dim of a parameter as a choice of a node keeps it."""
        return dict(self.choices[node][choice].of_kept(self.nodes[node].block.tensor[parameter]).cuts)

    def only(self, allowed: Mapping[int, Sequence[int]]) -> "OperatorCosts":
        """Return the costs where the nodes of ``allowed_choices`` have only those choices; they are no copies then."""
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
        """Return the plan in which every node has one of its choices, given by index."""
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
    """Return the costs of all choices of all operators, on a mesh of operator axes only.

    Parameters
    ----------
    degrees
        Ranks along each operator axis.
    microbatch
        Sequences of a microbatch on all ranks together.
    costs
        Stage costs already known for the problem.
    choice_filter
        Which legal shardings may be chosen; by default all.
    """
    plan = operator_plan(problem, degrees, microbatch)
    return _Table(Setting(problem, plan, costs or StageCosts(problem)), degrees, allowed).costs()


@dataclass(frozen=True, eq=False)
class _Table:
    """Builds the costs of all choices; copies of a block share their lists of shardings."""

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
        edges = tuple(EdgeCosts(self.setting).list_edges(options))
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
