"""Tables of ticks of the parts of a step, each computed once for all plans that share it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.lowering.costs.kinds import Division
from meshwise.strategies.lowering.costs.optimizer import SQUARES, Parameters, norm_ticks, optimizer_ticks
from meshwise.strategies.lowering.costs.stage import BlockCost, Machine, Rank, StageCosts
from meshwise.strategies.lowering.costs.weights import summed_share
from meshwise.strategies.lowering.rank_classes.placement import BACKWARD, FORWARD, NORM
from meshwise.strategies.lowering.tasks.data_parallel import (
    bucket_limit,
    buckets,
    reduced_bytes,
    reduces_in_buckets,
    reduction,
)
from meshwise.strategies.plan.mesh import DATA, EXPERT_DATA, OPERATOR_AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

OfRank = Callable[[Accelerator, Training, Plan, Parameters], int]
"""Returns the ticks of an update or a read on a device, with the parameters that a rank holds."""


class Passes(NamedTuple):
    """Ticks of a forward and of a backward on one rank, for every kind of stage."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Sends(NamedTuple):
    """Ticks in which every stage sends activations to the next one and gradients to the previous one; 0 for none."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Bucket(NamedTuple):
    """When and how a bucket of gradients leaves.

    ``num_blocks`` is the number of blocks of the stage's backward after which it leaves, ``parameters`` its elements,
    and ``kind`` that of the groups that reduce it.
    """

    blocks: int
    parameters: int
    kind: str


class Ending(NamedTuple):
    """Ticks of what follows the passes.

    Parameters
    ----------
    bucket_reductions
        For every stage, the reduction of each bucket that leaves beneath backward.
    late_reductions
        For every pipeline position, the reduction of all gradients after the last backward; 0 for none.
    replicated_sums
        For every pipeline position, the sum of gradients of parameters that ranks have whole; 0 for none.
    optimizer, gather
        For every pipeline position, the update of the parameters, and their gather; 0 for none.
    squares
        For every pipeline position, the read of the gradients for their norm; 0 for none.
    norm
        The sum of the norm over all positions, which then go on together; empty without clipping.
    """

    leaving: tuple[tuple[int, ...], ...]
    late: tuple[int, ...]
    replicated: tuple[int, ...]
    optimizer: tuple[int, ...]
    gather: tuple[int, ...]
    squares: tuple[int, ...]
    norm: tuple[int, ...]


class Durations:
    """Tables of ticks from the costs of one problem; where rank classes at a position differ, of the fastest one."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self._passes: dict[tuple[Division, int, object], Passes] = {}
        self._sends: dict[tuple[object, ...], Sends] = {}
        self._endings: dict[tuple[object, ...], Ending] = {}
        self._gathers: dict[tuple[Machine, Division, tuple[int, ...], int], tuple[tuple[int, ...], ...]] = {}
        self._buckets: dict[tuple[Division, int, tuple[int, ...], int, bool], tuple[tuple[Bucket, ...], ...]] = {}

    def passes(self, plan: Plan, rank: Rank) -> Passes:
        """Return the ticks of all passes on a rank."""
        made = self.costs.division(plan)
        key = (made, self.costs.blocks.how(plan), rank.key)
        if key not in self._passes:
            kinds = [self.runs(plan, made, kind, rank) for kind in range(len(made.kinds))]
            forward = (sum(count * cost.forward_ticks for cost, count in runs) for runs in kinds)
            backward = (sum(count * cost.backward_ticks for cost, count in runs) for runs in kinds)
            self._passes[key] = Passes(tuple(forward), tuple(backward))
        return self._passes[key]

    def runs(self, plan: Plan, made: Division, kind: int, rank: Rank) -> list[tuple[BlockCost, int]]:
        """Return the costs of a stage's blocks on a rank in order, each with how often it occurs in a row."""
        blocks = self.costs.blocks
        runs = blocks.runs(plan, made.kinds[kind], made.recompute(plan, kind))
        return [(blocks.cost(plan, name, rank, how), n) for name, n, how in runs]

    def sends(self, plan: Plan, machine: Machine) -> Sends:
        """Return the ticks of the transfers between stages; of a V, those on its way down."""
        if not isinstance(plan.microbatch, int):
            # Microbatches differ by rank: the smallest size gives the least ticks, which keeps the tables lower bounds.
            each = [self.sends(plan.even(size), machine) for size in plan.sizes]
            return Sends(*(tuple(map(min, zip(*rows, strict=True))) for rows in zip(*each, strict=True)))
        made = self.costs.division(plan)
        key = (machine, made, plan.positions, self.costs.blocks.cut(plan), plan.microbatch, plan.slices_boundaries)
        if key not in self._sends:
            kinds = [plan.boundary_part(self.costs.boundary_bytes(plan, stage)) for stage in made.first_of]
            sizes = [kinds[kind] for kind in (made.kind_of if plan.looped else made.kind_of[: plan.pipeline])[:-1]]
            if plan.pipeline == 1:
                self._sends[key] = Sends(*[(0,) * len(made.kind_of)] * 2)
            else:
                forward = _send_ticks(machine, FORWARD, 0, sizes)
                self._sends[key] = Sends((*forward, 0), (0, *_send_ticks(machine, BACKWARD, 1, sizes)))
        return self._sends[key]

    def buckets(self, plan: Plan, machine: Machine) -> tuple[tuple[Bucket, ...], ...]:
        """Return the buckets of every kind of stage, in the order in which backward fills them."""
        made = self.costs.division(plan)
        twice = plan.zero >= 3  # each of two blocks that use a tied parameter is a unit that has it
        key = (made, self.costs.blocks.cut(plan), plan.positions, bucket_limit(plan), twice)
        if key not in self._buckets:
            rank = machine.ranks[0][0]  # parameters are the same on all
            self._buckets[key] = tuple(self._filled(plan, stage, rank) for stage in made.first_of)
        return self._buckets[key]

    def _filled(self, plan: Plan, stage: int, rank: Rank) -> tuple[Bucket, ...]:
        """Return the buckets of a stage."""
        cost, training = self.costs.stage(plan, stage, rank), self.costs.problem.training
        names = plan.stages[stage].blocks
        found = buckets(names, cost, training.gradient_bytes, bucket_limit(plan))
        return tuple(Bucket(len(names) - names.index(b.last), b.parameters, b.kind) for b in found)

    def ending(self, plan: Plan, machine: Machine) -> Ending:
        """Return the ticks of what follows the passes."""
        early = reduces_in_buckets(self.costs.problem.cluster, plan)
        made, cut = self.costs.division(plan), self.costs.blocks.cut(plan)
        key = (machine, made, plan.positions, cut, plan.zero, early, bucket_limit(plan))
        if key not in self._endings:
            training, held = self.costs.problem.training, self.costs.held(plan)
            experts = [each.experts for each in held.positions]
            dense = [each.elements - each.experts for each in held.positions]
            shared = ((DATA, dense), (EXPERT_DATA, experts))
            late, gather = [0] * plan.pipeline, [0] * plan.pipeline
            for kind, counts in shared if plan.replicas > 1 and not early else ():
                _add(late, _data_ticks(machine, kind, reduction(plan), counts, reduced_bytes(training, plan)))
            for kind, counts in shared if plan.replicas > 1 and plan.zero in (1, 2) else ():
                _add(gather, _data_ticks(machine, kind, Collective.ALL_GATHER, counts, training.updated_bytes))
            summed = [0] * plan.pipeline
            for axis, parts in zip(
                OPERATOR_AXES, zip(*(each.replicated for each in held.positions), strict=True), strict=True
            ):
                shares = [summed_share(plan, elements) for elements in parts]
                _add(summed, _data_ticks(machine, axis, Collective.ALL_REDUCE, shares, training.gradient_bytes))
            leaving = self._leaving(plan, machine) if early else ((),) * len(plan.stages)
            optimizer, norm = self._held_ticks(plan, machine, optimizer_ticks), self._norm(machine)
            squares = self._held_ticks(plan, machine, norm_ticks) if norm else (0,) * plan.pipeline
            self._endings[key] = Ending(leaving, tuple(late), tuple(summed), optimizer, tuple(gather), squares, norm)
        return self._endings[key]

    def gathers(self, plan: Plan, machine: Machine) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks in which ZeRO 3 gathers its units, in the order of backward."""
        made = self.costs.division(plan)
        key = (machine, made, plan.positions, self.costs.blocks.cut(plan))
        if key not in self._gathers:
            size, kinds = self.costs.problem.training.parameter_bytes, self.buckets(plan, machine)
            found = self._of_buckets(plan, machine, Collective.ALL_GATHER, size)
            rows = ((kinds[kind], ticks) for kind, ticks in zip(made.kind_of, found, strict=True))
            self._gathers[key] = tuple(_by_unit(*row) for row in rows)
        return self._gathers[key]

    def _leaving(self, plan: Plan, machine: Machine) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks in which its buckets are reduced."""
        size = reduced_bytes(self.costs.problem.training, plan)
        return self._of_buckets(plan, machine, reduction(plan), size)

    def _of_buckets(
        self, plan: Plan, machine: Machine, collective: Collective, size: float
    ) -> tuple[tuple[int, ...], ...]:
        """Return, for every stage, the ticks of a collective on each bucket, with ``size`` bytes an element."""
        kinds = self.buckets(plan, machine)
        ticks: dict[tuple[int, int], tuple[int, ...]] = {}
        result = []
        for position, kind in zip(plan.positions, self.costs.division(plan).kind_of, strict=True):
            if (kind, position) not in ticks:
                ticks[kind, position] = tuple(
                    _shared_ticks(machine, bucket.kind, collective, position, float(bucket.parameters * size))
                    for bucket in kinds[kind]
                )
            result.append(ticks[kind, position])
        return tuple(result)

    def _norm(self, machine: Machine) -> tuple[int, ...]:
        """Return the ticks of the sum of the norm; empty without clipping."""
        if not self.costs.problem.training.gradient_clipping:
            return ()
        if NORM not in machine.table.tables:
            return (0,)
        groups = machine.different(NORM, SQUARES[0])[0]
        return (machine.least_ticks(NORM, groups, *SQUARES),)

    def _held_ticks(self, plan: Plan, machine: Machine, of_rank: OfRank) -> tuple[int, ...]:
        """Return, for every position, the least of ``count_ticks`` over its ranks."""
        training, held = self.costs.problem.training, self.costs.held(plan)
        ticks: dict[tuple[object, ...], int] = {}
        result = []
        for ranks, parameters in zip(machine.ranks, held.positions, strict=True):
            key = (*(rank.key for rank in ranks), parameters)
            if key not in ticks:
                ticks[key] = min(of_rank(rank.accelerator, training, plan, parameters) for rank in ranks)
            result.append(ticks[key])
        return tuple(result)


def _send_ticks(machine: Machine, kind: str, first: int, sizes: Sequence[float]) -> tuple[int, ...]:
    """Return the ticks in which the stages from ``first_stage`` on send so many bytes."""
    groups = machine.different(kind, Collective.SEND)
    keys = [(groups[stage % len(groups)], size) for stage, size in enumerate(sizes, first)]
    return _looked_up(machine, kind, Collective.SEND, keys)


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
    return machine.least_ticks(kind, machine.different(kind, collective)[position], collective, size)


def _by_unit(filled: Iterable[Bucket], ticks: Iterable[int]) -> tuple[int, ...]:
    """Return the ticks of the buckets of each unit together."""
    units: dict[int, int] = {}
    for bucket, each in zip(filled, ticks, strict=True):
        units[bucket.blocks] = units.get(bucket.blocks, 0) + each
    return tuple(units.values())


def _add(total: list[int], more: Iterable[int]) -> None:
    """Add ticks by position."""
    for index, ticks in enumerate(more):
        total[index] += ticks


def _looked_up(
    machine: Machine, kind: str, collective: Collective, keys: Sequence[tuple[tuple[int, ...], float]]
) -> tuple[int, ...]:
    """Return the least ticks of a collective for pairs of groups and bytes, different pairs once."""
    ticks = {key: machine.least_ticks(kind, key[0], collective, key[1]) for key in dict.fromkeys(keys)}
    return tuple(ticks[key] for key in keys)
