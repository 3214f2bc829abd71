"""Costs of one pipeline stage on one rank: segments block by block, and memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple, TypeVar, cast

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.costs.block import BlockCost, BlockCosts
from meshwise.strategies.lowering.costs.kinds import Runs, StageKinds, classify_stages, list_stage_runs
from meshwise.strategies.lowering.costs.memory import Boundary, StageMemory, count_buffer_bytes, stage_memory
from meshwise.strategies.lowering.costs.optimizer import Parameters, count_updated_parameters, norm_axes
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.costs.weights import factored_share, find_tied_parameters
from meshwise.strategies.lowering.rank_classes.classes import fold, unfold
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.rank_classes.numbers import Numbers
from meshwise.strategies.lowering.rank_classes.placement import PlacedMesh
from meshwise.strategies.plan.mesh import OPERATOR_AXES, Axis
from meshwise.strategies.plan.offloading import count_fraction
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import PerStage, find_stage_recompute
from meshwise.strategies.schedules.schedule import ActionKind

__all__ = ["BlockCost", "Machine", "PlanCosts", "RankProfile", "StageCost", "StageCosts"]

T = TypeVar("T")

PassCollective = tuple[str, Collective, float]
"""A collective inside a pass: the axis along which it runs, and its bytes."""

_WHOLE_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""Kinds of passes of schedules that do not split backward."""


@dataclass(frozen=True)
class StageCost:
    """The blocks of one stage, in order, on one rank; stages of the same blocks share it.

    Parameters
    ----------
    gradients
        For every block the elements whose gradients are whole when its backward ends: its parameters, but a tied
        parameter only with the block whose backward comes last of the two that use it.
    """

    blocks: tuple[BlockCost, ...]
    gradients: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.forward_ticks, self.backward_ticks, len(self.blocks)))  # equality compares the rest

    @cached_property
    def first_gradient_cost(self) -> "StageCost":
        """The cost of the stage in the passes that make its first gradients."""
        return StageCost(tuple(cost.with_first_gradients() for cost in self.blocks), self.gradients)

    @cached_property
    def forward_ticks(self) -> int:
        """Idle ticks of one forward."""
        return sum(cost.forward_ticks for cost in self.blocks)

    @cached_property
    def backward_ticks(self) -> int:
        """Idle ticks of one backward, recompute included."""
        return sum(cost.backward_ticks for cost in self.blocks)

    @cached_property
    def offloads_activations(self) -> bool:
        """Whether activations of some block go to the host."""
        return any(cost.offloaded_bytes for cost in self.blocks)

    @cached_property
    def collectives(self) -> dict[ActionKind, Counter[PassCollective]]:
        """How often a pass of each kind runs each collective."""
        # Equal blocks are one cached object, whose segments are counted once.
        num_alike = Counter(map(id, self.blocks))
        blocks = [(cost, num_alike[key]) for key, cost in {id(cost): cost for cost in self.blocks}.items()]
        kinds = [kind for kind in ActionKind if kind in _WHOLE_PASSES or all(cost.split_passes for cost in self.blocks)]
        counters: dict[ActionKind, Counter[PassCollective]] = {kind: Counter() for kind in kinds}
        for kind, counter in counters.items():
            for cost, count in blocks:
                for segment in cost.select_segments(kind):
                    if segment.collective is not None:
                        counter[segment.axis, segment.collective, segment.size] += count
        return counters

    @property
    def parameters(self) -> int:
        """Elements of parameters on the rank."""
        return sum(cost.parameters for cost in self.blocks)

    @property
    def expert_parameters(self) -> int:
        """Elements of parameters on the rank that only one expert uses."""
        return sum(cost.expert_parameters for cost in self.blocks)

    @property
    def parameter_tensors(self) -> int:
        """Parameter tensors on the rank."""
        return sum(cost.parameter_tensors for cost in self.blocks)


class PlanParameters(NamedTuple):
    """Parameters on one rank of each pipeline position, tied ones once."""

    positions: tuple[Parameters, ...]

    @property
    def elements(self) -> tuple[int, ...]:
        """Elements of parameters on one rank of each position."""
        return tuple(position_parameters.elements for position_parameters in self.positions)


class PlanCosts(NamedTuple):
    """The stages of one plan on the first rank class of each pipeline position, and the parameters there."""

    stages: tuple[StageCost, ...]
    plan_parameters: PlanParameters

    @property
    def parameters(self) -> tuple[int, ...]:
        """Elements of parameters on a rank of each pipeline position, tied ones once."""
        return self.plan_parameters.elements


class StageCosts:
    """Costs of blocks and stages of one problem, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = BlockCosts(problem)
        self._occurrences = dict(problem.graph.occurrences)
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._folded_machines: dict[PlacedMesh, Machine] = {}
        self._ties: dict[
            tuple[tuple[Axis, ...], tuple[int, ...], int], list[tuple[tuple[int, int], tuple[str, str]]]
        ] = {}
        self._tensor_costs: Numbers[object] = Numbers()
        self._stage_numbers: Numbers[tuple[Stage, ...]] = Numbers()
        self._kinds_by_number: dict[tuple[int, int, PerStage | None], StageKinds] = {}
        self._latest_kinds: tuple[tuple[Stage, ...], dict[str, str], PerStage | None, StageKinds] = (
            (),
            {},
            None,
            classify_stages(()),
        )
        self._unique_kinds: dict[tuple[tuple[Runs, ...], PerStage | None], StageKinds] = {}
        self._stage_costs: dict[tuple[object, ...], StageCost] = {}
        self._deferred_ties: dict[tuple[StageKinds, int, tuple[int, ...]], tuple[tuple[str, int], ...]] = {}
        self._plan_costs: dict[tuple[object, ...], PlanCosts] = {}
        self._plan_parameters: dict[tuple[StageKinds, int, tuple[int, ...]], PlanParameters] = {}
        self._memories: dict[tuple[StageKinds, int], tuple[StageMemory, ...]] = {}
        self._buffers: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._has_buffers = problem.training.conventions.buffers_every_microbatch
        self._boundaries: dict[tuple[str, int, int], int] = {}
        self._shares: dict[tuple[str, str, int], int] = {}
        self._shared_values: dict[object, object] = {}

    def get_shared(self, make: Callable[["StageCosts"], T]) -> T:
        """Return what ``make`` builds from these costs: built at the first call, and shared afterwards."""
        if make not in self._shared_values:
            self._shared_values[make] = make(self)
        return cast(T, self._shared_values[make])

    def machine(self, plan: Plan, *, folded: bool = True) -> Machine:
        """Return the rank classes that a plan makes of the cluster."""
        stages = self._stage_numbers.number_identical(plan.stages)
        central, norm = plan.gradient_reduction == "parameter_server", norm_axes(self.problem.training, plan)
        batches = () if isinstance(plan.microbatch, int) else plan.microbatch
        offloads = bool(plan.offload)
        exchange_axes = self.blocks.exchange_axes(plan)
        other_options = (offloads, stages, central, norm, plan.attention, batches, exchange_axes)
        machine_key = (plan.mesh.axes, plan.placement, plan.positions, *other_options)
        if folded and machine_key in self._machines:
            return self._machines[machine_key]
        tied_positions = tuple(pair for pair, _ in self._find_ties(plan))
        placed = PlacedMesh(
            self.problem.cluster,
            plan.mesh,
            plan.placement,
            plan.looped,
            offloads,
            tied_positions,
            central,
            norm,
            plan.hops,
            plan.attention,
            batches,
            exchange_axes,
        )
        if not folded:
            return Machine(unfold(placed), self._tensor_costs)
        # Different plans may place the same mesh: folding is dear, so it is done once for each placed mesh.
        if placed not in self._folded_machines:
            self._folded_machines[placed] = Machine(fold(placed), self._tensor_costs)
        self._machines[machine_key] = self._folded_machines[placed]
        return self._machines[machine_key]

    def with_batch(self, plan: Plan, batch: int) -> Plan:
        """Return a plan as ranks with microbatches of ``batch`` sequences see it; 0 stands for the plan's own."""
        return self.blocks.with_batch(plan, batch)

    def list_tied_shares(self, plan: Plan) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of pipeline positions that keep one parameter, with its elements on a rank."""
        return tuple((*pair, self.parameter_share(plan, parameter)) for pair, parameter in self._find_ties(plan))

    def _find_ties(self, plan: Plan) -> list[tuple[tuple[int, int], tuple[str, str]]]:
        """Return pairs of pipeline positions that keep one parameter, with its block and name."""
        key = (plan.mesh.axes, plan.positions, self._stage_numbers.number_identical(plan.stages))
        if key not in self._ties:
            self._ties[key] = find_tied_parameters(self.problem.graph, plan)
        return self._ties[key]

    def plan_costs(self, plan: Plan) -> PlanCosts:
        """Return the costs of all stages of a plan, on the first rank class of each position."""
        machine = self.machine(plan)
        ranks = [machine.rank(classes[0]) for classes in machine.table.by_position]
        keys, activation_fractions = tuple(rank.key for rank in ranks), plan.offload.activations
        key = (
            self.stage_kinds(plan),
            plan.positions,
            self.blocks.cost_key(plan),
            keys,
            self._list_deferred_ties(plan),
            activation_fractions,
        )
        if key not in self._plan_costs:
            stages = tuple(
                self.stage_cost(plan, stage, ranks[position]) for stage, position in enumerate(plan.positions)
            )
            self._plan_costs[key] = PlanCosts(stages, self.plan_parameters(plan))
        return self._plan_costs[key]

    def stage_cost(self, plan: Plan, stage: int, rank: RankProfile) -> StageCost:
        """Return the cost of a stage on a rank."""
        plan = self.with_batch(plan, rank.batch)
        stage_kinds = self.stage_kinds(plan)
        boundary = self.buffered_boundary(plan, stage)
        deferred_ties, num_offloaded = self._list_deferred_ties(plan), self._count_offloaded_layers(plan, stage)
        key = (
            stage_kinds,
            stage_kinds.kind_of[stage],
            self.blocks.cost_key(plan),
            rank.key,
            boundary,
            deferred_ties,
            num_offloaded,
        )
        if key not in self._stage_costs:
            runs = self.blocks.list_runs(
                plan, stage_kinds.kinds[stage_kinds.kind_of[stage]], find_stage_recompute(plan.recompute, stage)
            )
            costs = (
                repeat(self.blocks.cost(plan, block, rank, recompute_choice), count)
                for block, count, recompute_choice in runs
            )
            blocks = list(chain.from_iterable(costs))
            memories = boundary.apply_buffers([(cost.memory, 1) for cost in blocks])
            pairs = zip(blocks, memories, strict=True)
            block_costs = [cost._replace(memory=memory) for cost, (memory, _) in pairs]
            if any(cost.first_memory for cost in block_costs):
                first_memories = boundary.apply_buffers([(cost.first_memory or cost.memory, 1) for cost in block_costs])
                block_costs = [
                    cost._replace(first_memory=memory)
                    for cost, (memory, _) in zip(block_costs, first_memories, strict=True)
                ]
            layers = [place for place, name in enumerate(plan.stages[stage].blocks) if self._occurrences[name].layer]
            for place in layers[:num_offloaded]:
                block_costs[place] = block_costs[place].with_offload()
            shares = dict(deferred_ties)
            self._stage_costs[key] = StageCost(
                tuple(block_costs),
                tuple(
                    block_cost.parameters - shares.get(occurrence, 0)
                    for occurrence, block_cost in zip(plan.stages[stage].blocks, blocks, strict=True)
                ),
            )
        return self._stage_costs[key]

    def _count_offloaded_layers(self, plan: Plan, stage: int) -> int:
        """Return the number of leading layers of a stage whose activations are offloaded."""
        fraction = plan.offload.fraction_at("activations", plan.positions[stage])
        if not fraction:
            return 0
        return count_fraction(sum(self._occurrences[name].layer for name in plan.stages[stage].blocks), fraction)

    def stage_kinds(self, plan: Plan) -> StageKinds:
        """Return the kinds of a plan's stages; equal stages give the same value."""
        kinds = self.blocks.block_kinds(plan).kind_names
        stage_choices = plan.recompute if isinstance(plan.recompute, PerStage) else None
        if (
            self._latest_kinds[0] is not plan.stages
            or self._latest_kinds[1] is not kinds
            or self._latest_kinds[2] is not stage_choices
        ):
            # An id is a safe key here, because `blocks` keeps these kinds alive as long as this cache.
            key = (self._stage_numbers.number_identical(plan.stages), id(kinds), stage_choices)
            if key not in self._kinds_by_number:
                runs = list_stage_runs(plan.stages, kinds)
                self._kinds_by_number[key] = self._unique_kinds.setdefault(
                    (runs, stage_choices), classify_stages(runs, stage_choices)
                )
            self._latest_kinds = plan.stages, kinds, stage_choices, self._kinds_by_number[key]
        return self._latest_kinds[3]

    def stage_memories(self, plan: Plan) -> tuple[StageMemory, ...]:
        """Return the memory of one microbatch of every stage on a rank."""
        stage_kinds = self.stage_kinds(plan)
        key = (stage_kinds, self.blocks.cost_key(plan))
        if key not in self._memories:
            stages = list(
                zip(
                    stage_kinds.kind_of,
                    (self.buffered_boundary(plan, stage) for stage in range(len(plan.stages))),
                    strict=True,
                )
            )
            kinds = {
                (kind, boundary): stage_memory(
                    boundary.apply_buffers(list(self._list_block_memories(plan, stage_kinds, kind)))
                )
                for kind, boundary in dict.fromkeys(stages)
            }
            self._memories[key] = tuple(kinds[stage_key] for stage_key in stages)
        return self._memories[key]

    def _list_block_memories(self, plan: Plan, stage_kinds: StageKinds, kind: int) -> Iterator[tuple[BlockMemory, int]]:
        """Yield the memory of the blocks of a kind of stage, each with how often it occurs in a row."""
        for block, count, recompute_choice in self.blocks.list_runs(
            plan, stage_kinds.kinds[kind], stage_kinds.recompute(plan, kind)
        ):
            yield self.blocks.memory(plan, block, recompute_choice), count

    def plan_parameters(self, plan: Plan) -> PlanParameters:
        """Return the parameters on a rank of each pipeline position."""
        stage_kinds, positions = self.stage_kinds(plan), plan.positions
        key = (stage_kinds, self.blocks.cut_key(plan), positions)
        if key not in self._plan_parameters:
            training, zeros = self.problem.training, dict.fromkeys(stage_kinds.blocks, 0)
            tensors = {block: len(self.blocks.block(plan, block).parameters) for block in stage_kinds.blocks}
            elements = {block: self.blocks.count_parameters(plan, block) for block in stage_kinds.blocks}
            experts = {block: self.blocks.count_expert_parameters(plan, block) for block in stage_kinds.blocks}
            replicated_counts = {block: self.blocks.count_replicated(plan, block) for block in stage_kinds.blocks}
            replicated = (
                {block: values[index] for block, values in replicated_counts.items()}
                for index in range(len(OPERATOR_AXES))
            )
            factored = factored_experts = quantised = zeros
            if training.factored_bytes:
                factored_pairs = {block: self.blocks.count_factored(plan, block) for block in stage_kinds.blocks}
                factored, factored_experts = (
                    {block: values[index] for block, values in factored_pairs.items()} for index in range(2)
                )
            if training.quantised_bytes:
                quantised = {block: self.blocks.count_quantised(plan, block) for block in stage_kinds.blocks}
            columns = (elements, tensors, factored, quantised, experts, factored_experts, *replicated)
            counts = [_sum_by_position(stage_kinds, column, positions) for column in columns]
            for position, second_use in self._list_shared_ties(plan):
                counts[0][position] -= self.parameter_share(plan, second_use)
                counts[2][position] -= self._factored_share(plan, second_use)
            self._plan_parameters[key] = PlanParameters(
                tuple(_build_parameters(row) for row in zip(*counts, strict=True))
            )
        return self._plan_parameters[key]

    def buffers(self, plan: Plan) -> tuple[int, ...]:
        """Return the bytes that the framework keeps on a rank of each pipeline position besides states."""
        stage_kinds, framework = self.stage_kinds(plan), self.problem.training.conventions
        # Else plans of any number of microbatches share the result.
        microbatches = plan.num_microbatches if framework.buffers_every_microbatch else 0
        key = (stage_kinds, self.blocks.cut_key(plan), plan.positions, plan.sequences, microbatches)
        if key not in self._buffers:
            known_sizes: dict[tuple[object, ...], int] = {}
            self._buffers[key] = tuple(
                self._count_buffers(plan, tuple(stages), microbatches, known_sizes) for stages in _list_stages(plan)
            )
        return self._buffers[key]

    def _count_buffers(
        self, plan: Plan, stages: tuple[int, ...], microbatches: int, known_sizes: dict[tuple[object, ...], int]
    ) -> int:
        """Return the bytes that a framework keeps on a rank of some stages; ``known_sizes`` are of other ranks."""
        stage_kinds = self.stage_kinds(plan)
        boundaries = tuple(self.boundary(plan, stage) for stage in stages)
        key = (tuple(stage_kinds.kind_of[stage] for stage in stages), boundaries)
        if key not in known_sizes:
            names = dict.fromkeys(block for kind in key[0] for block, _ in stage_kinds.kinds[kind])
            blocks = (self.blocks.buffers(plan, name) for name in names)
            known_sizes[key] = count_buffer_bytes(self.problem.training.conventions, blocks, boundaries, microbatches)
        return known_sizes[key]

    def boundary(self, plan: Plan, stage: int) -> Boundary:
        """Return the bytes of one microbatch at both ends of a stage; 0 at the ends of the pipeline."""
        received_bytes = self.boundary_bytes(plan, stage - 1) if stage else 0
        return Boundary(received_bytes, self.boundary_bytes(plan, stage) if stage < len(plan.stages) - 1 else 0)

    def buffered_boundary(self, plan: Plan, stage: int) -> Boundary:
        """Return the bytes at both ends of a stage that lie in buffers; 0 where no buffers are used."""
        if not self._has_buffers:
            return Boundary(0, 0)
        keeps_graph = plan.splits_backward and self.problem.training.conventions.keeps_graph
        return self.boundary(plan, stage)._replace(keeps_graph=keeps_graph)

    def _list_shared_ties(self, plan: Plan) -> list[tuple[int, tuple[str, str]]]:
        """Return the pipeline positions that have both uses of a tied parameter, and the second use."""
        position_of = {
            block: position
            for position, stage in zip(plan.positions, plan.stages, strict=True)
            for block in stage.blocks
        }
        return [(position_of[first_use[0]], second_use) for first_use, second_use in self._find_inner_ties(plan)]

    def _list_deferred_ties(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """Return the blocks whose tied parameter gets its whole gradient in another block, and its elements.

        Backward ends with the first of the two blocks. With ZeRO 3 each block is a unit that has the parameter.
        """
        if not self.problem.graph.tied or plan.zero >= 3:
            return ()
        key = (self.stage_kinds(plan), self.blocks.cut_key(plan), plan.positions)
        if key not in self._deferred_ties:
            ties = self._list_shared_ties(plan)
            self._deferred_ties[key] = tuple(
                (second_use[0], self.parameter_share(plan, second_use)) for _, second_use in ties
            )
        return self._deferred_ties[key]

    def first_gradient_elements(self, plan: Plan, stage: int) -> tuple[int, ...]:
        """Return the elements of every block, in the order of backward, whose gradients a first backward allocates.

        With ZeRO 2 and 3 a rank keeps its share. A tied table counts with the block whose backward comes first.
        """
        tied_elements = {
            first_use[0]: self.parameter_share(plan, first_use) for first_use, _ in self._find_inner_ties(plan)
        }
        counts = []
        for name in reversed(plan.stages[stage].blocks):
            kind = self.blocks.block_kinds(plan).kind_names[name]
            elements, expert_elements = (
                self.blocks.count_parameters(plan, kind),
                self.blocks.count_expert_parameters(plan, kind),
            )
            elements -= tied_elements.get(name, 0)
            counts.append(count_updated_parameters(plan, elements, expert_elements) if plan.zero >= 2 else elements)
        return tuple(counts)

    def _find_inner_ties(self, plan: Plan) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        """Return the tied parameters that one rank uses twice, each by its two uses."""
        position_of = {
            block: position
            for position, stage in zip(plan.positions, plan.stages, strict=True)
            for block in stage.blocks
        }
        return [
            (first_use, second_use)
            for first_use, second_use in self.problem.graph.tied
            if position_of.get(first_use[0]) == position_of.get(second_use[0])
        ]

    def boundary_bytes(self, plan: Plan, stage: int) -> int:
        """Return the bytes of one microbatch that one rank sends from ``stage`` to the next."""
        stage_kinds = self.stage_kinds(plan)
        runs = stage_kinds.kinds[stage_kinds.kind_of[stage]]
        name = runs[-1][0] if runs else next(iter(self.blocks.block_kinds(plan).by_name))
        key = (name, self.blocks.cut_key(plan), plan.sequences)
        if key not in self._boundaries:
            layout = self.blocks.layout(plan, name)
            outputs = dict.fromkeys(layout.block.outputs)
            self._boundaries[key] = sum(
                layout.tensor_bytes(output, layout.produced_layouts[output].without_partial) for output in outputs
            )
        return self._boundaries[key]

    def _factored_share(self, plan: Plan, parameter: tuple[str, str]) -> int:
        """Return the rows, columns and vector elements of one rank's share of a parameter named by block and tensor."""
        if not self.problem.training.factored_bytes:
            return 0
        layout = self.blocks.layout(plan, self.blocks.block_kinds(plan).kind_names[parameter[0]])
        owner = next(operator for operator in layout.block.operators if parameter[1] in operator.parameters)
        return factored_share(layout, owner, layout.block.tensor[parameter[1]])

    def parameter_share(self, plan: Plan, parameter: tuple[str, str]) -> int:
        """Return one rank's share in elements of a parameter named by block and tensor."""
        key = (*parameter, self.blocks.cut_key(plan))
        if key not in self._shares:
            layout = self.blocks.layout(plan, self.blocks.block_kinds(plan).kind_names[parameter[0]])
            self._shares[key] = layout.parameter_share(layout.block.tensor[parameter[1]])
        return self._shares[key]


def _sum_by_position(stage_kinds: StageKinds, block_values: dict[str, int], positions: Sequence[int]) -> list[int]:
    """Return values of blocks summed over the stages at each pipeline position."""
    kind_sums = [sum(block_values[block] * count for block, count in runs) for runs in stage_kinds.kinds]
    result = [0] * (max(positions) + 1)
    for kind, position in zip(stage_kinds.kind_of, positions, strict=True):
        result[position] += kind_sums[kind]
    return result


def _list_stages(plan: Plan) -> list[list[int]]:
    """Return the stages at every pipeline position."""
    result: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for stage, position in enumerate(plan.positions):
        result[position].append(stage)
    return result


def _build_parameters(row: tuple[int, ...]) -> Parameters:
    """Return a row of counts as parameters."""
    elements, tensors, factored, quantised, experts, factored_experts, *replicated = row
    return Parameters(elements, tensors, factored, quantised, experts, factored_experts, tuple(replicated))
