"""How passes are cut into parts, and gradients into buckets."""

from functools import cached_property

from simulator.collective_kinds import Collective
from strategies.lowering.contention import Passes, passes
from strategies.lowering.data import Bucket, at_once, bucket_limit, buckets, fillings, overlaps, reduces_in_buckets
from strategies.lowering.fully_sharded import Changes, changes, copy_ticks, sharing
from strategies.lowering.machine import Machine, Rank
from strategies.lowering.offload import OnHost
from strategies.lowering.on_host import on_host
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.pieces import Cut, Granularity, Part, known_parts
from strategies.lowering.stage import StageCost, StageCosts
from strategies.lowering.step import Step, communication
from strategies.lowering.variant import (
    BACKWARD_PASS,
    FIRST,
    FORWARD_PASS,
    INPUTS,
    JOINED,
    LAST_BACKWARD,
    LAST_WEIGHTS,
    WEIGHTS,
    kind_of,
)
from strategies.lowering.weights import Unit
from strategies.mesh import OPERATOR_AXES, TENSOR
from strategies.plan import Plan, blocks_on_host
from strategies.schedule import MAKES_GRADIENTS, ActionKind


class Cuts:
    """The passes of one plan in parts, and its gradients in buckets, each worked out once.

    Parameters
    ----------
    machine
        The rank classes of the plan.
    granularity
        What becomes one task where nothing asks for less.
    """

    def __init__(self, costs: StageCosts, plan: Plan, machine: Machine, granularity: Granularity) -> None:
        self.costs, self.plan, self.machine, self.granularity = costs, plan, machine, granularity
        self.cluster, self.training = costs.problem.cluster, costs.problem.training
        self.overlaps = overlaps(self.cluster, plan)
        self.in_buckets = reduces_in_buckets(self.cluster, plan) or any(plan.offload.parameters)
        self.sharing = sharing(self.cluster, self.training, plan)
        self.tied = costs.tied(plan)
        self.plan_costs = costs.of(plan)
        self._parts: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._parts_of: dict[tuple[int, int, int], tuple[Part, ...]] = {}
        self._buckets: dict[int, tuple[Bucket, ...]] = {}

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.plan.positions

    @cached_property
    def on_host(self) -> tuple[OnHost, ...]:
        """What the ranks of every position keep on their hosts."""
        return on_host(self.costs, self.plan)

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """For every position, how its passes run; a collective that a host waits for is a task of its own."""
        if self.training.conventions.waits_for_collectives and self.machine.launches:
            return (Passes.APART,) * self.plan.pipeline
        every = zip(*(each.replicated for each in self.plan_costs.held.positions), strict=True)
        replicated = [axis for axis, parts in zip(OPERATOR_AXES, every, strict=True) if any(parts)]
        return passes(self.machine, self.plan, self.in_buckets, self.tied, replicated, self._drifts)

    def _drifts(self, position: int) -> bool:
        """Return whether some block at a position has a pass whose collectives all run beside something else.

        A pass without collectives starts no drift: its ranks take the same time, one after the other or together.
        """
        stages = [cost for cost, at in zip(self.plan_costs.stages, self.positions, strict=True) if at == position]
        blocks = {id(block): block for stage in stages for block in stage.blocks}.values()
        kinds = (FORWARD_PASS, *((INPUTS, WEIGHTS) if self.plan.splits_backward else (BACKWARD_PASS,)))
        passes_of_blocks = (block.steps_of(kind_of(kind)) for block in blocks for kind in kinds)
        collectives = ([step for step in steps if step.collective] for steps in passes_of_blocks)
        return any(steps and all(step.beside for step in steps) for steps in collectives)

    def cut(self, stage: int, variant: int) -> Cut:
        """Return where the passes of a stage are cut."""
        plan, which, shared = self.plan, variant % JOINED, self.sharing
        last, backward = which in (LAST_BACKWARD, LAST_WEIGHTS), which != FORWARD_PASS
        meets = plan.chunks > 1 or plan.splits_backward or shared.gradients
        away = self.plan_costs.stages[stage].away
        in_turns = plan.overlaps_passes and shared.gradients  # either pass computes beneath what the other reduces
        beneath = last or (backward and meets) or shared.parameters or away or plan.asynchronous or in_turns
        every = self.cluster.overlap_slowdown > 1 and (self.overlaps or in_turns) and beneath
        ends: frozenset[str] = frozenset()
        if shared.parameters or away:
            ends = frozenset(plan.stages[stage].blocks)
        elif self.in_buckets and (last or (shared.gradients and kind_of(which) in MAKES_GRADIENTS)):
            ends = frozenset(bucket.last for bucket in self.buckets(stage))
        apart = self.passes[self.positions[stage]] is Passes.APART
        return Cut(every or self.granularity is Granularity.OPERATOR, apart, ends, shared.parameters)

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Return the buckets of a stage's gradients."""
        if stage not in self._buckets:
            cost = self.plan_costs.stages[stage]
            names = self.plan.stages[stage].blocks
            self._buckets[stage] = buckets(names, cost, self.training.gradient_bytes, bucket_limit(self.plan))
        return self._buckets[stage]

    def parts(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return a pass of a stage on a rank class in parts."""
        if (stage, variant, rank_class) not in self._parts_of:
            self._parts_of[stage, variant, rank_class] = self._parts_on(stage, variant, rank_class)
        return self._parts_of[stage, variant, rank_class]

    def _parts_on(self, stage: int, variant: int, rank_class: int) -> tuple[Part, ...]:
        """Return the same; rank classes of equal costs share it."""
        rank = self.machine.rank(rank_class)
        key = (stage, variant, rank.key)
        if key not in self._parts:
            cost = self.costs.stage(self.plan, stage, rank)
            cost = cost.beginning if variant >= FIRST else cost
            cut, held = self.cut(stage, variant), self._besides(stage, variant, cost)
            names, before = self.plan.stages[stage].blocks, self.before(stage, variant, rank)
            copies = tuple(copy_ticks(rank.accelerator, each.copied) for each in held)
            self._parts[key] = known_parts(names, cost, stage, kind_of(variant), cut, rank.launch, before, held, copies)
        return self._parts[key]

    def _besides(self, stage: int, variant: int, cost: StageCost) -> tuple[Changes, ...]:
        """Return what the blocks of a pass take and give back of gathered parameters and whole gradients."""
        begins = self.costs.begun_elements(self.plan, stage) if variant >= FIRST else ()
        if not self.sharing.gradients:
            turned = (0,) * len(cost.blocks)
            return changes(self.sharing, self.training, variant, turned, (), kept=begins) if begins else ()
        blocks, shared, away = cost.blocks, self.plan.shards > 1, blocks_on_host(self.plan, stage)
        moving = blocks if shared else blocks[:away]
        still = (0,) * (len(blocks) - len(moving))
        elements = [*(block.parameters for block in moving), *still]
        experts = [*(block.experts for block in moving), *still]
        filled = fillings(elements[::-1], experts[::-1], self.training.gradient_bytes, bucket_limit(self.plan))
        shards = [updated_parameters(self.plan, block.parameters, block.experts) for block in blocks[:away]]
        shards = [*shards, *(0,) * (len(blocks) - away)] if shared and away else []
        undeferred = [*(block.undeferred for block in moving), *still]
        units = [*(block.unit for block in moving), *(Unit() for _ in still)]
        turn = 1 if kind_of(variant) is ActionKind.FORWARD else -1
        sizes = [unit.size for unit in units]
        of_pass = sizes[::turn], at_once(filled, units[::-1]), shards[::turn], undeferred[::-1], begins
        return changes(self.sharing, self.training, variant, *of_pass)

    def before(self, stage: int, variant: int, rank: Rank) -> tuple[Step, ...]:
        """Return the gather of the slices that arrive from another stage, if there is one."""
        tensor = rank.groups.get(TENSOR)
        arrives = stage - 1 if kind_of(variant) is ActionKind.FORWARD else stage
        if kind_of(variant) is ActionKind.WEIGHT:
            return ()
        if not 0 <= arrives < len(self.plan.stages) - 1 or tensor is None or not self.plan.slices_boundaries:
            return ()
        if self.positions[arrives] == self.positions[arrives + 1]:
            return ()
        size = float(self.costs.boundary_bytes(self.costs.seen(self.plan, rank.batch), arrives))
        return (communication(tensor, TENSOR, Collective.ALL_GATHER, size, f"boundary along {TENSOR}"),)
