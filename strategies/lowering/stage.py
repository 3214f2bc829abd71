"""What one pipeline stage costs one rank: steps block by block, and what they hold."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.network import bundle
from simulator.operator_graph import Block
from simulator.units import TICKS_PER_SECOND
from strategies.lowering.classes import ClassTable, fold
from strategies.lowering.operator import BlockLayout, BlockSteps, GroupShape, Step, block_steps
from strategies.lowering.recompute import BlockMemory, block_memory, with_recompute
from strategies.mesh import TENSOR, Mesh
from strategies.plan import Plan
from strategies.problem import Problem


class BlockCost(NamedTuple):
    """One block on one rank: its steps, their idle ticks, memory and local parameters."""

    steps: BlockSteps
    forward_ticks: int
    backward_ticks: int
    memory: BlockMemory
    parameters: int
    parameter_tensors: int


@dataclass(frozen=True)
class StageCost:
    """The blocks of one stage, in order, on one rank."""

    blocks: tuple[tuple[str, BlockCost], ...]

    @cached_property
    def forward_ticks(self) -> int:
        """Idle ticks of one forward."""
        return sum(cost.forward_ticks for _, cost in self.blocks)

    @cached_property
    def backward_ticks(self) -> int:
        """Idle ticks of one backward, recompute included."""
        return sum(cost.backward_ticks for _, cost in self.blocks)

    @cached_property
    def kept(self) -> int:
        """Bytes that one microbatch holds from forward to backward."""
        return sum(cost.memory.kept for _, cost in self.blocks)

    @cached_property
    def forward_extra(self) -> int:
        """Bytes beyond ``kept`` at the fullest moment of forward."""
        held, peak = 0, 0
        for _, cost in self.blocks:
            held += cost.memory.kept
            peak = max(peak, held + cost.memory.working)
        return max(peak - held, 0)

    @cached_property
    def backward_extra(self) -> tuple[int, int]:
        """Bytes beyond ``kept`` at the fullest moment of backward: recomputed, working."""
        held, best = 0, (0, 0)
        levels = []
        for _, cost in self.blocks:
            held += cost.memory.kept
            levels.append((held, cost.memory.recomputed, cost.memory.working))
        for level, recomputed, working in levels:
            missing = held - level
            if recomputed + working - missing > sum(best):
                best = (recomputed, working) if not missing else (max(recomputed + working - missing, 0), 0)
        return best

    @property
    def parameters(self) -> int:
        """Elements of parameters on the rank."""
        return sum(cost.parameters for _, cost in self.blocks)

    @property
    def parameter_tensors(self) -> int:
        """Parameter tensors on the rank."""
        return sum(cost.parameter_tensors for _, cost in self.blocks)


def idle_ticks(cluster: Cluster, step: Step) -> int:
    """Return the ticks of a step where nothing contends with it."""
    usage = [(port, size) for port, size in (("device", step.device_bytes), ("nic", step.nic_bytes)) if size > 0]
    if not usage:
        return step.duration
    capacity: dict[Hashable, float] = {"device": cluster.intra_node.bandwidth, "nic": cluster.inter_node.bandwidth}
    return step.duration + bundle(usage, capacity, TICKS_PER_SECOND).solo_ticks


class PlanCosts(NamedTuple):
    """The stages of one plan on the first rank class of each pipeline position.

    ``parameters`` are the elements on a rank of each pipeline position, tied ones once;
    ``parameter_tensors`` how many tensors hold them.
    """

    stages: tuple[StageCost, ...]
    parameters: tuple[int, ...]
    parameter_tensors: tuple[int, ...]


class StageCosts:
    """Costs of blocks and stages of one problem, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._blocks = dict(problem.graph.occurrences)
        self._block_costs: dict[tuple[object, ...], BlockCost] = {}
        self._stage_costs: dict[tuple[object, ...], StageCost] = {}
        self._plan_costs: dict[tuple[object, ...], PlanCosts] = {}
        self._positions: dict[Mesh, tuple[int, ...]] = {}
        self._boundaries: dict[tuple[object, ...], int] = {}
        self._shares: dict[tuple[object, ...], int] = {}
        self._classes: dict[Mesh, ClassTable] = {}

    def classes(self, mesh: Mesh) -> ClassTable:
        """Return the folded rank classes of a mesh."""
        if mesh not in self._classes:
            self._classes[mesh] = fold(self.problem.cluster, mesh)
        return self._classes[mesh]

    def of(self, plan: Plan) -> PlanCosts:
        """Return the costs of all stages of a plan."""
        key = (plan.stages, plan.mesh, plan.microbatch, plan.shardings, plan.recompute)
        if key not in self._plan_costs:
            shapes = [self.tensor_shape(plan, self.first_class(plan, p)) for p in range(plan.pipeline)]
            count = len(plan.stages)
            stages = tuple(self.stage(plan, stage, shapes[stage % plan.pipeline]) for stage in range(count))
            parameters = tuple(self.rank_parameters(plan, p, shapes[p]) for p in range(plan.pipeline))
            tensors = tuple(sum(s.parameter_tensors for s in stages[p :: plan.pipeline]) for p in range(plan.pipeline))
            self._plan_costs[key] = PlanCosts(stages, parameters, tensors)
        return self._plan_costs[key]

    def first_class(self, plan: Plan, position: int) -> int:
        """Return the first rank class at a pipeline position."""
        if plan.mesh not in self._positions:
            table = self.classes(plan.mesh)
            self._positions[plan.mesh] = tuple(table.on_pipeline_rank(p)[0] for p in range(plan.pipeline))
        return self._positions[plan.mesh][position]

    def rank_parameters(self, plan: Plan, position: int, shape: GroupShape) -> int:
        """Return the elements of parameters on a rank at a pipeline position, tied ones once."""
        own = range(position, len(plan.stages), plan.pipeline)
        blocks = {block for stage in own for block in plan.stages[stage].blocks}
        total = sum(self.stage(plan, stage, shape).parameters for stage in own)
        return total - sum(
            self.parameter_share(plan, second)
            for first, second in self.problem.graph.tied
            if first[0] in blocks and second[0] in blocks
        )

    def stage(self, plan: Plan, stage: int, shape: GroupShape) -> StageCost:
        """Return the cost of a stage on a rank whose tensor group has ``shape``."""
        blocks = plan.stages[stage].blocks
        key = (blocks, plan.microbatch, plan.tensor, plan.shardings, plan.recompute, shape)
        if key not in self._stage_costs:
            self._stage_costs[key] = StageCost(tuple((name, self._block(plan, name, shape)) for name in blocks))
        return self._stage_costs[key]

    def _block(self, plan: Plan, name: str, shape: GroupShape) -> BlockCost:
        block = self._blocks[name]
        key = (block.name, plan.microbatch, plan.tensor, plan.shardings, plan.recompute, shape)
        if key not in self._block_costs:
            layout = self.layout(plan, block)
            cluster = self.problem.cluster
            steps = with_recompute(block, block_steps(cluster, layout, shape), plan.recompute)
            self._block_costs[key] = BlockCost(
                steps,
                self._ticks(steps.forward),
                self._ticks(steps.backward),
                block_memory(layout, plan.recompute),
                layout.parameter_elements(),
                len(block.parameters),
            )
        return self._block_costs[key]

    def _ticks(self, steps: Iterable[Step]) -> int:
        return sum(idle_ticks(self.problem.cluster, step) for step in steps)

    def boundary_bytes(self, plan: Plan, stage: int) -> int:
        """Return the bytes of one microbatch that one rank sends from ``stage`` to the next."""
        blocks = plan.stages[stage].blocks
        block = self._blocks[blocks[-1]] if blocks else self.problem.graph.blocks[0]
        key = (block.name, plan.microbatch, plan.tensor, plan.shardings)
        if key not in self._boundaries:
            layout = self.layout(plan, block)
            self._boundaries[key] = sum(
                layout.tensor_bytes(name, layout.produced[name].complete) for name in block.outputs
            )
        return self._boundaries[key]

    def parameter_share(self, plan: Plan, parameter: tuple[str, str]) -> int:
        """Return one rank's share in elements of a parameter named by block and tensor."""
        key = (*parameter, plan.tensor, plan.shardings)
        if key not in self._shares:
            block = self._blocks[parameter[0]]
            self._shares[key] = self.layout(plan, block).parameter_share(block.tensor[parameter[1]])
        return self._shares[key]

    def layout(self, plan: Plan, block: Block) -> BlockLayout:
        """Return a block under the plan's shardings."""
        shardings = {sharding.operator: sharding for sharding in plan.shardings}
        return BlockLayout(block, plan.mesh, shardings, plan.microbatch)

    def tensor_shape(self, plan: Plan, rank_class: int) -> GroupShape:
        """Return how the tensor group of a class lies on the machine."""
        return self.classes(plan.mesh).shape(rank_class, TENSOR)
