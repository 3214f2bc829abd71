"""A lower bound of a step from its schedule and costs alone: the length of a path through it."""

from typing import NamedTuple

from strategies.durations import Durations
from strategies.lowering.division import Division
from strategies.lowering.offload import offloads_optimizer
from strategies.lowering.stage import Machine, Rank, StageCosts
from strategies.plan import Plan


class _Loads(NamedTuple):
    """For every pipeline position, the least ticks of its first stage's passes, and the most of all its stages."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    work: tuple[int, ...]


class Bounds:
    """Lower bounds of the plans of one problem."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.once(Durations)
        self._loads: dict[tuple[Machine, Division, tuple[int, ...], int], _Loads] = {}

    def ticks(self, plan: Plan) -> int:
        """Return the ticks of a path through the step.

        For every pipeline rank: the first microbatch reaches it, it does all its work, the
        last gradient runs back to the first stage, and the optimizer steps. Where backward is
        split, the last gradient has left before all work is done.
        """
        machine = self.costs.machine(plan)
        loads, sends = self._load(plan, machine), self.durations.sends(plan, machine)
        tails = self._tails(plan, machine)
        best = fill = drain = 0
        for position, work in enumerate(loads.work):
            if position:
                fill += loads.forward[position - 1] + sends.forward[position - 1]
                drain += loads.backward[position - 1] + sends.backward[position]
            after = tails[position] if plan.splits_backward else max(tails[position], drain + tails[0])
            best = max(best, fill + plan.num_microbatches * work + after)
        return best

    def _load(self, plan: Plan, machine: Machine) -> _Loads:
        made = self.costs.division(plan)
        key = (machine, made, plan.positions, self.costs.blocks.how(plan))
        if key not in self._loads:
            positions = [self._position(plan, machine, made, position) for position in range(plan.pipeline)]
            self._loads[key] = _Loads(*zip(*positions, strict=True))
        return self._loads[key]

    def _position(self, plan: Plan, machine: Machine, made: Division, position: int) -> tuple[int, int, int]:
        first, own = made.kind_of[position], [made.kind_of[stage] for stage in plan.stages_at(position)]
        found = [self.durations.passes(plan, rank) for rank in machine.ranks[position]]
        if plan.overlaps_passes:
            work = max(self._computing(plan, position, rank) for rank in machine.ranks[position])
        else:
            work = max(sum(passes.forward[kind] + passes.backward[kind] for kind in own) for passes in found)
        return min(passes.forward[first] for passes in found), min(passes.backward[first] for passes in found), work

    def _computing(self, plan: Plan, position: int, rank: Rank) -> int:
        """Return the ticks in which a rank computes for one microbatch, without collectives that others may hide."""
        blocks = [block for stage in plan.stages_at(position) for block in self.costs.stage(plan, stage, rank).blocks]
        steps = (step for block in blocks for step in (*block.steps.forward, *block.steps.backward))
        return sum(step.ticks for step in steps if step.collective is None)

    def _tails(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks after each rank's last backward: its last reduction, the optimizer, ZeRO's gather."""
        leaving, late, optimizer, gather = self.durations.ending(plan, machine)
        if offloads_optimizer(plan):
            optimizer = (0,) * plan.pipeline  # the host's chunks run beside the copies: left out of the bound
        reduced = (row[-1] if row else after for row, after in zip(leaving, late, strict=False))
        return [sum(each) for each in zip(reduced, optimizer, gather, strict=True)]
