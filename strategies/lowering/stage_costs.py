"""Costs of stages on the rank classes of a machine: what they do, and how long that takes where nothing contends."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from meshwise.simulator.collective import Collective
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.memo import memoise, remember_latest
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.costs.block import BlockWork
from meshwise.strategies.lowering.costs.keys import PassKey, RunKey, StageKey
from meshwise.strategies.lowering.costs.memory import BlockMemory
from meshwise.strategies.lowering.costs.offload import HostShare
from meshwise.strategies.lowering.costs.optimizer import count_updated_parameters, norm_axes
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.costs.stage import PlanParameters, StageRun, StageWorks
from meshwise.strategies.lowering.costs.weights import Unit
from meshwise.strategies.lowering.rank_classes.classes import fold, unfold
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile, RankRegistry
from meshwise.strategies.lowering.rank_classes.placement import PlacedMesh
from meshwise.strategies.lowering.timing import LaunchedChain, RankClock, TimedSegment, chain_ticks, launch_chain
from meshwise.strategies.plan.mesh import Mesh
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan, count_host_blocks
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.schedules.schedule import ActionKind
from meshwise.strategies.tables.embeddings import TableCut
from meshwise.strategies.tables.loads import TableBytes, find_bytes

T = TypeVar("T")

PassCollective = tuple[str, Collective, float]
"""A collective inside a pass: the axis along which it runs, and its bytes."""

_WHOLE_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""Kinds of passes of schedules that do not split backward."""


class TimedPass(NamedTuple):
    """The segments of one pass of a block on a rank, the ticks of all of them, and those of launching them.

    ``communicates`` says whether some of them are collectives.
    """

    segments: tuple[TimedSegment, ...]
    ticks: int
    chain: LaunchedChain
    communicates: bool


@dataclass(frozen=True, eq=False, slots=True)
class BlockPasses:
    """The passes of a block on a rank; those for gradients of inputs and of weights where backward is split.

    Compared and hashed by identity: blocks that cost the same share them.
    """

    forward: TimedPass
    backward: TimedPass
    inputs: TimedPass | None = None
    weights: TimedPass | None = None

    @property
    def compute_ticks(self) -> int:
        """Idle ticks of forward and backward without collectives."""
        segments = (*self.forward.segments, *self.backward.segments)
        return sum(ticks for segment, ticks in segments if segment.collective is None)

    def select(self, kind: ActionKind) -> TimedPass:
        """Return the pass of a kind."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward
        result = self.inputs if kind is ActionKind.INPUT else self.weights
        assert result is not None
        return result


class BlockCost(NamedTuple):
    """What one block does on one rank, and how long its passes take there."""

    work: BlockWork
    passes: BlockPasses

    @property
    def memory(self) -> BlockMemory:
        """Memory of one microbatch."""
        return self.work.memory

    @property
    def parameters(self) -> int:
        """Elements of parameters on the rank."""
        return self.work.parameters

    @property
    def expert_parameters(self) -> int:
        """Elements of parameters on the rank that only one expert uses."""
        return self.work.expert_parameters

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of one microbatch that are in host memory from forward to backward."""
        return self.work.offloaded_bytes

    @property
    def undeferred_parameters(self) -> int:
        """Elements whose gradients are made with those of inputs where backward is split."""
        return self.work.undeferred_parameters

    @property
    def unit(self) -> Unit:
        """What data ranks share at once of the parameters."""
        return self.work.unit

    @property
    def forward_ticks(self) -> int:
        """Idle ticks of a forward."""
        return self.passes.forward.ticks

    @property
    def backward_ticks(self) -> int:
        """Idle ticks of a whole backward."""
        return self.passes.backward.ticks

    def find_first_read(self, kind: ActionKind) -> int:
        """Return the index of the first segment of a pass that is not of a loss: before it no parameters are read."""
        return self.work.segments.num_loss_segments if kind in (ActionKind.BACKWARD, ActionKind.INPUT) else 0


@dataclass(frozen=True)
class StageCost:
    """The blocks of one stage, in order, on one rank; stages of the same blocks share it.

    ``gradients`` are those of `meshwise.strategies.lowering.costs.stage.StageWork`.
    """

    blocks: tuple[BlockCost, ...]
    gradients: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.forward_ticks, self.backward_ticks, len(self.blocks)))  # equality compares the rest

    @cached_property
    def first_gradient_cost(self) -> "StageCost":
        """The cost of the stage in the passes that make its first gradients."""
        blocks = (cost._replace(work=cost.work.with_first_gradients()) for cost in self.blocks)
        return StageCost(tuple(blocks), self.gradients)

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
        num_alike = Counter(cost.passes for cost in self.blocks)
        is_split = all(passes.inputs for passes in num_alike)
        kinds = [kind for kind in ActionKind if kind in _WHOLE_PASSES or is_split]
        counters: dict[ActionKind, Counter[PassCollective]] = {kind: Counter() for kind in kinds}
        for kind, counter in counters.items():
            for passes, count in num_alike.items():
                for segment, _ in passes.select(kind).segments:
                    if segment.collective is not None:
                        counter[segment.axis, segment.collective, segment.size] += count
        return counters


class _PlacedFields(NamedTuple):
    """The fields of a `PlacedMesh` but for its cluster, in their order."""

    mesh: Mesh
    placement: tuple[int, ...]
    looped: bool
    offloads: bool
    tied_positions: tuple[tuple[int, int], ...]
    central: bool
    norm_axes: tuple[str, ...]
    hops: tuple[tuple[int, int], ...]
    attention: Attention | None
    batches: tuple[int, ...]
    exchange_axes: tuple[str, ...]
    shares_tables: bool
    sums_in_nodes: bool
    apart: bool = False


class PlanCosts(NamedTuple):
    """The stages of one plan on the first rank class of each pipeline position, and the parameters there."""

    stages: tuple[StageCost, ...]
    plan_parameters: PlanParameters

    @property
    def parameters(self) -> tuple[int, ...]:
        """Elements of parameters on a rank of each pipeline position, tied ones once."""
        return self.plan_parameters.elements


class StageCosts(StageWorks):
    """The stages of one problem's plans with their times, each part worked out once for all plans that share it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._ranks = RankRegistry()

    @memoise
    def _find_shared(self, make: Callable[["StageCosts"], object]) -> object:
        return make(self)

    def get_shared(self, make: Callable[["StageCosts"], T]) -> T:
        """Return what ``make`` builds from these costs: built at the first call, and shared afterwards."""
        return cast(T, self._find_shared(make))

    @remember_latest
    def machine(self, plan: Plan) -> Machine:
        """Return the rank classes that a plan makes of the cluster."""
        return self._fold_machine(*self._list_placed_fields(plan))

    def machine_apart(self, plan: Plan) -> Machine:
        """Return the rank classes that a plan makes of the cluster where data ranks have other work."""
        return self._fold_machine(*self._list_placed_fields(plan)._replace(apart=True))

    def build_unfolded_machine(self, plan: Plan) -> Machine:
        """Return a machine in which every rank is a class of its own."""
        return Machine(unfold(PlacedMesh(self.problem.cluster, *self._list_placed_fields(plan))), self._ranks)

    def _list_placed_fields(self, plan: Plan) -> "_PlacedFields":
        """Return what a plan says of its placed mesh."""
        stages = self.find_keys(plan).stages
        return _PlacedFields(
            plan.mesh,
            plan.placement,
            plan.looped,
            bool(plan.offload) or plan.embeddings.uses_hosts,
            self.list_tied_positions(stages),
            plan.gradient_reduction == "parameter_server",
            norm_axes(self.training, plan),
            plan.hops,
            plan.attention,
            () if isinstance(plan.microbatch, int) else plan.microbatch,
            self.blocks.exchange_axes(stages.cut),
            bool(plan.embeddings),
            any(placement.cut is TableCut.NODE_ROWS for _, placement in plan.embeddings.tables),
        )

    @memoise
    def _fold_machine(self, *fields: Any) -> Machine:
        """Return the machine of a placed mesh, given by its fields; folding is dear."""
        return Machine(fold(PlacedMesh(self.problem.cluster, *fields)), self._ranks)

    @memoise
    def clock(self, rank: RankProfile) -> RankClock:
        """Return what looks up the ticks of segments on a rank; ranks of equal keys share it."""
        return RankClock(rank)

    def plan_costs(self, plan: Plan) -> PlanCosts:
        """Return the costs of all stages of a plan, on the first rank class of each position."""
        machine, keys = self.machine(plan), self.find_keys(plan)
        ranks = tuple(machine.rank(classes[0]) for classes in machine.table.by_position)
        return self._build_plan_costs(keys.passes, keys.stages, ranks, plan.offload.activations, plan.zero >= 3)

    @memoise
    def _build_plan_costs(
        self,
        passes: PassKey,
        stages: StageKey,
        ranks: tuple[RankProfile, ...],
        offloaded_fractions: tuple[float, ...],
        zero_3: bool,
    ) -> PlanCosts:
        costs = []
        for stage, position in enumerate(stages.positions):
            rank = ranks[position]
            stage_run = self.find_stage_run_of(passes, stages, offloaded_fractions, zero_3, stage, rank.batch)
            costs.append(self._time_stage(stage_run, rank))
        return PlanCosts(tuple(costs), self.count_parameters(stages))

    def find_table_bytes(self, plan: Plan) -> TableBytes | None:
        """Return what the fullest data rank keeps of the tables that they share; ``None`` where they share none."""
        if not plan.embeddings:
            return None
        loads = self.blocks.table_loads(self.find_keys(plan).cut, plan.sequences)
        return find_bytes(loads, self.list_rank_hosts(plan), pipelined=plan.embeddings.pipelined)

    def list_rank_hosts(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of the host of every rank."""
        devices = self.machine(plan).table.placed.devices
        return tuple(interconnect(self.problem.cluster).host_of(devices).tolist())

    def list_host_shares(self, plan: Plan) -> tuple[HostShare, ...]:
        """Return what ranks keep on their hosts for the whole step, by position; a tied parameter is there once."""
        return tuple(self._find_host_share(plan, position) for position in range(plan.pipeline))

    def _find_host_share(self, plan: Plan, position: int) -> HostShare:
        """Return what ranks of a position keep on their hosts for the whole step."""
        fraction = plan.offload.fraction_at("optimizer", position)
        if not plan.offload.moves_in_passes:
            return HostShare(fraction)
        stages, parameters = self.plan_costs(plan).stages, self.plan_parameters(plan).positions[position]
        offloaded_blocks = [
            block
            for stage in plan.stages_at(position)
            for block in stages[stage].blocks[: count_host_blocks(plan, stage)]
        ]
        elements = count_updated_parameters(
            plan,
            sum(block.parameters for block in offloaded_blocks),
            sum(block.expert_parameters for block in offloaded_blocks),
        )
        num_updated = count_updated_parameters(plan, parameters.elements, parameters.expert_elements)
        return HostShare(fraction, min(elements, num_updated))

    def stage_cost(self, plan: Plan, stage: int, rank: RankProfile) -> StageCost:
        """Return the cost of a stage on a rank."""
        return self._time_stage(self.find_stage_run(plan, stage, rank.batch), rank)

    @memoise
    def _time_stage(self, stage_run: StageRun, rank: RankProfile) -> StageCost:
        work = self.build_stage_work(stage_run)
        passes = [
            self.block_passes(stage_run.run, name, choice, rank)
            for name, count, choice in self.list_stage_blocks(stage_run)
            for _ in range(count)
        ]
        return StageCost(tuple(map(BlockCost, work.blocks, passes)), work.gradients)

    @memoise
    def block_passes(self, run: RunKey, name: str, recompute_choice: LayerRecompute, rank: RankProfile) -> BlockPasses:
        """Return the passes of a block on a rank, with their ticks."""
        work, clock = self.blocks.work(run, name, recompute_choice), self.clock(rank)
        forward, backward = (_time_pass(clock, row) for row in (work.segments.forward, work.segments.backward))
        if work.split_passes is None:
            return BlockPasses(forward, backward)
        inputs, weights = (
            _time_pass(clock, row, (TimedSegment(Segment(kind, "nothing", num_launches=0), 0),))
            for kind, row in zip((TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT), work.split_passes, strict=True)
        )
        return BlockPasses(forward, backward, inputs, weights)


def _time_pass(clock: RankClock, segments: Sequence[Segment], nothing: tuple[TimedSegment, ...] = ()) -> TimedPass:
    """Return a pass of a block with its ticks; ``nothing`` stands for a part in which it has nothing to do."""
    timed_segments = clock.time_segments(segments) or nothing
    chain = launch_chain(timed_segments, clock.rank.launch)
    communicates = any(segment.collective is not None for segment, _ in timed_segments)
    return TimedPass(timed_segments, chain_ticks(timed_segments), chain, communicates)
