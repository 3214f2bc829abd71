"""Costs of one pipeline stage on one rank: segments block by block, and memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple, TypeVar, cast

from meshwise.simulator.collective import Collective
from meshwise.strategies.lowering.costs.block import BlockCost, BlockCosts
from meshwise.strategies.lowering.costs.kinds import Division, Runs, division, runs_of
from meshwise.strategies.lowering.costs.memory import Boundary, StageMemory, buffers, stage_memory
from meshwise.strategies.lowering.costs.optimizer import Parameters, norm_axes, updated_parameters
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.costs.weights import factored_share, tied_parameters
from meshwise.strategies.lowering.rank_classes.classes import fold, unfolded
from meshwise.strategies.lowering.rank_classes.machine import Machine, Rank
from meshwise.strategies.lowering.rank_classes.numbers import Numbers
from meshwise.strategies.lowering.rank_classes.placement import Placed
from meshwise.strategies.plan.mesh import OPERATOR_AXES, Axis
from meshwise.strategies.plan.offloading import fraction_of
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import PerStage, of_stage
from meshwise.strategies.schedules.schedule import ActionKind

__all__ = ["BlockCost", "Machine", "PlanCosts", "Rank", "StageCost", "StageCosts"]

T = TypeVar("T")

Run = tuple[str, Collective, float]
"""A collective inside a pass: the axis along which it runs, and its bytes."""

_WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)
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
    def beginning(self) -> "StageCost":
        """The cost of the stage in the passes that make its first gradients."""
        return StageCost(tuple(cost.beginning() for cost in self.blocks), self.gradients)

    @cached_property
    def forward_ticks(self) -> int:
        """Idle ticks of one forward."""
        return sum(cost.forward_ticks for cost in self.blocks)

    @cached_property
    def backward_ticks(self) -> int:
        """Idle ticks of one backward, recompute included."""
        return sum(cost.backward_ticks for cost in self.blocks)

    @cached_property
    def away(self) -> bool:
        """Whether activations of some block go to the host."""
        return any(cost.away for cost in self.blocks)

    @cached_property
    def collectives(self) -> dict[ActionKind, Counter[Run]]:
        """How often a pass of each kind runs each collective."""
        # Equal blocks are one cached object, whose segments are counted once.
        alike = Counter(map(id, self.blocks))
        blocks = [(cost, alike[key]) for key, cost in {id(cost): cost for cost in self.blocks}.items()]
        kinds = [kind for kind in ActionKind if kind in _WHOLE or all(cost.split for cost in self.blocks)]
        found: dict[ActionKind, Counter[Run]] = {kind: Counter() for kind in kinds}
        for kind, runs in found.items():
            for cost, count in blocks:
                for step in cost.steps_of(kind):
                    if step.collective is not None:
                        runs[step.axis, step.collective, step.size] += count
        return found

    @property
    def parameters(self) -> int:
        """Elements of parameters on the rank."""
        return sum(cost.parameters for cost in self.blocks)

    @property
    def experts(self) -> int:
        """Elements of parameters on the rank that only one expert uses."""
        return sum(cost.experts for cost in self.blocks)

    @property
    def parameter_tensors(self) -> int:
        """Parameter tensors on the rank."""
        return sum(cost.parameter_tensors for cost in self.blocks)


class Held(NamedTuple):
    """Parameters on one rank of each pipeline position, tied ones once."""

    positions: tuple[Parameters, ...]

    @property
    def parameters(self) -> tuple[int, ...]:
        """Elements of parameters on one rank of each position."""
        return tuple(each.elements for each in self.positions)


class PlanCosts(NamedTuple):
    """The stages of one plan on the first rank class of each pipeline position, and the parameters there."""

    stages: tuple[StageCost, ...]
    held: Held

    @property
    def parameters(self) -> tuple[int, ...]:
        """Elements of parameters on a rank of each pipeline position, tied ones once."""
        return self.held.parameters


class StageCosts:
    """Costs of blocks and stages of one problem, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = BlockCosts(problem)
        self._occurrences = dict(problem.graph.occurrences)
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._folded: dict[Placed, Machine] = {}
        self._pairs: dict[
            tuple[tuple[Axis, ...], tuple[int, ...], int], list[tuple[tuple[int, int], tuple[str, str]]]
        ] = {}
        self._tensor_costs: Numbers[object] = Numbers()
        self._stages: Numbers[tuple[Stage, ...]] = Numbers()
        self._divisions: dict[tuple[int, int, PerStage | None], Division] = {}
        self._latest: tuple[tuple[Stage, ...], dict[str, str], PerStage | None, Division] = (), {}, None, division(())
        self._made: dict[tuple[tuple[Runs, ...], PerStage | None], Division] = {}
        self._stage_costs: dict[tuple[object, ...], StageCost] = {}
        self._laters: dict[tuple[Division, int, tuple[int, ...]], tuple[tuple[str, int], ...]] = {}
        self._plan_costs: dict[tuple[object, ...], PlanCosts] = {}
        self._held: dict[tuple[Division, int, tuple[int, ...]], Held] = {}
        self._memories: dict[tuple[Division, int], tuple[StageMemory, ...]] = {}
        self._buffers: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._buffered = problem.training.conventions.buffers_every_microbatch
        self._boundaries: dict[tuple[str, int, int], int] = {}
        self._shares: dict[tuple[str, str, int], int] = {}
        self._kept: dict[object, object] = {}

    def once(self, make: Callable[["StageCosts"], T]) -> T:
        """Return what ``make`` builds from these costs: built at the first call, and shared afterwards."""
        if make not in self._kept:
            self._kept[make] = make(self)
        return cast(T, self._kept[make])

    def machine(self, plan: Plan, *, folded: bool = True) -> Machine:
        """Return the rank classes that a plan makes of the cluster."""
        stages = self._stages.of_same(plan.stages)
        central, norm = plan.gradient_reduction == "parameter_server", norm_axes(self.problem.training, plan)
        batches = () if isinstance(plan.microbatch, int) else plan.microbatch
        offloads = bool(plan.offload)
        exchanging = self.blocks.exchanging(plan)
        rest = (offloads, stages, central, norm, plan.attention, batches, exchanging)
        known = (plan.mesh.axes, plan.placement, plan.positions, *rest)
        if folded and known in self._machines:
            return self._machines[known]
        tied = tuple(pair for pair, _ in self._tied(plan))
        placed = Placed(
            self.problem.cluster,
            plan.mesh,
            plan.placement,
            plan.looped,
            offloads,
            tied,
            central,
            norm,
            plan.hops,
            plan.attention,
            batches,
            exchanging,
        )
        if not folded:
            return Machine(unfolded(placed), self._tensor_costs)
        # Different plans may place the same mesh: folding is dear, so it is done once for each placed mesh.
        if placed not in self._folded:
            self._folded[placed] = Machine(fold(placed), self._tensor_costs)
        self._machines[known] = self._folded[placed]
        return self._machines[known]

    def seen(self, plan: Plan, batch: int) -> Plan:
        """Return a plan as ranks with microbatches of ``batch`` sequences see it; 0 stands for the plan's own."""
        return self.blocks.seen(plan, batch)

    def tied(self, plan: Plan) -> tuple[tuple[int, int, int], ...]:
        """Return pairs of pipeline positions that keep one parameter, with its elements on a rank."""
        return tuple((*pair, self.parameter_share(plan, parameter)) for pair, parameter in self._tied(plan))

    def _tied(self, plan: Plan) -> list[tuple[tuple[int, int], tuple[str, str]]]:
        """Return pairs of pipeline positions that keep one parameter, with its block and name."""
        key = (plan.mesh.axes, plan.positions, self._stages.of_same(plan.stages))
        if key not in self._pairs:
            self._pairs[key] = tied_parameters(self.problem.graph, plan)
        return self._pairs[key]

    def of(self, plan: Plan) -> PlanCosts:
        """Return the costs of all stages of a plan, on the first rank class of each position."""
        machine = self.machine(plan)
        ranks = [machine.rank(classes[0]) for classes in machine.table.by_position]
        keys, away = tuple(rank.key for rank in ranks), plan.offload.activations
        key = (self.division(plan), plan.positions, self.blocks.how(plan), keys, self._later(plan), away)
        if key not in self._plan_costs:
            stages = tuple(self.stage(plan, stage, ranks[at]) for stage, at in enumerate(plan.positions))
            self._plan_costs[key] = PlanCosts(stages, self.held(plan))
        return self._plan_costs[key]

    def stage(self, plan: Plan, stage: int, rank: Rank) -> StageCost:
        """Return the cost of a stage on a rank."""
        plan = self.seen(plan, rank.batch)
        made = self.division(plan)
        ends = self.ends(plan, stage)
        later, away = self._later(plan), self._layers_away(plan, stage)
        key = (made, made.kind_of[stage], self.blocks.how(plan), rank.key, ends, later, away)
        if key not in self._stage_costs:
            runs = self.blocks.runs(plan, made.kinds[made.kind_of[stage]], of_stage(plan.recompute, stage))
            costs = (repeat(self.blocks.cost(plan, block, rank, how), count) for block, count, how in runs)
            blocks = list(chain.from_iterable(costs))
            memories = ends.applied([(cost.memory, 1) for cost in blocks])
            pairs = zip(blocks, memories, strict=True)
            found = [cost._replace(memory=memory) for cost, (memory, _) in pairs]
            if any(cost.first for cost in found):
                first = ends.applied([(cost.first or cost.memory, 1) for cost in found])
                found = [cost._replace(first=memory) for cost, (memory, _) in zip(found, first, strict=True)]
            layers = [place for place, name in enumerate(plan.stages[stage].blocks) if self._occurrences[name].layer]
            for place in layers[:away]:
                found[place] = found[place].offloaded()
            shares = dict(later)
            self._stage_costs[key] = StageCost(
                tuple(found),
                tuple(c.parameters - shares.get(n, 0) for n, c in zip(plan.stages[stage].blocks, blocks, strict=True)),
            )
        return self._stage_costs[key]

    def _layers_away(self, plan: Plan, stage: int) -> int:
        """Return the number of leading layers of a stage whose activations are offloaded."""
        fraction = plan.offload.at("activations", plan.positions[stage])
        if not fraction:
            return 0
        return fraction_of(sum(self._occurrences[name].layer for name in plan.stages[stage].blocks), fraction)

    def division(self, plan: Plan) -> Division:
        """Return the kinds of a plan's stages; equal stages give the same value."""
        kinds = self.blocks.kinds(plan).names
        apart = plan.recompute if isinstance(plan.recompute, PerStage) else None
        if self._latest[0] is not plan.stages or self._latest[1] is not kinds or self._latest[2] is not apart:
            # An id is a safe key here, because `blocks` keeps these kinds alive as long as this cache.
            key = (self._stages.of_same(plan.stages), id(kinds), apart)
            if key not in self._divisions:
                runs = runs_of(plan.stages, kinds)
                self._divisions[key] = self._made.setdefault((runs, apart), division(runs, apart))
            self._latest = plan.stages, kinds, apart, self._divisions[key]
        return self._latest[3]

    def memories(self, plan: Plan) -> tuple[StageMemory, ...]:
        """Return the memory of one microbatch of every stage on a rank."""
        made = self.division(plan)
        key = (made, self.blocks.how(plan))
        if key not in self._memories:
            stages = list(zip(made.kind_of, (self.ends(plan, stage) for stage in range(len(plan.stages))), strict=True))
            kinds = {
                (kind, ends): stage_memory(ends.applied(list(self._held_by(plan, made, kind))))
                for kind, ends in dict.fromkeys(stages)
            }
            self._memories[key] = tuple(kinds[each] for each in stages)
        return self._memories[key]

    def _held_by(self, plan: Plan, made: Division, kind: int) -> Iterator[tuple[BlockMemory, int]]:
        """Yield the memory of the blocks of a kind of stage, each with how often it occurs in a row."""
        for block, count, how in self.blocks.runs(plan, made.kinds[kind], made.recompute(plan, kind)):
            yield self.blocks.memory(plan, block, how), count

    def held(self, plan: Plan) -> Held:
        """Return the parameters on a rank of each pipeline position."""
        made, positions = self.division(plan), plan.positions
        key = (made, self.blocks.cut(plan), positions)
        if key not in self._held:
            training, none = self.problem.training, dict.fromkeys(made.blocks, 0)
            tensors = {block: len(self.blocks.block(plan, block).parameters) for block in made.blocks}
            elements = {block: self.blocks.parameters(plan, block) for block in made.blocks}
            experts = {block: self.blocks.experts(plan, block) for block in made.blocks}
            parts = {block: self.blocks.replicated(plan, block) for block in made.blocks}
            replicated = ({block: found[of] for block, found in parts.items()} for of in range(len(OPERATOR_AXES)))
            factored = factored_experts = quantised = none
            if training.factored_bytes:
                both = {block: self.blocks.factored(plan, block) for block in made.blocks}
                factored, factored_experts = ({block: found[of] for block, found in both.items()} for of in range(2))
            if training.quantised_bytes:
                quantised = {block: self.blocks.quantised(plan, block) for block in made.blocks}
            every = (elements, tensors, factored, quantised, experts, factored_experts, *replicated)
            counts = [_by_position(made, each, positions) for each in every]
            for position, end in self._kept_once(plan):
                counts[0][position] -= self.parameter_share(plan, end)
                counts[2][position] -= self._factored_share(plan, end)
            self._held[key] = Held(tuple(_parameters(row) for row in zip(*counts, strict=True)))
        return self._held[key]

    def buffers(self, plan: Plan) -> tuple[int, ...]:
        """Return the bytes that the framework keeps on a rank of each pipeline position besides states."""
        made, framework = self.division(plan), self.problem.training.conventions
        # Else plans of any number of microbatches share the result.
        microbatches = plan.num_microbatches if framework.buffers_every_microbatch else 0
        key = (made, self.blocks.cut(plan), plan.positions, plan.sequences, microbatches)
        if key not in self._buffers:
            known: dict[tuple[object, ...], int] = {}
            self._buffers[key] = tuple(
                self._buffers_of(plan, tuple(stages), microbatches, known) for stages in _stages_by_position(plan)
            )
        return self._buffers[key]

    def _buffers_of(
        self, plan: Plan, stages: tuple[int, ...], microbatches: int, known: dict[tuple[object, ...], int]
    ) -> int:
        """Return the bytes that a framework keeps on a rank of some stages; ``known_sizes`` are of other ranks."""
        made = self.division(plan)
        boundaries = tuple(self.boundary(plan, stage) for stage in stages)
        key = (tuple(made.kind_of[stage] for stage in stages), boundaries)
        if key not in known:
            names = dict.fromkeys(block for kind in key[0] for block, _ in made.kinds[kind])
            blocks = (self.blocks.buffers(plan, name) for name in names)
            known[key] = buffers(self.problem.training.conventions, blocks, boundaries, microbatches)
        return known[key]

    def boundary(self, plan: Plan, stage: int) -> Boundary:
        """Return the bytes of one microbatch at both ends of a stage; 0 at the ends of the pipeline."""
        before = self.boundary_bytes(plan, stage - 1) if stage else 0
        return Boundary(before, self.boundary_bytes(plan, stage) if stage < len(plan.stages) - 1 else 0)

    def ends(self, plan: Plan, stage: int) -> Boundary:
        """Return the bytes at both ends of a stage that lie in buffers; 0 where no buffers are used."""
        if not self._buffered:
            return Boundary(0, 0)
        keeps = plan.splits_backward and self.problem.training.conventions.keeps_graph
        return self.boundary(plan, stage)._replace(keeps_graph=keeps)

    def _kept_once(self, plan: Plan) -> list[tuple[int, tuple[str, str]]]:
        """Return the pipeline positions that have both uses of a tied parameter, and the second use."""
        at = {block: place for place, each in zip(plan.positions, plan.stages, strict=True) for block in each.blocks}
        return [(at[first[0]], second) for first, second in self._both_ends(plan)]

    def _later(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """Return the blocks whose tied parameter gets its whole gradient in another block, and its elements.

        Backward ends with the first of the two blocks. With ZeRO 3 each block is a unit that has the parameter.
        """
        if not self.problem.graph.tied or plan.zero >= 3:
            return ()
        key = (self.division(plan), self.blocks.cut(plan), plan.positions)
        if key not in self._laters:
            found = self._kept_once(plan)
            self._laters[key] = tuple((end[0], self.parameter_share(plan, end)) for _, end in found)
        return self._laters[key]

    def begun_elements(self, plan: Plan, stage: int) -> tuple[int, ...]:
        """Return the elements of every block, in the order of backward, whose gradients a first backward allocates.

        With ZeRO 2 and 3 a rank keeps its share. A tied table counts with the block whose backward comes first.
        """
        tied = {first[0]: self.parameter_share(plan, first) for first, _ in self._both_ends(plan)}
        counts = []
        for name in reversed(plan.stages[stage].blocks):
            kind = self.blocks.kinds(plan).names[name]
            elements, experts = self.blocks.parameters(plan, kind), self.blocks.experts(plan, kind)
            elements -= tied.get(name, 0)
            counts.append(updated_parameters(plan, elements, experts) if plan.zero >= 2 else elements)
        return tuple(counts)

    def _both_ends(self, plan: Plan) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        """Return the tied parameters that one rank uses twice, each by its two uses."""
        placed = {block: at for at, each in zip(plan.positions, plan.stages, strict=True) for block in each.blocks}
        return [
            (first, second)
            for first, second in self.problem.graph.tied
            if placed.get(first[0]) == placed.get(second[0])
        ]

    def boundary_bytes(self, plan: Plan, stage: int) -> int:
        """Return the bytes of one microbatch that one rank sends from ``stage`` to the next."""
        made = self.division(plan)
        runs = made.kinds[made.kind_of[stage]]
        name = runs[-1][0] if runs else next(iter(self.blocks.kinds(plan).of_name))
        key = (name, self.blocks.cut(plan), plan.sequences)
        if key not in self._boundaries:
            layout = self.blocks.layout(plan, name)
            outputs = dict.fromkeys(layout.block.outputs)
            self._boundaries[key] = sum(layout.tensor_bytes(each, layout.produced[each].complete) for each in outputs)
        return self._boundaries[key]

    def _factored_share(self, plan: Plan, parameter: tuple[str, str]) -> int:
        """Return the rows, columns and vector elements of one rank's share of a parameter named by block and tensor."""
        if not self.problem.training.factored_bytes:
            return 0
        layout = self.blocks.layout(plan, self.blocks.kinds(plan).names[parameter[0]])
        owner = next(operator for operator in layout.block.operators if parameter[1] in operator.parameters)
        return factored_share(layout, owner, layout.block.tensor[parameter[1]])

    def parameter_share(self, plan: Plan, parameter: tuple[str, str]) -> int:
        """Return one rank's share in elements of a parameter named by block and tensor."""
        key = (*parameter, self.blocks.cut(plan))
        if key not in self._shares:
            layout = self.blocks.layout(plan, self.blocks.kinds(plan).names[parameter[0]])
            self._shares[key] = layout.parameter_share(layout.block.tensor[parameter[1]])
        return self._shares[key]


def _by_position(made: Division, of_block: dict[str, int], positions: Sequence[int]) -> list[int]:
    """Return values of blocks summed over the stages at each pipeline position."""
    kinds = [sum(of_block[block] * count for block, count in runs) for runs in made.kinds]
    result = [0] * (max(positions) + 1)
    for kind, position in zip(made.kind_of, positions, strict=True):
        result[position] += kinds[kind]
    return result


def _stages_by_position(plan: Plan) -> list[list[int]]:
    """Return the stages at every pipeline position."""
    result: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for stage, position in enumerate(plan.positions):
        result[position].append(stage)
    return result


def _parameters(row: tuple[int, ...]) -> Parameters:
    """Return a row of counts as parameters."""
    elements, tensors, factored, quantised, experts, factored_experts, *replicated = row
    return Parameters(elements, tensors, factored, quantised, experts, factored_experts, tuple(replicated))
