"""Tables of ticks of the parts of a step, each computed once for all plans that share it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.lowering.costs.kinds import StageKinds
from meshwise.strategies.lowering.costs.optimizer import SQUARES, Parameters, norm_ticks, optimizer_ticks
from meshwise.strategies.lowering.costs.stage import BlockCost, Machine, RankProfile, StageCosts
from meshwise.strategies.lowering.costs.weights import summed_elements
from meshwise.strategies.lowering.rank_classes.placement import BACKWARD, FORWARD, NORM
from meshwise.strategies.lowering.tasks.data_parallel import (
    bucket_limit,
    build_buckets,
    choose_reduction,
    reduces_in_buckets,
    reduction_bytes,
)
from meshwise.strategies.plan.mesh import DATA, EXPERT_DATA, OPERATOR_AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

CountTicks = Callable[[Accelerator, Training, Plan, Parameters], int]
"""Returns the ticks of an update or a read on a device, with the parameters that a rank holds."""


class PassTicks(NamedTuple):
    """Ticks of a forward and of a backward on one rank, for every kind of stage."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class SendTicks(NamedTuple):
    """Ticks in which every stage sends activations to the next one and gradients to the previous one; 0 for none."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class BucketEnd(NamedTuple):
    """When and how a bucket of gradients leaves.

    ``num_blocks`` is the number of blocks of the stage's backward after which it leaves, ``parameters`` its elements,
    and ``kind`` that of the groups that reduce it.
    """

    num_blocks: int
    parameters: int
    kind: str


class EndingTicks(NamedTuple):
    """Ticks of what follows the passes: by pipeline position, 0 for none, but for buckets and the norm.

    ``bucket_reductions`` has for every stage the reduction of each bucket that leaves beneath backward.
    ``late_reductions`` are those of all gradients after the last backward, ``replicated_sums`` sum gradients of
    parameters that ranks have whole. ``optimizer`` and ``gather`` are the update of the parameters, and their gather;
    ``squares`` is the read of the gradients for their norm, and ``norm`` its sum over all positions, which then go on
    together; empty without clipping.
    """

    bucket_reductions: tuple[tuple[int, ...], ...]
    late_reductions: tuple[int, ...]
    replicated_sums: tuple[int, ...]
    optimizer: tuple[int, ...]
    gather: tuple[int, ...]
    squares: tuple[int, ...]
    norm: tuple[int, ...]


class TickTables:
    """Tables of ticks from the costs of one problem; where rank classes at a position differ, of the fastest one."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self._passes: dict[tuple[StageKinds, int, object], PassTicks] = {}
        self._sends: dict[tuple[object, ...], SendTicks] = {}
        self._endings: dict[tuple[object, ...], EndingTicks] = {}
        self._gathers: dict[tuple[Machine, StageKinds, tuple[int, ...], int], tuple[tuple[int, ...], ...]] = {}
        self._buckets: dict[tuple[StageKinds, int, tuple[int, ...], int, bool], tuple[tuple[BucketEnd, ...], ...]] = {}

    def pass_ticks(self, plan: Plan, rank: RankProfile) -> PassTicks:
        """Return the ticks of all passes on a rank."""
        stage_kinds = self.costs.stage_kinds(plan)
        key = (stage_kinds, self.costs.blocks.cost_key(plan), rank.key)
        if key not in self._passes:
            kinds = [self.list_block_costs(plan, stage_kinds, kind, rank) for kind in range(len(stage_kinds.kinds))]
            forward = (sum(count * cost.forward_ticks for cost, count in runs) for runs in kinds)
            backward = (sum(count * cost.backward_ticks for cost, count in runs) for runs in kinds)
            self._passes[key] = PassTicks(tuple(forward), tuple(backward))
        return self._passes[key]

    def list_block_costs(
        self, plan: Plan, stage_kinds: StageKinds, kind: int, rank: RankProfile
    ) -> list[tuple[BlockCost, int]]:
        """Return the costs of a stage's blocks on a rank in order, each with how often it occurs in a row."""
        blocks = self.costs.blocks
        runs = blocks.list_runs(plan, stage_kinds.kinds[kind], stage_kinds.recompute(plan, kind))
        return [(blocks.cost(plan, name, rank, recompute_choice), n) for name, n, recompute_choice in runs]

    def send_ticks(self, plan: Plan, machine: Machine) -> SendTicks:
        """Return the ticks of the transfers between stages; of a V, those on its way down."""
        if not isinstance(plan.microbatch, int):
            # Microbatches differ by rank: the smallest size gives the least ticks, which keeps the tables lower bounds.
            even_sends = [self.send_ticks(plan.with_microbatch(size), machine) for size in plan.sizes]
            return SendTicks(*(tuple(map(min, zip(*rows, strict=True))) for rows in zip(*even_sends, strict=True)))
        stage_kinds, cut_key = self.costs.stage_kinds(plan), self.costs.blocks.cut_key(plan)
        key = (machine, stage_kinds, plan.positions, cut_key, plan.microbatch, plan.slices_boundaries)
        if key not in self._sends:
            if plan.pipeline == 1:
                self._sends[key] = SendTicks(*[(0,) * len(stage_kinds.kind_of)] * 2)
            else:
                boundaries = [self.costs.boundary_bytes(plan, stage) for stage in stage_kinds.first_stages]
                kinds = stage_kinds.kind_of if plan.looped else stage_kinds.kind_of[: plan.pipeline]
                sizes = [plan.count_boundary_bytes(boundaries[kind]) for kind in kinds[:-1]]
                forward = _list_send_ticks(machine, FORWARD, 0, sizes)
                self._sends[key] = SendTicks((*forward, 0), (0, *_list_send_ticks(machine, BACKWARD, 1, sizes)))
        return self._sends[key]

    def list_buckets(self, plan: Plan, machine: Machine) -> tuple[tuple[BucketEnd, ...], ...]:
        """Return the buckets of every kind of stage, in the order in which backward fills them."""
        stage_kinds = self.costs.stage_kinds(plan)
        counts_twice = plan.zero >= 3  # each of two blocks that use a tied parameter is a unit that has it
        key = (stage_kinds, self.costs.blocks.cut_key(plan), plan.positions, bucket_limit(plan), counts_twice)
        if key not in self._buckets:
            rank = machine.ranks[0][0]  # parameters are the same on all
            rows = []
            for stage in stage_kinds.first_stages:
                names, cost = plan.stages[stage].blocks, self.costs.stage_cost(plan, stage, rank)
                buckets = build_buckets(names, cost, self.costs.problem.training.gradient_bytes, bucket_limit(plan))
                ends = (len(names) - names.index(bucket.last_block) for bucket in buckets)
                rows.append(
                    tuple(BucketEnd(end, row.parameters, row.kind) for end, row in zip(ends, buckets, strict=True))
                )
            self._buckets[key] = tuple(rows)
        return self._buckets[key]

    def ending_ticks(self, plan: Plan, machine: Machine) -> EndingTicks:
        """Return the ticks of what follows the passes."""
        reduces_early = reduces_in_buckets(self.costs.problem.cluster, plan)
        stage_kinds, cut_key = self.costs.stage_kinds(plan), self.costs.blocks.cut_key(plan)
        key = (machine, stage_kinds, plan.positions, cut_key, plan.zero, reduces_early, bucket_limit(plan))
        if key not in self._endings:
            training, positions = self.costs.problem.training, self.costs.plan_parameters(plan).positions
            expert_counts = [parameters.expert_elements for parameters in positions]
            dense_counts = [parameters.elements - parameters.expert_elements for parameters in positions]
            shared_counts = ((DATA, dense_counts), (EXPERT_DATA, expert_counts))
            late_ticks, gather_ticks, summed_ticks = ([0] * plan.pipeline for _ in range(3))
            for kind, counts in shared_counts if plan.replicas > 1 else ():
                if not reduces_early:
                    size = reduction_bytes(training, plan)
                    _add_ticks(late_ticks, _data_ticks(machine, kind, choose_reduction(plan), counts, size))
                if plan.zero in (1, 2):
                    size = training.updated_bytes
                    _add_ticks(gather_ticks, _data_ticks(machine, kind, Collective.ALL_GATHER, counts, size))
            axis_parts = zip(*(parameters.replicated_elements for parameters in positions), strict=True)
            for axis, parts in zip(OPERATOR_AXES, axis_parts, strict=True):
                shares, size = [summed_elements(plan, elements) for elements in parts], training.gradient_bytes
                _add_ticks(summed_ticks, _data_ticks(machine, axis, Collective.ALL_REDUCE, shares, size))
            bucket_ticks: tuple[tuple[int, ...], ...] = ((),) * len(plan.stages)
            if reduces_early:
                size = reduction_bytes(training, plan)
                bucket_ticks = self._list_bucket_ticks(plan, machine, choose_reduction(plan), size)
            optimizer, norm = self._list_parameter_ticks(plan, machine, optimizer_ticks), self._list_norm_ticks(machine)
            squares = self._list_parameter_ticks(plan, machine, norm_ticks) if norm else (0,) * plan.pipeline
            self._endings[key] = EndingTicks(
                bucket_ticks, tuple(late_ticks), tuple(summed_ticks), optimizer, tuple(gather_ticks), squares, norm
            )
        return self._endings[key]

    def gather_ticks(self, plan: Plan, machine: Machine) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks in which ZeRO 3 gathers its units, in the order of backward."""
        stage_kinds = self.costs.stage_kinds(plan)
        key = (machine, stage_kinds, plan.positions, self.costs.blocks.cut_key(plan))
        if key not in self._gathers:
            size, kinds = self.costs.problem.training.parameter_bytes, self.list_buckets(plan, machine)
            bucket_ticks = self._list_bucket_ticks(plan, machine, Collective.ALL_GATHER, size)
            rows = ((kinds[kind], ticks) for kind, ticks in zip(stage_kinds.kind_of, bucket_ticks, strict=True))
            self._gathers[key] = tuple(_sum_by_unit(*row) for row in rows)
        return self._gathers[key]

    def _list_bucket_ticks(
        self, plan: Plan, machine: Machine, collective: Collective, size: float
    ) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks of a collective on each bucket, with ``size`` bytes an element."""
        kinds = self.list_buckets(plan, machine)
        ticks: dict[tuple[int, int], tuple[int, ...]] = {}
        result = []
        for position, kind in zip(plan.positions, self.costs.stage_kinds(plan).kind_of, strict=True):
            if (kind, position) not in ticks:
                ticks[kind, position] = tuple(
                    _shared_ticks(machine, bucket.kind, collective, position, float(bucket.parameters * size))
                    for bucket in kinds[kind]
                )
            result.append(ticks[kind, position])
        return tuple(result)

    def _list_norm_ticks(self, machine: Machine) -> tuple[int, ...]:
        """Return the ticks of the sum of the norm; empty without clipping."""
        if not self.costs.problem.training.gradient_clipping:
            return ()
        if NORM not in machine.table.tables:
            return (0,)
        groups = machine.list_distinct_groups(NORM, SQUARES[0])[0]
        return (machine.least_ticks(NORM, groups, *SQUARES),)

    def _list_parameter_ticks(self, plan: Plan, machine: Machine, count_ticks: CountTicks) -> tuple[int, ...]:
        """Return, for every position, the least of ``count_ticks`` over its ranks."""
        training, plan_parameters = self.costs.problem.training, self.costs.plan_parameters(plan)
        ticks: dict[tuple[object, ...], int] = {}
        result = []
        for ranks, parameters in zip(machine.ranks, plan_parameters.positions, strict=True):
            key = (*(rank.key for rank in ranks), parameters)
            if key not in ticks:
                ticks[key] = min(count_ticks(rank.accelerator, training, plan, parameters) for rank in ranks)
            result.append(ticks[key])
        return tuple(result)


def _list_send_ticks(machine: Machine, kind: str, first_stage: int, sizes: Sequence[float]) -> tuple[int, ...]:
    """Return the ticks in which the stages from ``first_stage`` on send so many bytes."""
    groups = machine.list_distinct_groups(kind, Collective.SEND)
    keys = [(groups[stage % len(groups)], size) for stage, size in enumerate(sizes, first_stage)]
    ticks = {key: machine.least_ticks(kind, key[0], Collective.SEND, key[1]) for key in dict.fromkeys(keys)}
    return tuple(ticks[key] for key in keys)


def _data_ticks(
    machine: Machine, kind: str, collective: Collective, counts: Iterable[int], size: float
) -> tuple[int, ...]:
    """Return the ticks of a collective of groups of a kind at every position, with ``size`` bytes an element."""
    return tuple(
        _shared_ticks(machine, kind, collective, position, float(count * size)) for position, count in enumerate(counts)
    )


def _shared_ticks(machine: Machine, kind: str, collective: Collective, position: int, size: float) -> int:
    """Return the least ticks of a collective of groups of a kind at a position; 0 where there are no groups."""
    if kind not in machine.table.tables:
        return 0
    return machine.least_ticks(kind, machine.list_distinct_groups(kind, collective)[position], collective, size)


def _sum_by_unit(bucket_list: Iterable[BucketEnd], ticks: Iterable[int]) -> tuple[int, ...]:
    """Return the ticks of the buckets of each unit together."""
    units: dict[int, int] = {}
    for bucket, bucket_ticks in zip(bucket_list, ticks, strict=True):
        units[bucket.num_blocks] = units.get(bucket.num_blocks, 0) + bucket_ticks
    return tuple(units.values())


def _add_ticks(total: list[int], terms: Iterable[int]) -> None:
    """Add ticks by position."""
    for index, ticks in enumerate(terms):
        total[index] += ticks
