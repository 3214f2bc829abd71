"""What every choice of every operator costs, taken from the lowering of whole plans.

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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from simulator.accelerator import Accelerator
from simulator.collective_kinds import Collective
from simulator.operator_graph import Block, Operator, Tensor
from strategies.lowering.accumulation import with_accumulation
from strategies.lowering.clipping import SQUARES, norm_ticks
from strategies.lowering.liveness import Liveness
from strategies.lowering.machine import Rank
from strategies.lowering.memory import resident
from strategies.lowering.operator import (
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
from strategies.lowering.optimizer import optimizer_ticks
from strategies.lowering.parameters import Parameters
from strategies.lowering.placed import NORM
from strategies.lowering.recompute import moments
from strategies.lowering.replicated import replicated_elements
from strategies.lowering.stage import StageCosts
from strategies.lowering.step import Step, chain_ticks
from strategies.lowering.tensor_overlap import is_cut_product, sums, weight_gradient_ticks
from strategies.lowering.weights import factored_elements, quantised_elements
from strategies.mesh import OPERATOR_AXES
from strategies.operators.choices import choices
from strategies.operators.complete import Degrees, operator_plan, shared
from strategies.operators.cost_graph import CostGraph, Edge, IntArray
from strategies.plan import Plan, Recompute
from strategies.problem import Problem
from strategies.sharding import OperatorSharding, ShardingSpec

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

    @property
    def limit(self) -> int:
        """Bytes that choices may take on a device."""
        return int(self.problem.cluster.accelerator.memory) - self.resident

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
    costs = costs or StageCosts(problem)
    return _Table(problem, plan, degrees, costs, allowed).costs()


class _Reader(NamedTuple):
    """How a choice reads a tensor: what it asks for, and what it leaves of the gradient.

    ``again`` are the ticks of its backward beside which it gathers again what it gathers forward, and ``hidden`` those
    of the gradient of its weight, beside which the gradient of what it reads is summed; 0 where it does not.
    """

    wanted: ShardingSpec
    gradient: ShardingSpec
    again: int | None
    hidden: int


class _Table:
    def __init__(
        self, problem: Problem, plan: Plan, degrees: Degrees, costs: StageCosts, allowed: Allowed | None
    ) -> None:
        self.problem, self.plan, self.degrees, self.stage_costs, self.allowed = problem, plan, degrees, costs, allowed
        self.training = problem.training
        self.machine = costs.machine(plan)
        self.rank: Rank = self.machine.rank(0)
        self._choices: dict[str, tuple[OperatorSharding, ...]] = {}
        self._columns: dict[tuple[str, tuple[OperatorSharding, ...]], tuple[IntArray, IntArray, IntArray]] = {}
        self._edges: dict[tuple[object, ...], IntArray] = {}
        self._sizes = {block.name: self._layout(block) for block in problem.graph.blocks}

    @property
    def microbatch(self) -> int:
        return self.plan.sequences

    def _layout(self, block: Block, shardings: Mapping[str, OperatorSharding] | None = None) -> BlockLayout:
        training = self.training
        summed = training.gradient_bytes if training.conventions.fused_gradients else 0
        return BlockLayout(
            block,
            self.plan.mesh,
            shardings or {},
            self.microbatch,
            training.precision,
            gradient_bytes=summed,
            frozen=training.frozen,
        )

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every operator of every occurrence, in execution order."""
        graph = self.problem.graph
        return tuple(Node(name, block, operator) for name, block in graph.occurrences for operator in block.operators)

    def costs(self) -> OperatorCosts:
        """Return all costs."""
        options = tuple(map(self._options, self.nodes))
        columns = [self._of_node(node, own) for node, own in zip(self.nodes, options, strict=True)]
        times, kept, transient = ([each[of] for each in columns] for of in range(3))
        times[0] = times[0] + self._once
        columns_of = tuple(times), tuple(kept), tuple(transient)
        graph = CostGraph(*columns_of, tuple(self._all_edges(options)), self._copies(options))
        return OperatorCosts(self.problem, self.degrees, self.microbatch, self.nodes, options, graph, self._resident())

    def _options(self, node: Node) -> tuple[OperatorSharding, ...]:
        key = f"{node.block.name}.{node.operator.name}"
        if key not in self._choices:
            found = choices(node.block.name, node.block, node.operator, self.degrees, self.microbatch)
            self._choices[key] = found
        legal = self._choices[key]
        return legal if self.allowed is None else self.allowed(node.name, legal)

    def _copies(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> tuple[int, ...]:
        classes: dict[tuple[str, str, tuple[OperatorSharding, ...]], int] = {}
        keys = ((node.block.name, node.operator.name, own) for node, own in zip(self.nodes, options, strict=True))
        numbers = [classes.setdefault(key, len(classes)) for key in keys]
        return tuple(n if node.block.repeat > 1 else -1 for node, n in zip(self.nodes, numbers, strict=True))

    # nodes

    def _of_node(self, node: Node, options: tuple[OperatorSharding, ...]) -> tuple[IntArray, IntArray, IntArray]:
        """Return the ticks, the bytes kept and the bytes held while it runs, of each choice."""
        key = (f"{node.block.name}.{node.operator.name}", options)
        if key not in self._columns:
            rows = [self._of_choice(node.block, node.operator, each) for each in options]
            ticks, kept, transient = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
            self._columns[key] = ticks, kept, transient
        return self._columns[key]

    def _of_choice(self, block: Block, operator: Operator, sharding: OperatorSharding) -> tuple[int, int, int]:
        layout = self._alone(block, operator, sharding)
        steps = self._steps(layout)
        backward = self._accumulated(layout, steps.backward)
        chain = (*steps.gathers, steps.forward, *steps.before, *backward, *steps.after)
        ticks = chain_ticks(chain) * self.plan.num_microbatches + self._ending(layout)
        return ticks, *self._bytes(layout, block)

    def _accumulated(self, layout: BlockLayout, backward: Step) -> tuple[Step, ...]:
        """Return the backward of an operator, and the addition of its gradients where that is one of its own."""
        if not self.stage_costs.blocks.adds_gradients(self.plan):
            return (backward,)
        steps = BlockSteps((), (backward,))
        return with_accumulation(layout, self.rank.accelerator, steps, self.training.gradient_bytes).backward

    def _alone(self, block: Block, operator: Operator, sharding: OperatorSharding) -> BlockLayout:
        """Return the layout of an operator whose inputs come as it reads them."""
        alone = replace(
            block, operators=(operator,), inputs=operator.inputs, outputs=operator.outputs, repeat=1, layer=block.layer
        )
        return self._layout(alone, {f"{block.name}.{operator.name}": sharding})

    def _steps(self, layout: BlockLayout) -> OperatorSteps:
        return operator_steps(layout, self.rank.accelerator, self.rank.groups, layout.block.operators[0])

    def _held(self, layout: BlockLayout) -> Parameters:
        training, seconds = self.training, {second for _, second in self.problem.graph.tied}
        once = [each for each in layout.block.parameters if (layout.block.name, each.name) not in seconds]
        return Parameters(
            sum(map(layout.parameter_share, once)),
            len(layout.block.parameters),
            factored_elements(layout, once) if training.factored_bytes else 0,
            quantised_elements(layout) if training.quantised_bytes else 0,
        )

    def _ending(self, layout: BlockLayout) -> int:
        """Return the ticks of an operator's part of what ends a step: its gradients are summed, and its update."""
        ticks = self._update(self._held(layout)) - self._update(Parameters(0, 0))
        parts = replicated_elements(layout, self.training.conventions)
        for axis, elements in zip(OPERATOR_AXES, parts, strict=True):
            ticks += round(elements * self.training.gradient_bytes * self._rates.get(axis, 0.0))
        return ticks

    def _update(self, held: Parameters) -> int:
        """Return the ticks in which a rank updates parameters, and reads their gradients where they are clipped."""
        ticks = optimizer_ticks(self.rank.accelerator, self.training, self.plan, held)
        if self.training.gradient_clipping:
            ticks += norm_ticks(self.rank.accelerator, self.training, self.plan, held)
        return ticks

    @cached_property
    def _once(self) -> int:
        """Ticks of the end of a step that no choice changes."""
        norm = self.machine.communicator(NORM, 0).ticks(*SQUARES) if NORM in self.machine.table.tables else 0
        return self._update(Parameters(0, 0)) + norm

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Ticks of a byte of gradients that ranks along each axis sum, at the rate of all parameters together."""
        size = float(self.problem.graph.num_parameters * self.training.gradient_bytes)
        groups = self.rank.groups
        sums = ((axis, groups[axis].ticks(Collective.ALL_REDUCE, size)) for axis in OPERATOR_AXES if axis in groups)
        return {axis: ticks / size for axis, ticks in sums}

    def _bytes(self, layout: BlockLayout, block: Block) -> tuple[int, int]:
        """Return the bytes that an operator keeps, and those it holds besides while it runs."""
        held = self._held(layout)
        states = sum(change.size for change in resident(_bare(self.rank), self.training, self.plan, held, 0, 0))
        live = Liveness(layout, self.training.conventions)
        found = moments(live, Recompute.NONE).memory()
        operator = layout.block.operators[0]
        first = [name for name in live.saved(operator) if _first_to_save(block, name) == operator.name]
        saved = sum(dict(live.kept(operator, name) for name in first).values())
        saved += sum(live.unnamed(operator).values())
        besides = found.kept - saved + max(found.forward, found.backward, 0)
        return states + saved, max(besides, 0) + self._around(layout)

    def _around(self, layout: BlockLayout) -> int:
        """Return the bytes of what an operator reads and makes, which others hold for it or wait for."""
        operator = layout.block.operators[0]
        names = dict.fromkeys((*operator.inputs, *operator.outputs))
        return sum(layout.tensor_bytes(name, layout.produced[name].complete) for name in names)

    def _resident(self) -> int:
        buffers = self.stage_costs.buffers(self.plan)[0]
        return int(self.rank.accelerator.reserved) + buffers

    # edges

    def _all_edges(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> list[Edge]:
        """Return the redistributions between every operator that makes a tensor and every one that reads it."""
        result = []
        crossing: list[_Source] = []
        number = 0
        for _, block in self.problem.graph.occurrences:
            sources = {name: each.into(block.tensor[name]) for name, each in zip(block.inputs, crossing, strict=False)}
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
            crossing = [sources[name] for name in block.outputs if name in sources]
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
        if key not in self._edges:
            haves = [source.layout(each) for each in options[source.node]]
            readers = [self._reads(block, reader, name, each) for each in own]
            self._edges[key] = self._times(block, reader, name, haves, readers)
        return self._edges[key]

    def _reads(self, block: Block, operator: Operator, name: str, sharding: OperatorSharding) -> _Reader:
        tensor = block.tensor[name]
        layout = self._alone(block, operator, sharding)
        steps = self._steps(layout)
        again = gathers_in_backward(layout, operator, keeps_gathered=self.training.conventions.keeps_gathered)
        backward = steps.backward.ticks if again else None
        hides = self.stage_costs.blocks.hides_gradients(self.plan) and is_cut_product(layout, operator)
        weights = weight_gradient_ticks(layout, self.rank.accelerator, operator, steps.backward) if hides else 0
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
        return found * self.plan.num_microbatches

    def _ticks(self, block: Block, reader: Operator, name: str, have: ShardingSpec, read: _Reader) -> int:
        layout, groups = self._sizes[block.name], self.rank.groups
        whole = adds_before_cut(reader, have, read.wanted)
        arriving = arriving_steps(layout, groups, name, have, read.wanted, whole=whole)
        returning = returning_steps(layout, groups, name, read.gradient, have)
        ticks = chain_ticks((*arriving, *returning))
        hides = bool(read.hidden and returning) and sums(returning[0], (name,))
        if hides:
            ticks -= min(returning[0].ticks, read.hidden)
        if read.again is None:
            return ticks
        gathered = max((step.ticks for step in arriving if gathers(step)), default=0)
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


def _first_to_save(block: Block, name: str) -> str:
    return next(operator.name for operator in block.operators if name in operator.saved)


def _bare(rank: Rank) -> Accelerator:
    """Return the accelerator of a rank without what its runtime reserves, which no choice changes."""
    return replace(rank.accelerator, reserved=0.0)
