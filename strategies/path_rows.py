"""Rows of ticks for the longest paths of many plans: each row once for all plans that share it."""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat

import numpy as np

from simulator.bundle import LONGEST
from simulator.collective_kinds import Collective
from simulator.program import IntArray
from strategies.durations import Durations, Sends
from strategies.finish import Endings
from strategies.lowering.placed import tied_kind
from strategies.lowering.stage import Machine, StageCosts
from strategies.mesh import TENSOR
from strategies.plan import Plan


class PathRows:
    """Rows of the plans of one problem, on machines of one class of ranks a position."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.durations = costs, costs.once(Durations)
        self._passes: dict[tuple[object, ...], IntArray] = {}
        self._sends: dict[Sends, IntArray] = {}
        self._filled: dict[tuple[object, ...], IntArray] = {}
        self._endings: dict[tuple[object, ...], Endings] = {}

    def passes(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks of every pass, columns ``2 * stage`` and 1 more for a backward."""
        (rank,) = machine.ranks[0]
        made = self.costs.division(plan)
        key = (made, self.costs.blocks.how(plan), rank.key, plan.slices_boundaries and plan.pipeline)
        if key not in self._passes:
            forward, backward = map(_row, self.durations.passes(plan, rank))
            rows = np.stack([forward, backward], axis=1)[made.index]
            self._passes[key] = (rows + self._gathers(plan, machine) if plan.slices_boundaries else rows).ravel()
        return self._passes[key]

    def sends(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks of sending what each pass makes, in the same columns."""
        sends = self.durations.sends(plan, machine)
        if sends not in self._sends:
            self._sends[sends] = np.stack(list(map(_row, sends)), axis=1).ravel()
        return self._sends[sends]

    def filled(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks from the start of a last backward until each bucket leaves, stage after stage."""
        (rank,) = machine.ranks[0]
        made = self.costs.division(plan)
        slices = plan.slices_boundaries and plan.pipeline
        key = (made, self.costs.blocks.how(plan), rank.key, slices, plan.positions, plan.zero >= 3)
        if key not in self._filled:
            kinds = []
            for kind, buckets in enumerate(self.durations.buckets(plan, machine)):
                costs = reversed(self.durations.runs(plan, made, kind, rank))
                ticks = list(accumulate(chain.from_iterable(repeat(cost.backward_ticks, n) for cost, n in costs)))
                kinds.append([ticks[bucket.blocks - 1] for bucket in buckets])
            rows = [kinds[kind] for kind in made.kind_of]
            found = _row(list(chain.from_iterable(rows)))
            if plan.slices_boundaries:
                found += np.repeat(self._gathers(plan, machine)[:, 1], list(map(len, rows)))
            self._filled[key] = found
        return self._filled[key]

    def _gathers(self, plan: Plan, machine: Machine) -> IntArray:
        """Return the ticks in which each pass first gathers the slices that it is sent, a row a stage."""
        result = np.zeros((len(plan.stages), 2), np.int64)
        tensor = machine.ranks[0][0].groups.get(TENSOR)
        if plan.pipeline > 1 and tensor is not None and plan.slices_boundaries:
            sizes = [float(self.costs.boundary_bytes(plan, stage)) for stage in range(len(plan.stages) - 1)]
            result[1:, 0] = result[:-1, 1] = _row([tensor.ticks(Collective.ALL_GATHER, size) for size in sizes])
        return result

    def ending(self, plan: Plan, machine: Machine) -> Endings:
        """Return how a step ends: one row of each column."""
        made = self.costs.division(plan)
        key = (machine, made, plan.positions, self.costs.blocks.cut(plan), plan.zero, plan.overlap_gradients)
        if key not in self._endings:
            leaving, *rest = self.durations.ending(plan, machine)
            first = np.cumsum([0, *map(len, leaving)])
            rows = (list(chain(*leaving)), *rest, self._tied_ticks(plan, machine))
            self._endings[key] = Endings(first, *map(_row, rows))
        return self._endings[key]

    def _tied_ticks(self, plan: Plan, machine: Machine) -> list[int]:
        """Return the ticks of the sum of each tied parameter's gradients."""
        result = []
        for first, second, elements in self.costs.tied(plan):
            kind, size = tied_kind(first, second), float(elements * self.costs.problem.training.gradient_bytes)
            groups = machine.different(kind, Collective.ALL_REDUCE)[first]
            result.append(machine.least_ticks(kind, groups, Collective.ALL_REDUCE, size))
        return result


def _row(ticks: Sequence[int]) -> IntArray:
    """Return ticks as an array of 64 bits."""
    if max(ticks, default=0) > LONGEST:
        raise ValueError(f"the ticks of a task lie in 0..{LONGEST} (13 days), met {max(ticks)}")
    return np.array(ticks, dtype=np.int64)
