"""Lower bounds of a step's time: from a plan's schedule and costs alone, and for every plan of a problem.

The bound of a plan is the length of a path through its step; the bound of a problem is the time of all devices at
their peak.

An update whose optimizer states are on hosts takes at least as long as a rank's own copies, alone on their links. Its
stages are pipelined over equal chunks, each stage on a stream of its own
(`meshwise.strategies.lowering.costs.offload`). With c chunks and stages that take t ticks a chunk, the last chunk
leaves after at least ``sum(t) + (c - 1) max(t)``.
"""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.operator_graph import BATCH, Operator
from meshwise.simulator.units import to_ticks
from meshwise.strategies.bounds.durations import TickTables
from meshwise.strategies.lowering.costs.kinds import StageKinds
from meshwise.strategies.lowering.costs.offload import HostShare, host_elements, host_ticks, plan_update, update_bytes
from meshwise.strategies.lowering.costs.optimizer import Parameters
from meshwise.strategies.lowering.costs.stage import Machine, RankProfile, StageCosts
from meshwise.strategies.lowering.rank_classes.placement import HOST_KINDS, host_phases
from meshwise.strategies.lowering.tasks.data_parallel import overlaps_gradients
from meshwise.strategies.lowering.tasks.residents import schedule_updates
from meshwise.strategies.plan.offloading import HOST, STEPS, UPDATE_CHUNKS, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.schedules.rule import Placement, WrittenRule


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


def update_ticks(training: Training, plan: Plan, parameters: Parameters, rates: dict[str, float], position: int) -> int:
    """Return a lower bound, in ticks, of the part of a rank's update in which its host takes part."""
    host_share = HostShare(plan.offload.fraction_at("optimizer", position))
    chunk_ticks = [0]
    for number in plan_update(training, plan, parameters, host_share).steps:
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
        self._loads: dict[tuple[object, ...], _PositionLoads] = {}

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
        stage_kinds = self.costs.stage_kinds(plan)
        cost_key = self.costs.blocks.cost_key(plan)
        # the ticks of gathers stand in the key themselves, whatever decisions they depend on
        unit_gathers = self.durations.gather_ticks(plan, machine) if _regathers(plan) else None
        key = (machine, stage_kinds, plan.positions, cost_key, plan.overlaps_passes, unit_gathers)
        if key not in self._loads:
            positions = [self._load_position(plan, machine, stage_kinds, position) for position in range(plan.pipeline)]
            self._loads[key] = _PositionLoads(*zip(*positions, strict=True))
        return self._loads[key]

    def _load_position(self, plan: Plan, machine: Machine, stage_kinds: StageKinds, position: int) -> tuple[int, ...]:
        """Return the least passes and the most work of one position, as `_PositionLoads` has them."""
        pass_tables = [self.durations.pass_ticks(plan, rank) for rank in machine.ranks[position]]
        stage_loads = [
            (stage_kinds.kind_of[stage], self._list_unit_gathers(plan, machine, stage))
            for stage in plan.stages_at(position)
        ]
        first_kind, first_gathers = stage_loads[0]
        forward, backward = (min(row[first_kind] for row in rows) for rows in zip(*pass_tables, strict=True))
        if plan.overlaps_passes:
            # Collectives of one pass may hide beneath compute of the other, so that only compute is sure to take time.
            work = bare_work = max(self._count_compute_ticks(plan, position, rank) for rank in machine.ranks[position])
        else:
            bare_work = max(
                sum(passes.forward[kind] + passes.backward[kind] for kind, _ in stage_loads) for passes in pass_tables
            )
            work = max(
                sum(
                    _bound_forward(passes.forward[kind], unit_gathers)
                    + _bound_backward(passes.backward[kind], unit_gathers)
                    for kind, unit_gathers in stage_loads
                )
                for passes in pass_tables
            )
        early_gathers = max(
            _bound_forward(passes.forward[first_kind], first_gathers) - passes.forward[first_kind]
            for passes in pass_tables
        )
        return forward, backward, work, bare_work, early_gathers

    def _list_unit_gathers(self, plan: Plan, machine: Machine, stage: int) -> tuple[int, ...]:
        """Return the ticks of the gathers that every pass of a stage waits for, in the order of backward."""
        return self.durations.gather_ticks(plan, machine)[stage] if _regathers(plan) else ()

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

    def _count_compute_ticks(self, plan: Plan, position: int, rank: RankProfile) -> int:
        """Return the ticks in which a rank computes for one microbatch, without collectives."""
        blocks = [
            block for stage in plan.stages_at(position) for block in self.costs.stage_cost(plan, stage, rank).blocks
        ]
        segments = (segment for block in blocks for segment in (*block.segments.forward, *block.segments.backward))
        return sum(segment.ticks for segment in segments if segment.collective is None)

    def reduction_waits(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks in which passes of each position wait for reductions of gradients after every backward.

        The last bucket is reduced when all is computed, and the next pass waits for it; where nothing runs beneath
        passes, it waits for all buckets.
        """
        if plan.overlaps_passes or plan.zero < 2:
            return [0] * plan.pipeline
        bucket_reductions = self.durations.ending_ticks(plan, machine).bucket_reductions
        overlaps_backward = overlaps_gradients(self.costs.problem.cluster, plan)
        stage_waits = [sum(row[-1:] if overlaps_backward else row) for row in bucket_reductions]
        return [sum(stage_waits[stage] for stage in plan.stages_at(position)) for position in range(plan.pipeline)]

    def tails(self, plan: Plan, machine: Machine, offload: Offloading | None = None) -> list[int]:
        """Return the ticks after each rank's last backward: last sums, the norm, the update, and the gather of ZeRO.

        ``offload`` is what hosts keep, instead of what the plan offloads.
        """
        offload = plan.offload if offload is None else offload
        bucket_reductions, late_reductions, replicated_sums, step_ticks, gather, squares, norm = (
            self.durations.ending_ticks(plan, machine)
        )
        if any(offload.optimizer):
            step_ticks = self._list_host_updates(plan, offload)
        if any(offload.parameters):
            squares = (0,) * plan.pipeline  # the host reads gradients that are there
        last_reductions = (
            row[-1] if row else late_reduction
            for row, late_reduction in zip(_select_last(plan, bucket_reductions), late_reductions, strict=False)
        )
        return [
            sum(parts) + sum(norm)
            for parts in zip(last_reductions, replicated_sums, squares, step_ticks, gather, strict=True)
        ]

    def _list_host_updates(self, plan: Plan, offload: Offloading) -> tuple[int, ...]:
        """Return the ticks of each position's update where hosts have optimizer states."""
        if any(offload.parameters):  # of which gradients are there as they are made
            return (0,) * plan.pipeline
        training, plan_parameters = self.costs.problem.training, self.costs.plan_parameters(plan).positions
        host_plan = replace(plan, offload=offload)
        return tuple(
            update_ticks(training, host_plan, parameters, self._rates, position)
            for position, parameters in enumerate(plan_parameters)
        )

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Seconds of one byte to, on and from the host."""
        return seconds_per_byte(self.costs.problem.cluster)


def _select_last(plan: Plan, bucket_reductions: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for every pipeline position, the reductions of the stage that ends backward last: the first one there.

    Where orders are written out and backward is split, any stage may end last: then those with the least last
    reduction.
    """
    if not isinstance(plan.rule, WrittenRule):
        return bucket_reductions
    tables = ([bucket_reductions[stage] for stage in plan.stages_at(position)] for position in range(plan.pipeline))
    return tuple(min(rows if plan.splits_backward else rows[:1], key=lambda row: row[-1:]) for rows in tables)


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
