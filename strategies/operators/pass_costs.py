"""Ticks and bytes of every choice of every operator, and ticks of every redistribution, for one microbatch.

All costs come from the lowering of whole plans: ticks are those of compute and of the collectives that an operator has
itself, or of the collectives between two operators, of the tensor forward and of its gradient backward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import Block, Operator
from meshwise.strategies.lowering.costs.keys import RunKey
from meshwise.strategies.lowering.costs.layout import BlockLayout, BlockTraining, adds_before_cut
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.operator import (
    OperatorSegments,
    build_arrivals,
    build_operator_segments,
    build_returns,
    gathers_in_backward,
    is_tensor_gather,
)
from meshwise.strategies.lowering.costs.optimizer import (
    NORM_SUM,
    Parameters,
    allocates_gradients,
)
from meshwise.strategies.lowering.costs.recompute import compute_moments
from meshwise.strategies.lowering.costs.rewrites import (
    is_cut_product,
    is_gradient_sum,
    with_accumulation,
)
from meshwise.strategies.lowering.costs.segments import BlockSegments, Kernels, Segment
from meshwise.strategies.lowering.costs.weights import factored_elements, quantised_elements, replicated_elements
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.residents import count_residents
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import RankClock, chain_ticks, norm_ticks, optimizer_ticks
from meshwise.strategies.operators.cost_graph import IntArray
from meshwise.strategies.plan.mesh import NORM, OPERATOR_AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec


@dataclass(frozen=True, eq=False)
class Setting:
    """The plan whose operators are to be cut, here all whole, with the stage costs of the lowering of whole plans.

    ``profile`` is the rank that is priced, rank 0 where none is given.
    """

    problem: Problem
    plan: Plan
    costs: StageCosts
    profile: RankProfile | None = None

    @property
    def training(self) -> Training:
        """The training of the problem."""
        return self.problem.training

    @cached_property
    def machine(self) -> Machine:
        """The devices, with the process groups of the plan's mesh."""
        return self.costs.machine(self.plan)

    @cached_property
    def rank(self) -> RankProfile:
        """The rank that is priced: by default rank 0, which stands for all where all ranks do the same."""
        return self.machine.rank(0) if self.profile is None else self.profile

    @cached_property
    def _operators(self) -> dict[tuple[str, str], tuple[Block, Operator]]:
        blocks = self.problem.graph.blocks
        return {(block.name, operator.name): (block, operator) for block in blocks for operator in block.operators}

    def find_operator(self, block: str, name: str) -> tuple[Block, Operator]:
        """Return a block and an operator of it by their names."""
        return self._operators[block, name]

    @cached_property
    def run(self) -> RunKey:
        """How the passes of the plan run."""
        return self.costs.find_keys(self.plan).run

    @cached_property
    def clock(self) -> RankClock:
        """The ticks of segments on that rank."""
        return self.costs.clock(self.rank)

    def build_layout(self, block: Block, shardings: Mapping[str, OperatorSharding] | None = None) -> BlockLayout:
        """Return the layout of a block whose operators are cut so; whole where nothing is said."""
        training = BlockTraining.of(self.training)
        return BlockLayout(block, self.plan.mesh, shardings or {}, self.plan.sequences, training)

    def build_operator_layout(self, block: Block, operator: Operator, sharding: OperatorSharding) -> BlockLayout:
        """Return the layout of a block of one operator, whose inputs already have the layouts that it reads."""
        operator_block = replace(
            block, operators=(operator,), inputs=operator.inputs, outputs=operator.outputs, repeat=1
        )
        return self.build_layout(operator_block, {f"{block.name}.{operator.name}": sharding})

    def build_segments(self, layout: BlockLayout) -> OperatorSegments:
        """Return the segments, compute and collectives, of the one operator of a layout."""
        return build_operator_segments(layout, layout.block.operators[0])


class OperatorPasses(NamedTuple):
    """Ticks and bytes of the choices of an operator, each of shape ``(choices,)``.

    Parameters
    ----------
    passes
        Ticks of forward and backward of a microbatch, with the collectives that the operator has itself.
    forward
        Those of forward.
    kernels, forward_kernels
        Those in which the device computes, in all and in forward.
    ending
        Ticks at the end of a step: the sum of gradients along operator axes, and the update.
    states
        Bytes of parameters, gradients and optimizer states.
    transient
        Bytes that are there only while the operator runs.
    saved
        Bytes that backward reads, by tensor; under the empty name those without one.
    """

    passes: IntArray
    forward: IntArray
    kernels: IntArray
    forward_kernels: IntArray
    ending: IntArray
    states: IntArray
    transient: IntArray
    saved: dict[str, IntArray]


class _ChoiceCosts(NamedTuple):
    """The fields of `OperatorPasses` for one choice."""

    passes: int
    forward: int
    kernels: int
    forward_kernels: int
    ending: int
    states: int
    transient: int
    saved: dict[str, int]


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """The costs of the choices of single operators, cached: copies of a block cost the same."""

    setting: Setting

    @memoise
    def compute_passes(self, block_name: str, name: str, options: tuple[OperatorSharding, ...]) -> OperatorPasses:
        """Return the ticks and bytes of each choice of an operator of a block."""
        block, operator = self.setting.find_operator(block_name, name)
        choices = [self._compute_choice(block, operator, sharding) for sharding in options]
        passes, forward, kernels, forward_kernels, ending, states, transient = np.array(
            [choice[:-1] for choice in choices], dtype=np.int64
        ).T.copy()
        names = dict.fromkeys(tensor for choice in choices for tensor in choice.saved)
        saved = {tensor: np.array([choice.saved.get(tensor, 0) for choice in choices], np.int64) for tensor in names}
        return OperatorPasses(passes, forward, kernels, forward_kernels, ending, states, transient, saved)

    def _compute_choice(self, block: Block, operator: Operator, sharding: OperatorSharding) -> _ChoiceCosts:
        check_deadline()
        layout, clock = self.setting.build_operator_layout(block, operator, sharding), self.setting.clock
        segments = self.setting.build_segments(layout)
        forward = (*segments.gathers, segments.forward)
        backward = self._add_accumulation(layout, segments.backward)
        chain = (*forward, *segments.before_backward, *backward, *segments.after_backward)
        return _ChoiceCosts(
            chain_ticks(clock.time_segments(chain)),
            chain_ticks(clock.time_segments(forward)),
            chain_ticks(clock.time_segments((segments.forward, segments.backward))),
            chain_ticks(clock.time_segments((segments.forward,))),
            self._count_ending_ticks(layout),
            *self._count_bytes(layout, block),
        )

    def _add_accumulation(self, layout: BlockLayout, backward: Segment) -> tuple[Segment, ...]:
        """Return the backward of an operator, and the addition to its gradients where that is a segment of its own."""
        if not self.setting.run.adds_gradients:
            return (backward,)
        return with_accumulation(layout, BlockSegments((), (backward,)), self.setting.training.gradient_bytes).backward

    def _build_parameters(self, layout: BlockLayout) -> Parameters:
        # the second user of a tied parameter has it from the first: it is updated and kept once
        second_users = {user for _, user in self.setting.problem.graph.tied}
        parameters = [
            parameter
            for parameter in layout.block.parameters
            if (layout.block.name, parameter.name) not in second_users
        ]
        return Parameters(
            sum(map(layout.parameter_share, parameters)),
            len(layout.block.parameters),
            factored_elements(layout, parameters),
            quantised_elements(layout),
        )

    def _count_ending_ticks(self, layout: BlockLayout) -> int:
        """Return the ticks of an operator's part of the end of a step: the sum of its gradients, and its update."""
        # what an update of no parameters takes is in `fixed_ticks`, once for the whole step
        ticks = self._count_update_ticks(self._build_parameters(layout)) - self._count_update_ticks(Parameters(0, 0))
        parts = replicated_elements(layout, self.setting.training.conventions)
        for axis, elements in zip(OPERATOR_AXES, parts, strict=True):
            if elements:  # there is no rate where all weights are frozen
                rate = self._gradient_rates.get(axis, 0.0)
                ticks += round(elements * self.setting.training.gradient_bytes * rate)
        return ticks

    def _count_update_ticks(self, parameters: Parameters) -> int:
        """Return the ticks in which a rank updates parameters, and computes the norm of gradients that are clipped."""
        arguments = self.setting.rank.accelerator, self.setting.training, self.setting.plan, parameters
        return optimizer_ticks(*arguments) + (norm_ticks(*arguments) if self.setting.training.gradient_clipping else 0)

    @cached_property
    def fixed_ticks(self) -> int:
        """The ticks of the end of a step that do not depend on any choice."""
        machine = self.setting.machine
        norm = machine.communicator(NORM, 0).ticks(*NORM_SUM) if NORM in machine.table.tables else 0
        return self._count_update_ticks(Parameters(0, 0)) + norm

    @cached_property
    def _gradient_rates(self) -> dict[str, float]:
        """Ticks to sum a byte of gradients along each axis, at the rate of an all-reduce of all parameters together."""
        size = float(self.setting.problem.graph.num_parameters * self.setting.training.gradient_bytes)
        if not size:
            return {}
        groups = self.setting.rank.groups
        sums = ((axis, groups[axis].ticks(Collective.ALL_REDUCE, size)) for axis in OPERATOR_AXES if axis in groups)
        return {axis: ticks / size for axis, ticks in sums}

    @memoise
    def count_states(self, block_name: str, name: str, options: tuple[OperatorSharding, ...]) -> IntArray:
        """Return the bytes of the states of each choice of an operator of a block."""
        block, operator = self.setting.find_operator(block_name, name)
        if not operator.parameters:
            return np.zeros(len(options), np.int64)
        layouts = (self.setting.build_operator_layout(block, operator, sharding) for sharding in options)
        return np.array([self._count_layout_states(layout) for layout in layouts], np.int64)

    def _count_layout_states(self, layout: BlockLayout) -> int:
        training, plan = self.setting.training, self.setting.plan
        parameters = self._build_parameters(layout)
        states = count_residents(training, plan, parameters).device_bytes
        if allocates_gradients(training, plan):
            states += parameters.elements * training.gradient_bytes  # all of them exist when the last microbatch begins
        return states

    def _count_bytes(self, layout: BlockLayout, block: Block) -> tuple[int, int, dict[str, int]]:
        """Return the bytes of states, those of transient tensors and those that backward reads, of one operator."""
        training, states = self.setting.training, self._count_layout_states(layout)
        liveness = Liveness(layout, training.conventions)
        block_memory = compute_moments(liveness, Recompute.NONE).scale_memory()
        (operator,) = layout.block.operators
        first_savers: dict[str, str] = {}
        for saver in block.operators:
            first_savers = dict.fromkeys(saver.saved, saver.name) | first_savers
        saved_names = [name for name in liveness.list_saved(operator) if first_savers[name] == operator.name]
        saved = {name: liveness.describe_kept(operator, name)[1] for name in saved_names}
        saved[""] = sum(liveness.list_unnamed(operator).values())
        kept_bytes = sum(saved.values())
        transient_bytes = block_memory.kept_bytes - kept_bytes + max(block_memory.forward, block_memory.backward)
        return states, transient_bytes + self._count_tensor_bytes(layout), saved

    def _count_tensor_bytes(self, layout: BlockLayout) -> int:
        """Return the bytes of an operator's inputs and outputs, which exist while it runs whoever made them."""
        (operator,) = layout.block.operators
        names = dict.fromkeys((*operator.inputs, *operator.outputs))
        return sum(layout.tensor_bytes(name, layout.produced_layouts[name].without_partial) for name in names)

    @property
    def resident_bytes(self) -> int:
        """Bytes on a device that do not depend on any choice: the reserve of the runtime, and buffers."""
        (buffers,) = self.setting.costs.buffers(self.setting.plan)
        return int(self.setting.rank.accelerator.reserved) + buffers


class _Reading(NamedTuple):
    """How a choice reads a tensor: the layout that it asks for, and the layout in which it leaves the gradient.

    ``gather_cover`` are the ticks of its backward that can hide the repeated gather of a tensor gathered in forward,
    None where backward gathers nothing again. ``sum_cover`` are the ticks of its weight gradient that can hide the sum
    of the tensor's gradient; 0 where nothing is hidden.
    """

    input_spec: ShardingSpec
    gradient_spec: ShardingSpec
    gather_cover: int | None
    sum_cover: int


class Redistributions(NamedTuple):
    """The ticks of a microbatch's redistributions between two nodes, of shape (choices of source, choices of target).

    ``passes`` are those of forward and backward together, ``forward`` those of forward.
    """

    source: int
    target: int
    passes: IntArray
    forward: IntArray


@dataclass(frozen=True, eq=False)
class EdgeCosts:
    """The costs of redistributions, cached by the operators and their choices."""

    setting: Setting

    @cached_property
    def _whole_layouts(self) -> dict[str, BlockLayout]:
        return {block.name: self.setting.build_layout(block) for block in self.setting.problem.graph.blocks}

    def list_redistributions(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> list[Redistributions]:
        """Return the redistributions between the operator that makes a tensor and every operator that reads it.

        ``options`` are the choices of every operator of every occurrence of a block, in execution order. A tensor that
        no operator makes, such as an input of the model, has the layout of its first reader.
        """
        result = []
        for read in self._list_reads():
            if read.source_node != read.node:
                passes, forward = self._find_read_ticks(read, options)
                if passes.any():
                    result.append(Redistributions(read.source_node, read.node, passes, forward))
        return result

    def count_first_reads(self, options: tuple[tuple[OperatorSharding, ...], ...]) -> dict[int, IntArray]:
        """Return, by node, the ticks in which it returns the gradients of tensors that no operator makes.

        Of shape ``(choices,)``: the sum of such a gradient, where the first reader makes each in parts.
        """
        result: dict[int, IntArray] = {}
        for read in self._list_reads():
            if read.source_node == read.node and self._whole_layouts[read.block.name].has_gradient(read.name):
                passes, _ = self._find_read_ticks(read, options)
                result[read.node] = result.get(read.node, 0) + passes.diagonal()
        return result

    def _list_reads(self) -> Iterator["_Read"]:
        """Yield every tensor that an operator reads, in execution order."""
        node = 0
        block_sources: list[tuple[int, _Source] | None] = []  # by position; a tensor that nobody has read has no layout
        for _, block in self.setting.problem.graph.occurrences:
            input_sources = zip(block.inputs, block_sources, strict=False)
            # the next block may have other names for a tensor's dims
            sources = {
                name: (entry[0], entry[1]._replace(dims=block.tensor[name].dims))
                for name, entry in input_sources
                if entry is not None
            }
            for operator in block.operators:
                for name in dict.fromkeys(operator.inputs):
                    if name not in sources:
                        dims = block.tensor[name].dims
                        sources[name] = node, _Source(block.name, operator.name, name, dims, is_reader=True)
                    yield _Read(*sources[name], node, block, operator.name, name)
                for name in operator.outputs:
                    sources[name] = node, _Source(block.name, operator.name, name, block.tensor[name].dims)
                node += 1
            block_sources = [sources.get(name) for name in block.outputs]

    def _find_read_ticks(self, read: "_Read", options: tuple[tuple[OperatorSharding, ...], ...]) -> IntArray:
        site = read.block.name, read.operator, read.name
        return self._find_ticks(read.source, options[read.source_node], *site, options[read.node])

    @memoise
    def _find_ticks(
        self,
        source: "_Source",
        source_options: tuple[OperatorSharding, ...],
        block_name: str,
        reader_name: str,
        name: str,
        reader_options: tuple[OperatorSharding, ...],
    ) -> IntArray:
        """Return the ticks of redistributing a tensor from every choice of a source to every choice of a reader.

        The first of two tables has those of forward and backward, the second those of forward.
        """
        source_operator = self.setting.find_operator(source.block, source.operator)
        source_specs = [source.build_spec(*source_operator, sharding) for sharding in source_options]
        block, reader = self.setting.find_operator(block_name, reader_name)
        readings = [self._build_reading(block, reader, name, sharding) for sharding in reader_options]
        return self._compute_ticks(block, reader, name, source_specs, readings)

    def _build_reading(self, block: Block, operator: Operator, name: str, sharding: OperatorSharding) -> _Reading:
        check_deadline()
        tensor = block.tensor[name]
        layout = self.setting.build_operator_layout(block, operator, sharding)
        segments = self.setting.build_segments(layout)
        keeps_gathered = self.setting.training.conventions.keeps_gathered
        regathers = gathers_in_backward(layout, operator, keeps_gathered=keeps_gathered)
        kernels = segments.backward.work
        assert isinstance(kernels, Kernels)
        ticks, weight_ticks = self.setting.clock.time_kernels(kernels)
        gather_cover, sum_cover = ticks if regathers else None, 0
        hides_sum = self.setting.run.hides_gradients and is_cut_product(layout, operator)
        if hides_sum and not segments.after_backward:  # only then the sum directly follows the product that hides it
            sum_cover = weight_ticks
        return _Reading(sharding.find_input_spec(tensor), sharding.find_gradient_spec(tensor), gather_cover, sum_cover)

    def _compute_ticks(
        self, block: Block, reader: Operator, name: str, source_specs: list[ShardingSpec], readings: list[_Reading]
    ) -> IntArray:
        """Return the ticks of redistributing a tensor from every layout of its source to every layout of its reader."""
        # many choices make or read a tensor in one layout: each distinct pair is priced once
        spec_index = {spec: i for i, spec in enumerate(dict.fromkeys(source_specs))}
        reading_index = {reading: i for i, reading in enumerate(dict.fromkeys(readings))}
        distinct_ticks = np.array(
            [
                [self._count_ticks(block, reader, name, spec, reading) for reading in reading_index]
                for spec in spec_index
            ],
            np.int64,
        )
        rows, columns = [spec_index[spec] for spec in source_specs], [reading_index[reading] for reading in readings]
        ticks: IntArray = np.moveaxis(distinct_ticks[np.ix_(rows, columns)], -1, 0)
        return ticks

    def _count_ticks(
        self, block: Block, reader: Operator, name: str, source_spec: ShardingSpec, reading: _Reading
    ) -> tuple[int, int]:
        """Return the ticks of forward and backward together, and those of forward."""
        layout, clock = self._whole_layouts[block.name], self.setting.clock
        adds_first = adds_before_cut(reader, source_spec, reading.input_spec)
        arrivals = build_arrivals(layout, name, source_spec, reading.input_spec, sums_first=adds_first)
        returns = build_returns(layout, name, reading.gradient_spec, source_spec)
        ticks, forward = (chain_ticks(clock.time_segments(moves)) for moves in ((*arrivals, *returns), arrivals))
        hides_sum = bool(returns) and is_gradient_sum(returns[0], (name,))
        if hides_sum:
            ticks -= min(clock.count_ticks(returns[0]), reading.sum_cover)
        if reading.gather_cover is None:
            return ticks, forward
        gather_ticks = sum(clock.count_ticks(segment) for segment in arrivals if is_tensor_gather(segment))
        return ticks + max(gather_ticks - reading.gather_cover + hides_sum * reading.sum_cover, 0), forward


class _Read(NamedTuple):
    """A tensor that the operator of a node reads, and the node that makes it; the node itself where none does."""

    source_node: int
    source: "_Source"
    node: int
    block: Block
    operator: str
    name: str


class _Source(NamedTuple):
    """The operator that makes a tensor, or with ``is_reader`` the first reader of one that no operator makes.

    ``block`` and ``operator`` are names, ``name`` is the tensor's name in that block, and ``dims`` are the names of its
    dims where it is read next.
    """

    block: str
    operator: str
    name: str
    dims: tuple[str, ...]
    is_reader: bool = False

    def build_spec(self, block: Block, operator: Operator, sharding: OperatorSharding) -> ShardingSpec:
        """Return the layout in which the source has the tensor if its operator is cut by ``sharding``."""
        tensor = block.tensor[self.name]
        spec = sharding.find_kept_spec(tensor) if self.is_reader else sharding.find_output_spec(operator, tensor)
        dim_names = dict(zip(tensor.dims, self.dims, strict=False))
        return ShardingSpec(tuple((dim_names[dim], axes) for dim, axes in spec.cuts if dim in dim_names), spec.partial)
