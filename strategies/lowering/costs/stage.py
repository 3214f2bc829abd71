"""What pipeline stages do on their ranks: parameters, memory, and data at their ends."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwise.simulator.memo import memoise
from meshwise.strategies.lowering.costs.block import BlockWork, BlockWorks
from meshwise.strategies.lowering.costs.buffers import count_buffer_bytes
from meshwise.strategies.lowering.costs.keys import CutKey, KeyMaker, PassKey, PlanKeys, RunKey, StageKey
from meshwise.strategies.lowering.costs.kinds import Runs
from meshwise.strategies.lowering.costs.memory import BlockMemory, Boundary, StageMemory, stage_memory
from meshwise.strategies.lowering.costs.optimizer import Parameters, count_updated_parameters
from meshwise.strategies.lowering.costs.weights import factored_share, find_tied_parameters
from meshwise.strategies.plan.mesh import OPERATOR_AXES, TENSOR, Microbatch
from meshwise.strategies.plan.offloading import count_fraction, select_fraction
from meshwise.strategies.plan.plan import Plan, StateKey
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import LayerRecompute, StageRecompute

ParameterName = tuple[str, str]
"""A parameter by its block and its tensor."""


class StageWork(NamedTuple):
    """The blocks of one stage, in order, on one rank.

    Parameters
    ----------
    gradients
        For every block the elements whose gradients are whole when its backward ends: its parameters, but a tied
        parameter only with the block whose backward comes last of the two that use it.
    """

    blocks: tuple[BlockWork, ...]
    gradients: tuple[int, ...]


class StageRun(NamedTuple):
    """How one stage runs on its ranks: on what its work depends, for all plans and stages that share it.

    Parameters
    ----------
    blocks
        Its blocks in order, each with how often it occurs in a row.
    boundary
        The data at its ends that lie in buffers.
    deferred
        The places of blocks whose tied parameter gets its whole gradient in another block, each with its elements.
    num_offloaded
        The number of leading layers whose activations are offloaded.
    """

    run: RunKey
    blocks: Runs
    recompute: StageRecompute
    boundary: Boundary
    deferred: tuple[tuple[int, int], ...]
    num_offloaded: int


class PlanParameters(NamedTuple):
    """Parameters on one rank of each pipeline position, tied ones once."""

    positions: tuple[Parameters, ...]

    @property
    def elements(self) -> tuple[int, ...]:
        """Elements of parameters on one rank of each position."""
        return tuple(position_parameters.elements for position_parameters in self.positions)


class StageWorks:
    """The stages of one problem's plans, each part worked out once for all plans that share it."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.training = problem, problem.training
        self.keys, self.blocks = KeyMaker(problem), BlockWorks(problem)
        self._occurrences = dict(problem.graph.occurrences)
        self._has_buffers = problem.training.conventions.buffers_every_microbatch

    def find_keys(self, plan: Plan) -> PlanKeys:
        """Return the keys of a plan."""
        return self.keys.find_keys(plan)

    # parameters

    def plan_parameters(self, plan: Plan) -> PlanParameters:
        """Return the parameters on a rank of each pipeline position."""
        return self.count_parameters(self.find_keys(plan).stages)

    @memoise
    def count_parameters(self, stages: StageKey) -> PlanParameters:
        """Return the parameters on a rank of each pipeline position."""
        cut, names = stages.cut, stages.kinds.blocks
        zeros = dict.fromkeys(names, 0)
        tensors = {name: len(self.blocks.block(cut, name).parameters) for name in names}
        elements = {name: self.blocks.count_parameters(cut, name) for name in names}
        experts = {name: self.blocks.count_expert_parameters(cut, name) for name in names}
        replicated_counts = {name: self.blocks.count_replicated(cut, name) for name in names}
        replicated = (
            {name: values[index] for name, values in replicated_counts.items()} for index in range(len(OPERATOR_AXES))
        )
        factored = factored_experts = quantised = zeros
        if self.training.factored_bytes:
            factored_pairs = {name: self.blocks.count_factored(cut, name) for name in names}
            factored, factored_experts = (
                {name: values[index] for name, values in factored_pairs.items()} for index in range(2)
            )
        if self.training.quantised_bytes:
            quantised = {name: self.blocks.count_quantised(cut, name) for name in names}
        columns = (elements, tensors, factored, quantised, experts, factored_experts, *replicated)
        counts = [_sum_by_position(stages, column) for column in columns]
        for position, second_use in self._list_shared_ties(stages):
            counts[0][position] -= self.parameter_share(cut, second_use)
            counts[2][position] -= self._factored_share(cut, second_use)
        return PlanParameters(tuple(_build_parameters(row) for row in zip(*counts, strict=True)))

    def list_tied_shares(self, plan: Plan) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of pipeline positions that keep one parameter, with its elements on a rank."""
        return self.list_tied_elements(self.find_keys(plan).stages)

    @memoise
    def list_tied_elements(self, stages: StageKey) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of pipeline positions that keep one parameter, with its elements on a rank."""
        return tuple(
            (*pair, self.parameter_share(stages.cut, parameter)) for pair, parameter in self._list_ties(stages)
        )

    def list_tied_positions(self, stages: StageKey) -> tuple[tuple[int, int], ...]:
        """Return the pairs of pipeline positions that keep one parameter."""
        return tuple(pair for pair, _ in self._list_ties(stages))

    @memoise
    def _list_ties(self, stages: StageKey) -> list[tuple[tuple[int, int], ParameterName]]:
        """Return pairs of pipeline positions that keep one parameter, with its block and name."""
        return find_tied_parameters(self.problem.graph, stages.stages, stages.positions)

    def _list_shared_ties(self, stages: StageKey) -> list[tuple[int, ParameterName]]:
        """Return the pipeline positions that have both uses of a tied parameter, and the second use."""
        position_of = _find_positions(stages)
        return [(position_of[first_use[0]], second_use) for first_use, second_use in self._list_inner_ties(stages)]

    @memoise
    def _list_inner_ties(self, stages: StageKey) -> list[tuple[ParameterName, ParameterName]]:
        """Return the tied parameters that one rank uses twice, each by its two uses."""
        if not self.problem.graph.tied:
            return []
        position_of = _find_positions(stages)
        return [
            (first_use, second_use)
            for first_use, second_use in self.problem.graph.tied
            if position_of.get(first_use[0]) == position_of.get(second_use[0])
        ]

    @memoise
    def _list_deferred_ties(self, stages: StageKey, stage: int) -> tuple[tuple[int, int], ...]:
        """Return the places of a stage's blocks whose tied parameter gets its whole gradient in another block.

        With each its elements. Backward ends with the first of the two blocks.
        """
        blocks = stages.stages[stage].blocks
        return tuple(
            (blocks.index(name), self.parameter_share(stages.cut, (name, tensor)))
            for _, (name, tensor) in self._list_inner_ties(stages)
            if name in blocks
        )

    @memoise
    def list_first_gradients(self, stages: StageKey, states: StateKey, stage: int) -> tuple[int, ...]:
        """Return the elements of every block, in the order of backward, whose gradients a first backward allocates.

        With ZeRO 2 and 3 a rank keeps its share. A tied table counts with the block whose backward comes first.
        """
        cut = stages.cut
        tied_elements = {
            first_use[0]: self.parameter_share(cut, first_use) for first_use, _ in self._list_inner_ties(stages)
        }
        counts = []
        for name in reversed(stages.stages[stage].blocks):
            kind = cut.kinds.kind_names[name]
            elements = self.blocks.count_parameters(cut, kind) - tied_elements.get(name, 0)
            expert_elements = self.blocks.count_expert_parameters(cut, kind)
            counts.append(count_updated_parameters(states, elements, expert_elements) if states.zero >= 2 else elements)
        return tuple(counts)

    def list_gradients(self, stages: StageKey, stage: int, zero_3: bool) -> list[tuple[int, int]]:
        """Return the elements of every block whose gradients are whole when its backward ends, and those of experts."""
        cut, deferred = stages.cut, {} if zero_3 else dict(self._list_deferred_ties(stages, stage))
        kinds = [cut.kinds.kind_names[name] for name in stages.stages[stage].blocks]
        return [
            (
                self.blocks.count_parameters(cut, kind) - deferred.get(place, 0),
                self.blocks.count_expert_parameters(cut, kind),
            )
            for place, kind in enumerate(kinds)
        ]

    def _factored_share(self, cut: CutKey, parameter: ParameterName) -> int:
        """Return the rows, columns and vector elements of one rank's share of a parameter."""
        if not self.training.factored_bytes:
            return 0
        layout = self.blocks.layout(cut, cut.kinds.kind_names[parameter[0]], 1)
        owner = next(operator for operator in layout.block.operators if parameter[1] in operator.parameters)
        return factored_share(layout, owner, layout.block.tensor[parameter[1]])

    @memoise
    def parameter_share(self, cut: CutKey, parameter: ParameterName) -> int:
        """Return one rank's share in elements of a parameter."""
        layout = self.blocks.layout(cut, cut.kinds.kind_names[parameter[0]], 1)
        return layout.parameter_share(layout.block.tensor[parameter[1]])

    # what stages do

    def find_stage_run(self, plan: Plan, stage: int, batch: int = 0) -> "StageRun":
        """Return on what the work of a stage depends; ``batch`` is that of its ranks, 0 stands for the plan's own."""
        passes, stages, _ = self.find_keys(plan)
        return self.find_stage_run_of(passes, stages, plan.offload.activations, plan.zero >= 3, stage, batch)

    @memoise
    def find_stage_run_of(
        self,
        passes: PassKey,
        stages: StageKey,
        offloaded_fractions: tuple[float, ...],
        zero_3: bool,
        stage: int,
        batch: int,
    ) -> "StageRun":
        """Return on what the work of a stage depends.

        ``offloaded_fractions`` are those of layers at each position, or at all, whose activations are offloaded.
        """
        run = self.find_batch_run(passes.run, batch)
        kind, position = stages.kinds.kind_of[stage], stages.positions[stage]
        fraction = select_fraction(offloaded_fractions, position)
        num_layers = sum(self._occurrences[name].layer for name in stages.stages[stage].blocks)
        return StageRun(
            run,
            stages.kinds.kinds[kind],
            stages.find_recompute(passes.recompute, kind),
            self.find_buffered_boundary(run, stages, stage),
            # With ZeRO 3 each of two blocks that use a tied parameter is a unit that has it.
            () if zero_3 else self._list_deferred_ties(stages, stage),
            count_fraction(num_layers, fraction) if fraction else 0,
        )

    def find_batch_run(self, run: RunKey, batch: int) -> RunKey:
        """Return how passes run on ranks with microbatches of ``batch`` sequences; 0 stands for the plan's own."""
        return self.keys.with_microbatch(run, batch) if batch and batch != run.microbatch else run

    def list_stage_blocks(self, stage_run: "StageRun") -> list[tuple[str, int, LayerRecompute]]:
        """Return the blocks of a stage in order, with how often each occurs in a row and what is recomputed of it."""
        return self.blocks.list_runs(stage_run.run.cut, stage_run.blocks, stage_run.recompute)

    def build_stage_work(self, stage_run: "StageRun") -> StageWork:
        """Return what a stage does on a rank."""
        run, boundary = stage_run.run, stage_run.boundary
        rows = self.list_stage_blocks(stage_run)
        blocks = [self.blocks.work(run, name, choice) for name, count, choice in rows for _ in range(count)]
        is_layer = [self.blocks.block(run.cut, name).layer for name, count, _ in rows for _ in range(count)]
        memories = boundary.apply_buffers([(block.memory, 1) for block in blocks])
        works = [block._replace(memory=memory) for block, (memory, _) in zip(blocks, memories, strict=True)]
        if any(block.first_memory for block in works):
            first_memories = boundary.apply_buffers([(block.first_memory or block.memory, 1) for block in works])
            works = [
                block._replace(first_memory=memory) for block, (memory, _) in zip(works, first_memories, strict=True)
            ]
        layers = [place for place, layer in enumerate(is_layer) if layer]
        for place in layers[: stage_run.num_offloaded]:
            works[place] = works[place].with_offload()
        deferred_elements = dict(stage_run.deferred)
        gradients = (block.parameters - deferred_elements.get(place, 0) for place, block in enumerate(blocks))
        return StageWork(tuple(works), tuple(gradients))

    @memoise
    def list_stage_memories(self, passes: PassKey, stages: StageKey) -> tuple[StageMemory, ...]:
        """Return the memory of one microbatch of every stage on a rank."""
        ends = (self.find_buffered_boundary(passes.run, stages, stage) for stage in range(len(stages.stages)))
        sites = list(zip(stages.kinds.kind_of, ends, strict=True))
        memories = {
            (kind, boundary): stage_memory(boundary.apply_buffers(list(self._list_memories(passes, stages, kind))))
            for kind, boundary in dict.fromkeys(sites)
        }
        return tuple(memories[site] for site in sites)

    def _list_memories(self, passes: PassKey, stages: StageKey, kind: int) -> Iterator[tuple[BlockMemory, int]]:
        """Yield the memory of the blocks of a kind of stage, each with how often it occurs in a row."""
        recompute_choice = stages.find_recompute(passes.recompute, kind)
        for name, count, choice in self.blocks.list_runs(stages.cut, stages.kinds.kinds[kind], recompute_choice):
            yield self.blocks.memory(passes.run, name, choice), count

    # buffers, and data at the ends of stages

    def buffers(self, plan: Plan, batch: int = 0) -> tuple[int, ...]:
        """Return the bytes that the framework keeps on a rank of each pipeline position besides states.

        ``batch`` are the sequences of the ranks' microbatches, 0 for the plan's own.
        """
        keys = self.find_keys(plan)
        run = self.find_batch_run(keys.run, batch)
        # Else plans of any number of microbatches share the result.
        return self._list_buffers(keys.stages, run.sequences, plan.num_microbatches if self._has_buffers else 0)

    @memoise
    def _list_buffers(self, stages: StageKey, sequences: int, microbatches: int) -> tuple[int, ...]:
        """Return the bytes that the framework keeps on a rank of each position for so many microbatches."""
        position_stages = [stages.by_position[position] for position in range(stages.num_positions)]
        sites = [
            (
                tuple(stages.kinds.kind_of[stage] for stage in row),
                tuple(self.find_boundary(stages, stage, sequences) for stage in row),
            )
            for row in position_stages
        ]
        sizes = {
            site: self._count_buffers(stages, *site, sequences=sequences, microbatches=microbatches)
            for site in dict.fromkeys(sites)
        }
        return tuple(sizes[site] for site in sites)

    def _count_buffers(
        self,
        stages: StageKey,
        kinds: tuple[int, ...],
        boundaries: tuple[Boundary, ...],
        *,
        sequences: int,
        microbatches: int,
    ) -> int:
        """Return the bytes that a framework keeps on a rank of stages of some kinds."""
        names = dict.fromkeys(block for kind in kinds for block, _ in stages.kinds.kinds[kind])
        blocks = (self.blocks.buffers(stages.cut, name, sequences) for name in names)
        return count_buffer_bytes(self.training.conventions, blocks, boundaries, microbatches)

    def find_boundary(self, stages: StageKey, stage: int, sequences: int) -> Boundary:
        """Return the bytes of one microbatch at both ends of a stage; 0 at the ends of the pipeline."""
        received_bytes = self.count_boundary_bytes(stages, stage - 1, sequences) if stage else 0
        is_last = stage == len(stages.stages) - 1
        return Boundary(received_bytes, 0 if is_last else self.count_boundary_bytes(stages, stage, sequences))

    def find_buffered_boundary(self, run: RunKey, stages: StageKey, stage: int) -> Boundary:
        """Return the bytes at both ends of a stage that lie in buffers; 0 where no buffers are used."""
        if not self._has_buffers:
            return Boundary(0, 0)
        keeps_graph = run.splits_backward and self.training.conventions.keeps_graph
        return self.find_boundary(stages, stage, run.sequences)._replace(keeps_graph=keeps_graph)

    def boundary_bytes(self, plan: Plan, stage: int, microbatch: Microbatch | None = None) -> int:
        """Return the bytes of one microbatch that one rank has where ``stage`` ends and the next begins.

        ``microbatch`` are its sequences; those of the plan by default.
        """
        sequences = plan.microbatch if microbatch is None else microbatch
        if not isinstance(sequences, int):
            raise ValueError(f"a boundary has the sequences of one size of microbatches, met {list(sequences)}")
        return self.count_boundary_bytes(self.find_keys(plan).stages, stage, sequences)

    def count_sent_bytes(self, stages: StageKey, stage: int, sequences: int, slices: bool) -> float:
        """Return the bytes of one microbatch that one rank sends from ``stage`` to the next.

        With ``slices`` each tensor rank sends its slice of what all have, and the slices are gathered in the receiving
        node (Narayanan et al., SC 2021, section 4.1).
        """
        return self.count_boundary_bytes(stages, stage, sequences) / (stages.cut.mesh.size(TENSOR) if slices else 1)

    def count_boundary_bytes(self, stages: StageKey, stage: int, sequences: int) -> int:
        """Return the bytes of one microbatch that one rank has where ``stage`` ends and the next begins."""
        runs = stages.find_runs(stage)
        return self._count_output_bytes(
            stages.cut, runs[-1][0] if runs else next(iter(stages.cut.kinds.by_name)), sequences
        )

    @memoise
    def _count_output_bytes(self, cut: CutKey, name: str, sequences: int) -> int:
        """Return the bytes on a rank of the outputs of a block."""
        layout = self.blocks.layout(cut, name, sequences)
        outputs = dict.fromkeys(layout.block.outputs)
        return sum(layout.tensor_bytes(output, layout.produced_layouts[output].without_partial) for output in outputs)


def _find_positions(stages: StageKey) -> dict[str, int]:
    """Return the pipeline position of every block."""
    pairs = zip(stages.positions, stages.stages, strict=True)
    return {block: position for position, stage in pairs for block in stage.blocks}


def _sum_by_position(stages: StageKey, block_values: dict[str, int]) -> list[int]:
    """Return values of blocks summed over the stages at each pipeline position."""
    kind_sums = [sum(block_values[block] * count for block, count in runs) for runs in stages.kinds.kinds]
    result = [0] * stages.num_positions
    for kind, position in zip(stages.kinds.kind_of, stages.positions, strict=True):
        result[position] += kind_sums[kind]
    return result


def _build_parameters(row: Sequence[int]) -> Parameters:
    """Return a row of counts as parameters."""
    elements, tensors, factored, quantised, experts, factored_experts, *replicated = row
    return Parameters(elements, tensors, factored, quantised, experts, factored_experts, tuple(replicated))
