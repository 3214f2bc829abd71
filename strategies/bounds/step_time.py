"""Lower bounds of a step's time: from a plan's schedule and costs alone, and for every plan of a problem.

The bound of a plan is the length of a path through its step; the bound of a problem is the time of all devices at
their peak.

An update whose optimizer states are on hosts takes at least as long as a rank's own copies, alone on their links. Its
stages are pipelined over equal chunks, each stage on a stream of its own
(`meshwise.strategies.lowering.costs.offload`). With c chunks and stages that take t ticks a chunk, the last chunk
leaves after at least ``sum(t) + (c - 1) max(t)``.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import BATCH, Operator
from meshwise.simulator.units import to_ticks
from meshwise.strategies.bounds.durations import TickTables
from meshwise.strategies.lowering.costs.keys import PassKey, StageKey
from meshwise.strategies.lowering.costs.offload import HostShare, host_elements, plan_update, update_bytes
from meshwise.strategies.lowering.costs.optimizer import Parameters
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.rank_classes.placement import host_phases
from meshwise.strategies.lowering.residents import schedule_updates
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.data_parallel import overlaps_gradients
from meshwise.strategies.lowering.tasks.ending import ENDING, Scope
from meshwise.strategies.lowering.timing import host_ticks
from meshwise.strategies.plan.offloading import HOST, HOST_KINDS, STEPS, UPDATE_CHUNKS, Offloading
from meshwise.strategies.plan.plan import Plan, SharedStates, StateKey
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.schedules.rule import Placement, ScheduleRule, WrittenRule
from meshwise.strategies.schedules.schedule import find_rule


def seconds_per_byte(cluster: Cluster) -> dict[str, float]:
    """Return the seconds of one byte to, on and from the host, moved by one rank alone; of all devices the least.

    0 where no link carries it.
    """
    network, devices = interconnect(cluster), np.arange(cluster.num_devices)[:, None]
    kind_seconds = {}
    for kind in HOST_KINDS:
        (phase,) = host_phases(cluster, kind, devices)
        slowest = np.zeros(len(devices))
        np.maximum.at(slowest, phase.group, phase.load / network.bandwidth[phase.link])
        kind_seconds[kind] = float(slowest.min())
    return kind_seconds


def update_ticks(
    training: Training,
    plan: SharedStates,
    parameters: Parameters,
    rates: dict[str, float],
    offload: Offloading,
    position: int,
) -> int:
    """Return a lower bound, in ticks, of the part of a rank's update in which its host takes part."""
    host_share = HostShare(offload.fraction_at("optimizer", position))
    chunk_ticks = [0]
    for number in plan_update(training, plan, parameters, host_share, offload.step).steps:
        kind = STEPS[number].kind
        seconds = update_bytes(training, plan, parameters, host_share, number) * rates.get(kind, 0.0)
        if kind == HOST and rates[HOST] == 0.0:
            chunk_ticks.append(host_ticks(host_elements(plan, parameters, host_share)))
        else:
            chunk_ticks.append(to_ticks(seconds))
    # a tick less a chunk: rates are rounded where they are simulated
    return max(sum(chunk_ticks) + (UPDATE_CHUNKS - 1) * max(chunk_ticks) - len(STEPS) * UPDATE_CHUNKS, 0)


class _PositionLoads(NamedTuple):
    """For every pipeline position, the least ticks of its first stage's passes, and the most work of all its stages.

    ``work`` has the gathers of parameters that passes wait for, and ``bare_work`` has none; ``first_gathers`` are those
    that the first pass may not wait for.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    work: tuple[int, ...]
    bare_work: tuple[int, ...]
    first_gathers: tuple[int, ...]


class StepBounds:
    """Lower bounds of the steps of one problem's plans."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.get_shared(TickTables)

    def lower_bound(self, plan: Plan) -> int:
        """Return a lower bound of a plan's step: the ticks of a path through it.

        For every pipeline rank: the first microbatch reaches it, it does all its work, the last gradient runs back to
        the first stage, and the optimizer steps. Where backward is split, the last gradient leaves before all work is
        done; where stages may be anywhere, neither way is known. Or it reduces gradients all the time.
        """
        machine = self.costs.machine(plan)
        if plan.asynchronous:
            return self._bound_unflushed(plan, machine)
        loads, tails = self._find_loads(plan, machine), self.tails(plan, machine)
        adjoins = plan.rule.placement is not Placement.WRITTEN
        sends = self.durations.send_ticks(plan, machine) if adjoins else None
        best = fill = drain = 0
        waits = self.reduction_waits(plan, machine)
        for position, work in enumerate(loads.work):
            if position and sends is not None:
                fill += loads.forward[position - 1] + sends.forward[position - 1]
                drain += loads.backward[position - 1] + sends.backward[position]
            drains = adjoins and not plan.splits_backward
            tail = max(tails[position], drain + tails[0]) if drains else tails[position]
            gather_bound = plan.num_microbatches * work - loads.first_gathers[position]
            reduction_bound = plan.num_microbatches * loads.bare_work[position]
            reduction_bound += (plan.num_microbatches - 1) * waits[position]
            best = max(best, fill + max(gather_bound, reduction_bound) + tail)  # a pass gathers while it waits
        if plan.schedule == "naive" and sends is not None:  # one microbatch after another, there and back
            round_trip = sum(map(sum, (loads.forward, sends.forward, loads.backward, sends.backward)))
            best = max(best, plan.num_microbatches * round_trip + tails[0])
        return max(best, self._bound_reductions(plan, machine)) if plan.zero >= 2 else best

    def _bound_unflushed(self, plan: Plan, machine: Machine) -> int:
        """Return the ticks in which the busiest rank does the work of one step, with its updates."""
        optimizer = self.durations.ending_ticks(plan, machine).optimizer
        device_updates = (
            (0,) * plan.pipeline if any(plan.offload.optimizer) else optimizer
        )  # the rest runs beneath passes
        is_late, tails = schedule_updates(self.costs, plan).is_late, self.tails(plan, machine)
        columns = zip(self._find_loads(plan, machine).work, is_late, device_updates, tails, strict=True)
        return max(
            plan.num_microbatches * work + plan.updates * (device_update if late else tail)
            for work, late, device_update, tail in columns
        )

    def _find_loads(self, plan: Plan, machine: Machine) -> _PositionLoads:
        """Return the least passes and the most work of every position."""
        passes, stages, _ = self.costs.find_keys(plan)
        gathers = self.durations.gather_ticks(plan, machine) if _regathers(plan) else ((),) * len(plan.stages)
        return self._load_positions(machine, passes, stages, plan.overlaps_passes, gathers)

    @memoise
    def _load_positions(
        self,
        machine: Machine,
        passes: PassKey,
        stages: StageKey,
        overlaps_passes: bool,
        gathers: tuple[tuple[int, ...], ...],
    ) -> _PositionLoads:
        """Return the least passes and the most work of every position.

        ``gathers`` are for every stage the ticks of those that every pass waits for, in the order of backward.
        """
        rows = []
        for position, ranks in enumerate(machine.ranks):
            position_stages = stages.by_position[position]
            pass_tables = [self.durations.count_pass_ticks(passes, stages, rank) for rank in ranks]
            loads = [(stages.kinds.kind_of[stage], gathers[stage]) for stage in position_stages]
            first_kind, first_gathers = loads[0]
            forward, backward = (min(row[first_kind] for row in table) for table in zip(*pass_tables, strict=True))
            if overlaps_passes:
                # Collectives of one pass may hide beneath compute of the other, so that only compute is sure to take
                # time.
                kinds = [kind for kind, _ in loads]
                work = bare_work = max(self._count_compute_ticks(passes, stages, kinds, rank) for rank in ranks)
            else:
                bare_work = max(
                    sum(table.forward[kind] + table.backward[kind] for kind, _ in loads) for table in pass_tables
                )
                work = max(
                    sum(
                        _bound_forward(table.forward[kind], unit_gathers)
                        + _bound_backward(table.backward[kind], unit_gathers)
                        for kind, unit_gathers in loads
                    )
                    for table in pass_tables
                )
            early_gathers = max(
                _bound_forward(table.forward[first_kind], first_gathers) - table.forward[first_kind]
                for table in pass_tables
            )
            rows.append((forward, backward, work, bare_work, early_gathers))
        return _PositionLoads(*zip(*rows, strict=True))

    def _bound_reductions(self, plan: Plan, machine: Machine) -> int:
        """Return the ticks of the rank that reduces most, one bucket after another, and of what follows."""
        ending = self.durations.ending_ticks(plan, machine)
        rows = (
            [ending.bucket_reductions[stage] for stage in plan.stages_at(position)] for position in range(plan.pipeline)
        )
        columns = zip(rows, ending.replicated_sums, ending.gather, strict=True)
        return max(
            plan.num_microbatches * sum(map(sum, stage_rows)) + sum(final_ticks) for stage_rows, *final_ticks in columns
        )

    def _count_compute_ticks(self, passes: PassKey, stages: StageKey, kinds: Sequence[int], rank: RankProfile) -> int:
        """Return the ticks in which a rank computes for one microbatch of stages of some kinds, without collectives."""
        runs = (run for kind in kinds for run in self.durations.list_block_passes(passes, stages, kind, rank))
        return sum(count * block.compute_ticks for block, count in runs)

    def reduction_waits(self, plan: Plan, machine: Machine) -> tuple[int, ...]:
        """Return the ticks in which passes of each position wait for reductions of gradients after every backward."""
        _, stages, states = self.costs.find_keys(plan)
        return self.list_reduction_waits(machine, stages, states, plan.schedule)

    @memoise
    def list_reduction_waits(
        self, machine: Machine, stages: StageKey, states: StateKey, schedule: str
    ) -> tuple[int, ...]:
        """Return the ticks in which passes of each position wait for reductions of gradients after every backward.

        The last bucket is reduced when all is computed, and the next pass waits for it; where nothing runs beneath
        passes, it waits for all buckets.
        """
        if find_rule(schedule).overlaps_passes or states.zero < 2:
            return (0,) * stages.num_positions
        bucket_reductions = self.durations.count_ending_ticks(machine, stages, states).bucket_reductions
        overlaps_backward = overlaps_gradients(self.costs.problem.cluster, states)
        stage_waits = [sum(row[-1:] if overlaps_backward else row) for row in bucket_reductions]
        positions = range(stages.num_positions)
        return tuple(sum(stage_waits[stage] for stage in stages.by_position[position]) for position in positions)

    def tails(self, plan: Plan, machine: Machine) -> tuple[int, ...]:
        """Return the ticks after each rank's last backward: last sums, the norm, the update, and the gather of ZeRO."""
        _, stages, states = self.costs.find_keys(plan)
        return self.list_tails(machine, stages, states, plan.schedule, plan.offload)

    @memoise
    def list_tails(
        self, machine: Machine, stages: StageKey, states: StateKey, schedule: str, offload: Offloading
    ) -> tuple[int, ...]:
        """Return the ticks after each rank's last backward where hosts keep what ``offload`` says."""
        ending = self.durations.count_ending_ticks(machine, stages, states)
        step_ticks, squares = ending.optimizer, ending.squares
        if any(offload.optimizer):
            step_ticks = self._list_host_updates(stages, states, offload)
        if any(offload.parameters):
            squares = (0,) * stages.num_positions  # the host reads gradients that are there
        last_reductions = (
            row[-1] if row else late_reduction
            for row, late_reduction in zip(
                _select_last(find_rule(schedule), stages, ending.bucket_reductions),
                ending.late_reductions,
                strict=False,
            )
        )
        columns = ending._asdict() | {
            "late_reductions": tuple(last_reductions),
            "optimizer": step_ticks,
            "squares": squares,
            "norm": (sum(ending.norm),) * stages.num_positions,
        }
        # Sums between two positions are left out, which keeps the ticks a lower bound.
        names = [name for phase in ENDING if phase.scope is not Scope.PAIR for name in phase.columns]
        return tuple(map(sum, zip(*(columns[name] for name in names), strict=True)))

    def _list_host_updates(self, stages: StageKey, states: StateKey, offload: Offloading) -> tuple[int, ...]:
        """Return the ticks of each position's update where hosts have optimizer states."""
        if any(offload.parameters):  # of which gradients are there as they are made
            return (0,) * stages.num_positions
        return tuple(
            update_ticks(self.costs.problem.training, states, parameters, self._rates, offload, position)
            for position, parameters in enumerate(self.costs.count_parameters(stages).positions)
        )

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Seconds of one byte to, on and from the host."""
        return seconds_per_byte(self.costs.problem.cluster)


def _select_last(
    rule: ScheduleRule, stages: StageKey, bucket_reductions: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Return, for every pipeline position, the reductions of the stage that ends backward last: the first one there.

    Where orders are written out and backward is split, any stage may end last: then those with the least last
    reduction.
    """
    if not isinstance(rule, WrittenRule):
        return bucket_reductions
    positions = range(stages.num_positions)
    tables = ([bucket_reductions[stage] for stage in stages.by_position[position]] for position in positions)
    return tuple(min(rows if rule.splits_backward else rows[:1], key=lambda row: row[-1:]) for rows in tables)


def _regathers(plan: Plan) -> bool:
    """Return whether every pass gathers the parameters of its units."""
    return plan.zero >= 3 and plan.reshard_after_forward


def _bound_forward(ticks: int, gathers: tuple[int, ...]) -> int:
    """Return the least ticks of a forward: it begins with its first unit's gather, and needs all gathers."""
    return max(ticks + gathers[-1], sum(gathers)) if gathers else ticks


def _bound_backward(ticks: int, gathers: tuple[int, ...]) -> int:
    """Return the least ticks of a backward, whose first unit may be kept from forward."""
    return max(ticks, sum(gathers[1:]))


LEAST_PRODUCTS = 2
"""Least times that a step computes the FLOP of a forward pass: once forward, and once for one of two gradients."""


def least_step_time(problem: Problem) -> float:
    """Return the seconds in which all free devices compute a batch at their peak, and do nothing else.

    It is ``2 * flops of a batch / sum of peaks``. Only one gradient of each operator counts in a backward pass, as much
    as its forward: a network may not need the gradients of its first inputs, or of frozen weights.
    """
    cluster, training = problem.cluster, problem.training
    flops = sum(
        _least_flops(operator, training.global_batch) * block.repeat
        for block in problem.graph.blocks
        for operator in block.operators
    )
    speeds, free = dict(cluster.speeds), list(cluster.free_devices)
    peaks = [_find_peak_flops(node.accelerator, training) for node, _ in cluster.nodes]
    kinds = cluster.node_kinds[cluster.device_nodes[free]].tolist()
    rate: float = sum(peaks[kind] * speeds.get(device, 1.0) for device, kind in zip(free, kinds, strict=True))
    return LEAST_PRODUCTS * flops / rate


def _least_flops(operator: Operator, global_batch: int) -> float:
    """Return the FLOP of one forward of an operator in a step: for each sample, or once where it has no batch dim.

    A product of parameters runs once a microbatch, and so only once if one microbatch has all samples.
    """
    samples = global_batch if BATCH in dict(operator.dims) else 1
    return operator.flops * operator.executed_fraction * samples


def _find_peak_flops(accelerator: Accelerator, training: Training) -> float:
    """Return the highest FLOP/s of any operator of a step: with fp8 training some operators run in bf16."""
    return max(rate for dtype, rate in accelerator.peak_flops if dtype in (training.precision, training.dtype))
