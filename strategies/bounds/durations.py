"""Tables of ticks of the parts of a step, each computed once for all plans that share it."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.memo import memoise
from meshwise.strategies.lowering.costs.keys import PassKey, RunKey, StageKey
from meshwise.strategies.lowering.costs.kinds import Runs
from meshwise.strategies.lowering.costs.optimizer import NORM_SUM, Parameters
from meshwise.strategies.lowering.costs.weights import summed_elements
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import BlockPasses, StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import (
    bucket_limit,
    build_buckets,
    choose_reduction,
    reduces_in_buckets,
    reduction_bytes,
)
from meshwise.strategies.lowering.timing import norm_ticks, optimizer_ticks
from meshwise.strategies.plan.mesh import BACKWARD, DATA, EXPERT_DATA, FORWARD, NORM, OPERATOR_AXES, tied_kind
from meshwise.strategies.plan.plan import Plan, SharedStates, StateKey
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import StageRecompute

CountTicks = Callable[[Accelerator, Training, SharedStates, Parameters], int]
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
    together; empty without clipping. ``tied_sums`` sum the gradients of each parameter that two positions keep.
    """

    bucket_reductions: tuple[tuple[int, ...], ...]
    late_reductions: tuple[int, ...]
    replicated_sums: tuple[int, ...]
    optimizer: tuple[int, ...]
    gather: tuple[int, ...]
    squares: tuple[int, ...]
    norm: tuple[int, ...]
    tied_sums: tuple[int, ...]


class TickTables:
    """Tables of ticks from the costs of one problem; where rank classes at a position differ, of the fastest one."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.training = costs, costs.problem.training

    @memoise
    def count_pass_ticks(self, passes: PassKey, stages: StageKey, rank: RankProfile) -> PassTicks:
        """Return the ticks of all passes on a rank."""
        kinds = [self.list_block_passes(passes, stages, kind, rank) for kind in range(len(stages.kinds.kinds))]
        forward = (sum(count * block.forward.ticks for block, count in runs) for runs in kinds)
        backward = (sum(count * block.backward.ticks for block, count in runs) for runs in kinds)
        return PassTicks(tuple(forward), tuple(backward))

    def list_block_passes(
        self, passes: PassKey, stages: StageKey, kind: int, rank: RankProfile
    ) -> list[tuple[BlockPasses, int]]:
        """Return the passes of a stage's blocks on a rank in order, each with how often its block occurs in a row."""
        recompute = stages.find_recompute(passes.recompute, kind)
        return self.list_stage_passes(passes.run, stages.kinds.kinds[kind], recompute, rank)

    def list_stage_passes(
        self, run: RunKey, runs: Runs, recompute: StageRecompute, rank: RankProfile
    ) -> list[tuple[BlockPasses, int]]:
        """Return the passes of blocks in order on a rank, each with how often its block occurs in a row.

        ``recompute`` is what is computed again of their layers.
        """
        run = self.costs.find_batch_run(run, rank.batch)
        rows = self.costs.blocks.list_runs(run.cut, runs, recompute)
        return [(self.costs.block_passes(run, name, choice, rank), count) for name, count, choice in rows]

    def send_ticks(self, plan: Plan, machine: Machine) -> SendTicks:
        """Return the ticks of the transfers between stages; of a V, those on its way down.

        Where microbatches differ by rank the smallest size gives the least ticks, which keeps the tables lower bounds.
        """
        stages = self.costs.find_keys(plan).stages
        rows = [self.list_sends(machine, stages, size, plan.looped, plan.slices_boundaries) for size in plan.sizes]
        if len(rows) == 1:
            return rows[0]
        return SendTicks(*(tuple(map(min, zip(*columns, strict=True))) for columns in zip(*rows, strict=True)))

    @memoise
    def list_sends(self, machine: Machine, stages: StageKey, sequences: int, looped: bool, slices: bool) -> SendTicks:
        """Return the ticks of the transfers between stages of microbatches of a size, in slices or whole."""
        kinds = stages.kinds
        if stages.num_positions == 1:
            return SendTicks(*[(0,) * len(kinds.kind_of)] * 2)
        kind_sizes = [self.costs.count_sent_bytes(stages, stage, sequences, slices) for stage in kinds.first_stages]
        kind_of = kinds.kind_of if looped else kinds.kind_of[: stages.num_positions]
        sizes = [kind_sizes[kind] for kind in kind_of[:-1]]
        forward = _list_send_ticks(machine, FORWARD, 0, sizes)
        return SendTicks((*forward, 0), (0, *_list_send_ticks(machine, BACKWARD, 1, sizes)))

    @memoise
    def list_buckets(self, stages: StageKey, states: StateKey) -> tuple[tuple[BucketEnd, ...], ...]:
        """Return the buckets of every kind of stage, in the order in which backward fills them."""
        rows = []
        for stage in stages.kinds.first_stages:
            names = stages.stages[stage].blocks
            # With ZeRO 3 each of two blocks that use a tied parameter is a unit that has it.
            elements = self.costs.list_gradients(stages, stage, states.zero >= 3)
            gradients, experts = zip(*elements, strict=True) if elements else ((), ())
            buckets = build_buckets(names, gradients, experts, self.training.gradient_bytes, bucket_limit(states))
            ends = (len(names) - names.index(bucket.last_block) for bucket in buckets)
            rows.append(tuple(BucketEnd(end, row.parameters, row.kind) for end, row in zip(ends, buckets, strict=True)))
        return tuple(rows)

    def ending_ticks(self, plan: Plan, machine: Machine) -> EndingTicks:
        """Return the ticks of what follows the passes."""
        _, stages, states = self.costs.find_keys(plan)
        return self.count_ending_ticks(machine, stages, states)

    @memoise
    def count_ending_ticks(self, machine: Machine, stages: StageKey, states: StateKey) -> EndingTicks:
        """Return the ticks of what follows the passes."""
        training, positions = self.training, self.costs.count_parameters(stages).positions
        reduces_early = reduces_in_buckets(self.costs.problem.cluster, states)
        reduction, size = choose_reduction(states), reduction_bytes(training, states)
        expert_counts = [parameters.expert_elements for parameters in positions]
        dense_counts = [parameters.elements - parameters.expert_elements for parameters in positions]
        late_ticks, gather_ticks, summed_ticks = ([0] * stages.num_positions for _ in range(3))
        for kind, counts in ((DATA, dense_counts), (EXPERT_DATA, expert_counts)) if states.replicas > 1 else ():
            if not reduces_early:
                _add_ticks(late_ticks, _data_ticks(machine, kind, reduction, counts, size))
            if states.zero in (1, 2):
                ticks = _data_ticks(machine, kind, Collective.ALL_GATHER, counts, training.updated_bytes)
                _add_ticks(gather_ticks, ticks)
        axis_parts = zip(*(parameters.replicated_elements for parameters in positions), strict=True)
        for axis, parts in zip(OPERATOR_AXES, axis_parts, strict=True):
            shares = [summed_elements(states, elements) for elements in parts]
            ticks = _data_ticks(machine, axis, Collective.ALL_REDUCE, shares, training.gradient_bytes)
            _add_ticks(summed_ticks, ticks)
        bucket_ticks: tuple[tuple[int, ...], ...] = ((),) * len(stages.stages)
        if reduces_early:
            bucket_ticks = self._list_bucket_ticks(machine, stages, states, reduction, size)
        optimizer, norm = (
            self._list_parameter_ticks(machine, stages, states, optimizer_ticks),
            self._list_norm_ticks(machine),
        )
        squares = self._list_parameter_ticks(machine, stages, states, norm_ticks) if norm else (0,) * len(positions)
        return EndingTicks(
            bucket_ticks,
            tuple(late_ticks),
            tuple(summed_ticks),
            optimizer,
            tuple(gather_ticks),
            squares,
            norm,
            self._list_tied_ticks(machine, stages, states),
        )

    def gather_ticks(self, plan: Plan, machine: Machine) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks in which ZeRO 3 gathers its units, in the order of backward."""
        _, stages, states = self.costs.find_keys(plan)
        return self._list_gather_ticks(machine, stages, states)

    @memoise
    def _list_gather_ticks(self, machine: Machine, stages: StageKey, states: StateKey) -> tuple[tuple[int, ...], ...]:
        size, kinds = self.training.parameter_bytes, self.list_buckets(stages, states)
        bucket_ticks = self._list_bucket_ticks(machine, stages, states, Collective.ALL_GATHER, size)
        rows = ((kinds[kind], ticks) for kind, ticks in zip(stages.kinds.kind_of, bucket_ticks, strict=True))
        return tuple(_sum_by_unit(*row) for row in rows)

    def _list_bucket_ticks(
        self, machine: Machine, stages: StageKey, states: StateKey, collective: Collective, size: float
    ) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks of a collective on each bucket, with ``size`` bytes an element."""
        kinds = self.list_buckets(stages, states)
        sites = list(zip(stages.kinds.kind_of, stages.positions, strict=True))
        ticks = {}
        for kind, position in dict.fromkeys(sites):
            keys = [(bucket.kind, bucket.parameters) for bucket in kinds[kind]]
            # most buckets of a stage are alike
            key_ticks = {
                key: _shared_ticks(machine, key[0], collective, position, float(key[1] * size))
                for key in dict.fromkeys(keys)
            }
            ticks[kind, position] = tuple(key_ticks[key] for key in keys)
        return tuple(ticks[site] for site in sites)

    def _list_tied_ticks(self, machine: Machine, stages: StageKey, states: StateKey) -> tuple[int, ...]:
        """Return the ticks of the sum of each tied parameter's gradients, of which shards are summed where shared."""
        shards = states.shards if states.zero >= 2 else 1
        result = []
        for first_position, second_position, elements in self.costs.list_tied_elements(stages):
            kind = tied_kind(first_position, second_position)
            size = float(ceil(elements / shards) * self.training.gradient_bytes)
            groups = machine.list_distinct_groups(kind, Collective.ALL_REDUCE)[first_position]
            result.append(machine.least_ticks(kind, groups, Collective.ALL_REDUCE, size))
        return tuple(result)

    def _list_norm_ticks(self, machine: Machine) -> tuple[int, ...]:
        """Return the ticks of the sum of the norm; empty without clipping."""
        if not self.training.gradient_clipping:
            return ()
        if NORM not in machine.table.tables:
            return (0,)
        groups = machine.list_distinct_groups(NORM, NORM_SUM[0])[0]
        return (machine.least_ticks(NORM, groups, *NORM_SUM),)

    def _list_parameter_ticks(
        self, machine: Machine, stages: StageKey, states: StateKey, count_ticks: CountTicks
    ) -> tuple[int, ...]:
        """Return, for every position, the least of ``count_ticks`` over its ranks."""
        sites = list(zip(machine.ranks, self.costs.count_parameters(stages).positions, strict=True))
        ticks = {
            (ranks, parameters): min(count_ticks(rank.accelerator, self.training, states, parameters) for rank in ranks)
            for ranks, parameters in dict.fromkeys(sites)
        }
        return tuple(ticks[site] for site in sites)


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
