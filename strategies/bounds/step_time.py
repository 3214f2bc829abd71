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
from meshwise.strategies.bounds.durations import Durations
from meshwise.strategies.lowering.costs.kinds import Division
from meshwise.strategies.lowering.costs.offload import OnHost, host_elements, host_ticks, update, update_bytes
from meshwise.strategies.lowering.costs.optimizer import Parameters
from meshwise.strategies.lowering.costs.stage import Machine, Rank, StageCosts
from meshwise.strategies.lowering.rank_classes.placement import HOST_KINDS, host_phases
from meshwise.strategies.lowering.tasks.data_parallel import overlaps
from meshwise.strategies.lowering.tasks.residents import updates
from meshwise.strategies.plan.offloading import CHUNKS, HOST, STEPS, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.schedules.rule import Placement, WrittenRule


def seconds_per_byte(cluster: Cluster) -> dict[str, float]:
    """Return the seconds of one byte to, on and from the host, moved by one rank alone; of all devices the least.

    0 where no link carries it.
    """
    network, devices = interconnect(cluster), np.arange(cluster.num_devices)[:, None]
    found = {}
    for kind in HOST_KINDS:
        (phase,) = host_phases(cluster, kind, devices)
        slowest = np.zeros(len(devices))
        np.maximum.at(slowest, phase.group, phase.load / network.bandwidth[phase.link])
        found[kind] = float(slowest.min())
    return found


def update_ticks(training: Training, plan: Plan, held: Parameters, rates: dict[str, float], position: int) -> int:
    """Return a lower bound, in ticks, of the part of a rank's update in which its host takes part."""
    on_host = OnHost(plan.offload.at("optimizer", position))
    each = [0]
    for number in update(training, plan, held, on_host).steps:
        kind = STEPS[number].kind
        seconds = update_bytes(training, plan, held, on_host, number) * rates.get(kind, 0.0)
        alone = kind == HOST and rates[HOST] == 0.0
        each.append(host_ticks(host_elements(plan, held, on_host)) if alone else to_ticks(seconds))
    # a tick less a chunk: rates are rounded where they are simulated
    return max(sum(each) + (CHUNKS - 1) * max(each) - len(STEPS) * CHUNKS, 0)


class _Loads(NamedTuple):
    """For every pipeline position, the least ticks of its first stage's passes, and the most work of all its stages.

    ``work`` has the gathers of parameters that passes wait for, and ``bare_work`` has none; ``first_gathers`` are those
    that the first pass may not wait for.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    work: tuple[int, ...]
    bare: tuple[int, ...]
    early: tuple[int, ...]


class Bounds:
    """Lower bounds of the steps of one problem's plans."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.once(Durations)
        self._loads: dict[tuple[Machine, Division, tuple[int, ...], int, bool, bool], _Loads] = {}

    def ticks(self, plan: Plan) -> int:
        """Return a lower bound of a plan's step: the ticks of a path through it.

        For every pipeline rank: the first microbatch reaches it, it does all its work, the last gradient runs back to
        the first stage, and the optimizer steps. Where backward is split, the last gradient leaves before all work is
        done; where stages may be anywhere, neither way is known. Or it reduces gradients all the time.
        """
        machine = self.costs.machine(plan)
        if plan.asynchronous:
            return self._unflushed(plan, machine)
        loads, tails = self._load(plan, machine), self.tails(plan, machine)
        adjoin = plan.rule.placement is not Placement.WRITTEN
        sends = self.durations.sends(plan, machine) if adjoin else None
        best = fill = drain = 0
        waits = self.waits(plan, machine)
        for position, work in enumerate(loads.work):
            if position and sends is not None:
                fill += loads.forward[position - 1] + sends.forward[position - 1]
                drain += loads.backward[position - 1] + sends.backward[position]
            drains = adjoin and not plan.splits_backward
            after = max(tails[position], drain + tails[0]) if drains else tails[position]
            gathered = plan.num_microbatches * work - loads.early[position]
            reduced = plan.num_microbatches * loads.bare[position] + (plan.num_microbatches - 1) * waits[position]
            best = max(best, fill + max(gathered, reduced) + after)  # a pass gathers while it waits
        if plan.schedule == "naive" and sends is not None:  # one microbatch after another, there and back
            there, back = sum(loads.forward) + sum(sends.forward), sum(loads.backward) + sum(sends.backward)
            best = max(best, plan.num_microbatches * (there + back) + tails[0])
        return max(best, self._reducing(plan, machine)) if plan.zero >= 2 else best

    def _unflushed(self, plan: Plan, machine: Machine) -> int:
        """Return the ticks in which the busiest rank does the work of one step, with its updates."""
        optimizer = self.durations.ending(plan, machine).optimizer
        alone = (0,) * plan.pipeline if any(plan.offload.optimizer) else optimizer  # the rest runs beneath passes
        late, tails = updates(self.costs, plan).late, self.tails(plan, machine)
        after = [alone[at] if late[at] else tails[at] for at in range(plan.pipeline)]
        work = self._load(plan, machine).work
        return max(plan.num_microbatches * work[at] + plan.updates * after[at] for at in range(plan.pipeline))

    def _load(self, plan: Plan, machine: Machine) -> _Loads:
        """Return the least passes and the most work of every position."""
        made = self.costs.division(plan)
        how = self.costs.blocks.how(plan)
        key = (machine, made, plan.positions, how, plan.overlaps_passes, _regathers(plan))
        if key not in self._loads:
            positions = [self._position(plan, machine, made, position) for position in range(plan.pipeline)]
            self._loads[key] = _Loads(*zip(*positions, strict=True))
        return self._loads[key]

    def _position(self, plan: Plan, machine: Machine, made: Division, position: int) -> tuple[int, ...]:
        """Return the least passes and the most work of one position, as `_PositionLoads` has them."""
        found = [self.durations.passes(plan, rank) for rank in machine.ranks[position]]
        own = [(made.kind_of[stage], self._units(plan, machine, stage)) for stage in plan.stages_at(position)]
        first, units = own[0]
        forward, backward = (min(row[first] for row in rows) for rows in zip(*found, strict=True))
        if plan.overlaps_passes:
            # Collectives of one pass may hide beneath compute of the other, so that only compute is sure to take time.
            work = bare = max(self._computing(plan, position, rank) for rank in machine.ranks[position])
        else:
            bare = max(sum(passes.forward[kind] + passes.backward[kind] for kind, _ in own) for passes in found)
            work = max(
                sum(_forward(passes.forward[kind], g) + _backward(passes.backward[kind], g) for kind, g in own)
                for passes in found
            )
        early = max(_forward(passes.forward[first], units) - passes.forward[first] for passes in found)
        return forward, backward, work, bare, early

    def _units(self, plan: Plan, machine: Machine, stage: int) -> tuple[int, ...]:
        """Return the ticks of the gathers that every pass of a stage waits for, in the order of backward."""
        return self.durations.gathers(plan, machine)[stage] if _regathers(plan) else ()

    def _reducing(self, plan: Plan, machine: Machine) -> int:
        """Return the ticks of the rank that reduces most, one bucket after another, and of what follows."""
        ending = self.durations.ending(plan, machine)
        rows = ([ending.leaving[stage] for stage in plan.stages_at(position)] for position in range(plan.pipeline))
        each = zip(rows, ending.replicated, ending.gather, strict=True)
        return max(plan.num_microbatches * sum(map(sum, own)) + sum(after) for own, *after in each)

    def _computing(self, plan: Plan, position: int, rank: Rank) -> int:
        """Return the ticks in which a rank computes for one microbatch, without collectives."""
        blocks = [block for stage in plan.stages_at(position) for block in self.costs.stage(plan, stage, rank).blocks]
        steps = (step for block in blocks for step in (*block.steps.forward, *block.steps.backward))
        return sum(step.ticks for step in steps if step.collective is None)

    def waits(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks in which passes of each position wait for reductions of gradients after every backward.

        The last bucket is reduced when all is computed, and the next pass waits for it; where nothing runs beneath
        passes, it waits for all buckets.
        """
        if plan.overlaps_passes or plan.zero < 2:
            return [0] * plan.pipeline
        leaving = self.durations.ending(plan, machine).leaving
        ahead = overlaps(self.costs.problem.cluster, plan)
        each = [sum(row[-1:] if ahead else row) for row in leaving]
        return [sum(each[stage] for stage in plan.stages_at(position)) for position in range(plan.pipeline)]

    def tails_of(self, plan: Plan, machine: Machine, away: Offloading) -> list[int]:
        """Return the ticks after each rank's last backward: last sums, the norm, the update, and the gather of ZeRO.

        ``offload`` is what hosts keep, instead of what the plan offloads.
        """
        leaving, late, replicated, steps, gather, squares, norm = self.durations.ending(plan, machine)
        if any(away.optimizer):
            steps = self._host_updates(plan, away)
        if any(away.parameters):
            squares = (0,) * plan.pipeline  # the host reads gradients that are there
        reduced = (row[-1] if row else after for row, after in zip(_last(plan, leaving), late, strict=False))
        return [sum(each) + sum(norm) for each in zip(reduced, replicated, squares, steps, gather, strict=True)]

    def tails(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks after each rank's last backward under the plan's own offload."""
        return self.tails_of(plan, machine, plan.offload)

    def _host_updates(self, plan: Plan, away: Offloading) -> tuple[int, ...]:
        """Return the ticks of each position's update where hosts have optimizer states."""
        if any(away.parameters):  # of which gradients are there as they are made
            return (0,) * plan.pipeline
        training, held = self.costs.problem.training, self.costs.held(plan).positions
        on_host = replace(plan, offload=away)
        return tuple(update_ticks(training, on_host, each, self._rates, at) for at, each in enumerate(held))

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Seconds of one byte to, on and from the host."""
        return seconds_per_byte(self.costs.problem.cluster)


def _last(plan: Plan, leaving: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for every pipeline position, the reductions of the stage that ends backward last: the first one there.

    Where orders are written out and backward is split, any stage may end last: then those with the least last
    reduction.
    """
    if not isinstance(plan.rule, WrittenRule):
        return leaving
    own = [plan.stages_at(position) for position in range(plan.pipeline)]
    chosen = ([leaving[stage] for stage in (stages if plan.splits_backward else stages[:1])] for stages in own)
    return tuple(min(rows, key=lambda row: row[-1:]) for rows in chosen)


def _regathers(plan: Plan) -> bool:
    """Return whether every pass gathers the parameters of its units."""
    return plan.zero >= 3 and plan.reshard_after_forward


def _forward(ticks: int, gathers: tuple[int, ...]) -> int:
    """Return the least ticks of a forward: it begins with its first unit's gather, and needs all gathers."""
    return max(ticks + gathers[-1], sum(gathers)) if gathers else ticks


def _backward(ticks: int, gathers: tuple[int, ...]) -> int:
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
    peaks = [_peak(node.accelerator, training) for node, _ in cluster.nodes]
    kinds = cluster.node_kinds[cluster.device_nodes[free]].tolist()
    rate: float = sum(peaks[kind] * speeds.get(device, 1.0) for device, kind in zip(free, kinds, strict=True))
    return LEAST_PRODUCTS * flops / rate


def _least_flops(operator: Operator, global_batch: int) -> float:
    """Return the FLOP of one forward of an operator in a step: for each sample, or once where it has no batch dim.

    A product of parameters runs once a microbatch, and so only once if one microbatch has all samples.
    """
    samples = global_batch if BATCH in dict(operator.dims) else 1
    return operator.flops * operator.executed_fraction * samples


def _peak(accelerator: Accelerator, training: Training) -> float:
    """Return the highest FLOP/s of any operator of a step: with fp8 training some operators run in bf16."""
    return max(rate for dtype, rate in accelerator.peak_flops if dtype in (training.precision, training.dtype))
