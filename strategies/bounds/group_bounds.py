"""Lower bounds of whole families and groups of layouts, without completing any of their members.

The bound of a family is the compute of its devices, spread evenly. The bounds of a group's members are outer sums: of
the path of `meshwise.strategies.bounds.step_time` through the passes of a row, and of what follows them in a column.
Memory is bounded too: by the states of a column, and by what a rank of a row holds when most microbatches are in
flight on it. All are at most what `meshwise.strategies.bounds.step_time` and `meshwise.strategies.bounds.memory` say
of the member alone, and need one plan for every kind of row and column.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray
from meshwise.simulator.units import TICKS_PER_SECOND, to_seconds
from meshwise.strategies.bounds.durations import Durations
from meshwise.strategies.bounds.memory import Needs
from meshwise.strategies.bounds.step_time import Bounds
from meshwise.strategies.lowering.costs.block import BlockCost
from meshwise.strategies.lowering.costs.kinds import Runs
from meshwise.strategies.lowering.costs.memory import Boundary, StageMemory, stage_memory
from meshwise.strategies.lowering.costs.operator import BlockSteps
from meshwise.strategies.lowering.costs.optimizer import state_bytes
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.costs.stage import Rank, StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group, PassChoice, StateChoice
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NOTHING, fraction_of
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import OfStage, Recompute
from meshwise.strategies.schedules.orders import actions
from meshwise.strategies.schedules.rule import Placement
from meshwise.strategies.schedules.schedule import KINDS, ActionKind, rule_of

FloatArray = NDArray[np.float64]
T = TypeVar("T", bound=Hashable)
Way = tuple[OfStage, bool]
"""What the passes of a plan depend on: what they recompute, and whether communication overlaps products."""
Site = tuple[int, Boundary, int]
"""The kind of a stage, the data at its ends, and its pipeline position."""

_ALL_IN_FLIGHT = frozenset({"gpipe", "looped_bfs"})
"""Schedules that run all forwards before the first backward."""


class _Moments(NamedTuple):
    """Two moments of every pipeline rank: the microbatches that each stage then holds, and the pass that runs."""

    held: IntArray
    stage: IntArray
    kind: IntArray


class GroupBounds:
    """Lower bounds of families and groups of the layouts of one problem."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.problem = costs, costs.problem
        self.durations, self.bounds, self.needs = costs.once(Durations), costs.once(Bounds), costs.once(Needs)
        self._alike = len(set(self.problem.cluster.device_kinds.tolist())) == 1
        self._computing: dict[tuple[object, ...], tuple[int, int]] = {}
        self._passes: dict[tuple[object, ...], tuple[_Passes, ...]] = {}
        self._memory: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._tails: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def floor(self, family: Layout) -> float:
        """Return a lower bound of the steps of a family's layouts in seconds; 0 where devices differ.

        A rank of some position computes for every microbatch at least its share of all blocks, and at least as many
        layers as there are a position, rounded up.
        """
        if not self._alike:
            return 0.0
        whole, layer = self._computed(family)
        layers = ceil(num_layers(self.problem.graph) / family.pipeline)
        each = max(ceil(whole / family.pipeline), layers * layer)
        return to_seconds(self.problem.training.global_batch // family.sequences * each)

    def reach(self, family: Layout) -> float:
        """Return a lower bound in seconds of the steps of a family's layouts whose ranks run one pass at a time.

        Some position then is busy for every microbatch with at least its share of all blocks, collectives included.
        """
        # gradients that leave whole: no kernels of their own add them
        plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=2))
        least = min(self._work(plan, overlap) for overlap in {False, family.sequence_parallel})
        return to_seconds(plan.num_microbatches * ceil(least / family.pipeline))

    def _work(self, plan: Plan, overlap: bool) -> int:
        """Return the ticks of all blocks for one microbatch, each on the rank that is fastest at it."""
        ranks = {rank.key: rank for row in self.costs.machine(plan).ranks for rank in row}.values()
        made, blocks = self.costs.division(plan), self.costs.blocks
        plan = replace(plan, recompute=Recompute.NONE, overlap_tensor=overlap)
        ticks = {name: min(_worked(blocks.cost(plan, name, rank)) for rank in ranks) for name in made.blocks}
        return sum(ticks[name] * count for kind in made.kind_of for name, count in made.kinds[kind])

    def _computed(self, family: Layout) -> tuple[int, int]:
        """Return the ticks that all blocks compute for one microbatch, and those of the fastest layer."""
        cut = (family.tensor, family.tensor_rows, family.context, family.attention, family.expert)
        key = (cut, family.sequence_parallel, family.microbatch)
        if key not in self._computing:
            plan = self._alone(family)
            rank = self.costs.machine(plan).rank(0)
            blocks = self.costs.blocks
            ticks = {name: _computed_alone(blocks.plain_steps(plan, name, rank)) for name in blocks.kinds(plan).of_name}
            (runs,) = self.costs.division(plan).kinds
            layers = [ticks[name] for name, _ in runs if blocks.block(plan, name).layer]
            self._computing[key] = sum(ticks[name] * n for name, n in runs), min(layers, default=0)
        return self._computing[key]

    def _alone(self, family: Layout) -> Plan:
        """Return a plan that cuts operators as a family does, on as few devices as possible."""
        ranks = family.expert * family.context * family.tensor * family.tensor_rows
        free = self.problem.cluster.free_devices
        layout = replace(
            family,
            data=family.expert,
            pipeline=1,
            schedule="gpipe",
            zero_shards=0,
            placement=tuple(free[:ranks]),
        )
        return complete(self.problem, layout)

    def table(self, group: Group, limit: float = inf) -> FloatArray:
        """Return a lower bound in seconds of every member's step, by row and column.

        It is infinite where there is no member, where the member cannot fit, and where it takes ``limit`` or more.
        """
        result = np.full(group.legal.shape, inf)
        if not group.count:
            return result
        row, column = divmod(int(np.argmax(group.legal)), len(group.states))
        plan = complete(self.problem, group.member(row, column))
        early = [i for i, state in enumerate(group.states) if not self._late(plan, state)]
        late = [i for i, state in enumerate(group.states) if self._late(plan, state)]
        for columns in (early, late):
            if columns:
                states = [group.states[i] for i in columns]
                result[:, columns] = self._of_class(plan, group.passes, states, limit)
        result[~group.legal | (result >= limit)] = inf
        return result

    def _late(self, plan: Plan, state: StateChoice) -> bool:
        """Return whether gradients are reduced in every backward, or parameters move in passes."""
        return (state.zero >= 2 and plan.shards > 1) or any(state.offload.parameters)

    def _of_class(
        self, plan: Plan, passes: Sequence[PassChoice], states: Sequence[StateChoice], limit: float
    ) -> FloatArray:
        """Return the bounds of rows and of columns whose gradients are reduced at the same moments."""
        plan = replace(_with(plan, states[0]._replace(offload=NOTHING)), recompute=Recompute.NONE)
        # The cheapest test first: rows without recomputation tell whether any row can stay below the limit.
        quickest = [PassChoice(Recompute.NONE, overlap) for overlap in {each.overlap_tensor for each in passes}]
        if limit < inf and self._times(plan, quickest, states).min() >= limit:
            return np.full((len(passes), len(states)), inf)
        if limit == inf and not self._fits(plan, passes, states).any():  # no plan that fits is known: maybe none is
            return np.full((len(passes), len(states)), inf)
        times = self._times(plan, passes, states)
        hopeful = np.flatnonzero(times.min(axis=1) < limit)
        if len(hopeful):
            fits = self._fits(plan, [passes[row] for row in hopeful.tolist()], states)
            times[hopeful] = np.where(fits, times[hopeful], inf)
        return times

    def _fits(self, plan: Plan, passes: Sequence[PassChoice], states: Sequence[StateChoice]) -> NDArray[np.bool_]:
        """Return, for every row and column, whether it may fit: false only where it cannot."""
        held, column_of = self._held(plan, states)
        room = self.needs.capacity(plan, plan.sequences)[None, :] - held
        activations, row_of = self._activations(plan, passes, late=self._late(plan, states[0]))
        fits: NDArray[np.bool_] = np.all(activations[:, None, :] <= room[None, :, :], axis=2)
        return fits[np.ix_(row_of, column_of)]

    def _times(self, plan: Plan, passes: Sequence[PassChoice], states: Sequence[StateChoice]) -> FloatArray:
        """Return the seconds of the path of `StepBounds.lower_bound` for every row and column."""
        ways, row_of = _each((each.recompute, each.overlap_tensor) for each in passes)
        ends, column_of = _each(self._tail(plan, state) for state in states)
        forward, backward, work = self._loads(plan, ways)
        fill, drain = self._sent(plan, forward, backward)
        tails, waits = np.array(ends, dtype=np.int64).transpose(1, 0, 2)
        path = fill + plan.num_microbatches * work
        result = np.zeros((len(ways), len(ends)), dtype=np.int64)
        drains = plan.rule.placement is not Placement.WRITTEN and not plan.splits_backward
        for at in range(plan.pipeline):
            after = tails[None, :, at]
            if drains:
                after = np.maximum(after, drain[:, at, None] + tails[None, :, 0])
            np.maximum(result, path[:, at, None] + waits[None, :, at] + after, out=result)
        if plan.schedule == "naive":
            last = plan.pipeline - 1
            there_and_back = fill[:, last] + forward[:, last] + drain[:, last] + backward[:, last]
            alone = plan.num_microbatches * there_and_back
            np.maximum(result, alone[:, None] + tails[None, :, 0], out=result)
        seconds: FloatArray = result[np.ix_(row_of, column_of)] / TICKS_PER_SECOND
        return seconds

    def _sent(self, plan: Plan, forward: IntArray, backward: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ticks in which a microbatch reaches every position, and those in which its gradients return."""
        fill, drain, machine = np.zeros_like(forward), np.zeros_like(backward), self.costs.machine(plan)
        if plan.rule.placement is not Placement.WRITTEN:
            sends, inner = self.durations.sends(plan, machine), plan.pipeline - 1
            ahead, back = np.array(sends.forward[:inner]), np.array(sends.backward[1 : inner + 1])
            np.cumsum(forward[:, :inner] + ahead, axis=1, out=fill[:, 1:])
            np.cumsum(backward[:, :inner] + back, axis=1, out=drain[:, 1:])
        return fill, drain

    def _tail(self, plan: Plan, state: StateChoice) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return lower bounds of the ticks after each rank's last backward, and of waits before it.

        They are those of a choice of states.
        """
        if any(state.offload.parameters):
            return (0,) * plan.pipeline, (0,) * plan.pipeline
        chosen = _with(plan, state._replace(offload=NOTHING))
        machine, away = self.costs.machine(chosen), replace(state.offload, activations=())
        runs = plan.num_microbatches, plan.overlaps_passes, plan.splits_backward
        how = state.zero, state.overlap_gradients, away, *runs
        key = (machine, self.costs.division(chosen), plan.positions, self.costs.blocks.cut(chosen), how)
        if key not in self._tails:
            tails, waits = self.bounds.tails_of(chosen, machine, away), self.bounds.waits(chosen, machine)
            self._tails[key] = tuple(tails), tuple((plan.num_microbatches - 1) * wait for wait in waits)
        return self._tails[key]

    def _loads(self, plan: Plan, ways: Sequence[Way]) -> tuple[IntArray, IntArray, IntArray]:
        """Return, for every run choice and position, the ticks of its first stage's passes, and of all its work."""
        machine, made = self.costs.machine(plan), self.costs.division(plan)
        forward, backward, work = (np.empty((len(ways), plan.pipeline), np.int64) for _ in range(3))
        own = [[made.kind_of[stage] for stage in plan.stages_at(at)] for at in range(plan.pipeline)]
        known: dict[object, tuple[IntArray, IntArray, IntArray]] = {}
        for at, kinds in enumerate(own):
            for rank in machine.ranks[at]:
                if rank.key not in known:
                    known[rank.key] = self._pass_ticks(plan, ways, rank)
            rows = [known[rank.key] for rank in machine.ranks[at]]
            forward[:, at] = np.minimum.reduce([row[0][:, kinds[0]] for row in rows])
            backward[:, at] = np.minimum.reduce([row[1][:, kinds[0]] for row in rows])
            work[:, at] = np.maximum.reduce([row[2][:, kinds].sum(axis=1) for row in rows])
        return forward, backward, work

    def _pass_ticks(self, plan: Plan, ways: Sequence[Way], rank: Rank) -> tuple[IntArray, IntArray, IntArray]:
        """Return, for every run choice and kind of stage, the ticks of forward, of backward, and of a rank's work."""
        tables: tuple[list[tuple[int, ...]], ...] = ([], [], [])
        for recompute, overlap in ways:
            again = self._stages(replace(plan, recompute=recompute.layer, overlap_tensor=overlap), rank)
            if recompute.layers is None:
                rows = [(each.forward, each.backward, each.work) for each in again]
            else:
                never = self._stages(replace(plan, recompute=Recompute.NONE, overlap_tensor=overlap), rank)
                rows = [one.partly(two, recompute.layers) for one, two in zip(never, again, strict=True)]
            for table, column in zip(tables, zip(*rows, strict=True), strict=True):
                table.append(column)
        forward, backward, work = map(np.array, tables)
        return forward, backward, work

    def _stages(self, plan: Plan, rank: Rank) -> tuple["_Passes", ...]:
        """Return the ticks of every kind of stage on a rank where all layers run as the plan says."""
        made = self.costs.division(plan)
        key = (made, self.costs.blocks.how(plan), rank.key, plan.overlaps_passes)
        if key not in self._passes:
            rows = (self.durations.runs(plan, made, kind, rank) for kind in range(len(made.kinds)))
            layers = ([self.costs.blocks.block(plan, name).layer for name, _ in runs] for runs in made.kinds)
            self._passes[key] = tuple(map(_passes_of, rows, layers, [plan.overlaps_passes] * len(made.kinds)))
        return self._passes[key]

    def _held(self, plan: Plan, states: Sequence[StateChoice]) -> tuple[FloatArray, list[int]]:
        """Return lower bounds of the bytes that stay for the whole step, and which of them is each state's."""
        ways, way_of = _each((state.zero, state.offload) for state in states)
        whole = {zero: self._whole(plan, zero) for zero in {zero for zero, _ in ways}}
        training = self.problem.training
        rounded = training.optimizer_bytes + training.factored_bytes
        result = np.zeros((len(ways), plan.pipeline))
        for row, (zero, offload) in enumerate(ways):
            if not any(offload.parameters):
                held, away = whole[zero]
                parts = np.array([offload.at("optimizer", at) for at in range(plan.pipeline)])
                # Shares are rounded to whole elements: one element more is taken off, so that the bound holds.
                result[row] = held - parts * (away + rounded) - (parts > 0) * rounded
        return result, way_of

    def _whole(self, plan: Plan, zero: int) -> tuple[IntArray, IntArray]:
        """Return the bytes that stay without offload by position, and those of optimizer states."""
        chosen = replace(plan, zero=zero)
        held, positions = self.needs.held(chosen), self.costs.held(chosen).positions
        states = {each: state_bytes(self.problem.training, chosen, each) for each in dict.fromkeys(positions)}
        return held, np.array([states[each] for each in positions], dtype=np.int64)

    def _activations(self, plan: Plan, passes: Sequence[PassChoice], *, late: bool) -> tuple[IntArray, list[int]]:
        """Return lower bounds of the most bytes that passes hold, by choice and position, and each row's choice."""
        ways, way_of = _each((each.recompute, each.activations) for each in passes)
        moments = _moments(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
        sites, site_of = self._sites(plan)
        rows = np.array([self._memories(plan, sites, *way, late=late) for way in ways], dtype=np.int64)
        held = rows[:, site_of, 0] @ moments.held.T
        if not plan.overlaps_passes:
            held += rows[:, np.array(site_of)[moments.stage], 1 + moments.kind]
        return held.reshape(len(ways), 2, plan.pipeline).max(axis=1), way_of

    def _sites(self, plan: Plan) -> tuple[list[Site], list[int]]:
        """Return the different stages by kind, ends and position, and which of them each stage is."""
        ends = [self.costs.ends(plan, stage) for stage in range(len(plan.stages))]
        return _each(zip(self.costs.division(plan).kind_of, ends, plan.positions, strict=True))

    def _memories(
        self, plan: Plan, sites: Sequence[Site], recompute: OfStage, away: tuple[float, ...], *, late: bool
    ) -> list[tuple[int, ...]]:
        """Return what one microbatch of each stage keeps at least, and what each kind of action adds to that."""
        made, every = self.costs.division(plan), replace(plan, recompute=recompute.layer)
        how = made, self.costs.blocks.how(every), recompute.layers, late
        result = []
        for kind, ends, position in sites:
            fraction = away[position if len(away) > 1 else 0] if away else 0.0
            key = (how, kind, ends, fraction)
            if key not in self._memory:
                runs = (
                    [] if fraction and any(ends) else self._blocks(every, made.kinds[kind], recompute.layers, fraction)
                )
                memory = stage_memory(ends.applied(list(runs)))
                self._memory[key] = memory.kept, *_fullest(memory, late=late)
            result.append(self._memory[key])
        return result

    def _blocks(self, plan: Plan, runs: Runs, again: int | None, fraction: float) -> Iterator[tuple[BlockMemory, int]]:
        """Yield the memory of a stage's blocks, each with how often; its first layers are recomputed or offloaded."""
        blocks = self.costs.blocks
        layers = sum(count for name, count in runs if blocks.block(plan, name).layer)
        first, gone = layers if again is None else again, fraction_of(layers, fraction)
        for name, count in runs:
            if not blocks.block(plan, name).layer:
                yield blocks.memory(plan, name), count
                continue
            # A run is cut where recomputation or offload ends.
            edges = sorted({0, count, *(min(max(edge, 0), count) for edge in (first, gone))})
            for low, high in pairwise(edges):
                memory = blocks.memory(plan, name, None if low < first else Recompute.NONE)
                yield memory._replace(kept=0) if low < gone else memory, high - low
            first, gone = first - count, gone - count


class _Passes(NamedTuple):
    """Ticks of a kind of stage on a rank: of its passes, of the rank's work, and, summed, of its first layers."""

    forward: int
    backward: int
    work: int
    layers: tuple[tuple[int, int], ...]

    def partly(self, again: "_Passes", count: int) -> tuple[int, int, int]:
        """Return the ticks of forward, backward and work where the first ``count`` layers are recomputed."""
        least = min(count, len(self.layers) - 1)
        backward, work = (two - one for one, two in zip(self.layers[least], again.layers[least], strict=True))
        return self.forward, self.backward + backward, self.work + work


def _passes_of(runs: Sequence[tuple[BlockCost, int]], layers: Sequence[bool], computing: bool) -> _Passes:
    """Return the ticks of blocks, some of which are layers; work has no collectives where others may hide them."""
    forward = sum(cost.forward_ticks * count for cost, count in runs)
    backward = sum(cost.backward_ticks * count for cost, count in runs)
    works = [_computed(cost) if computing else _worked(cost) for cost, _ in runs]
    work = sum(each * count for each, (_, count) in zip(works, runs, strict=True))
    sums = [(0, 0)]
    for (cost, count), each, layer in zip(runs, works, layers, strict=True):
        for _ in range(count if layer else 0):
            sums.append((sums[-1][0] + cost.backward_ticks, sums[-1][1] + each))
    return _Passes(forward, backward, work, tuple(sums))


def _worked(cost: BlockCost) -> int:
    """Return the ticks of a block's passes."""
    return cost.forward_ticks + cost.backward_ticks


def _computed(cost: BlockCost) -> int:
    """Return the ticks of a block's passes without collectives."""
    return _computed_alone(cost.steps)


def _computed_alone(steps: BlockSteps) -> int:
    """Return the ticks of segments without collectives."""
    return sum(step.ticks for step in (*steps.forward, *steps.backward) if step.collective is None)


def _fullest(memory: StageMemory, *, late: bool) -> tuple[int, int, int, int]:
    """Return, by kind of action, what a stage holds at its fullest moment beyond before.

    Less is known where gradients are reduced or parameters move ``in_passes``.
    """
    forward = memory.kept + memory.forward
    return (forward, 0, 0, 0) if late else (forward, memory.backward, memory.inputs, memory.weights)


@lru_cache(maxsize=4096)
def _moments(name: str, ranks: int, microbatches: int, chunks: int) -> _Moments:
    """Return, for every rank, the forward after which it holds most microbatches of all its stages, and the next pass.

    Of many microbatches only the first are looked at: what is held then is held with more of them too.
    """
    positions = rule_of(name).stage_ranks(ranks, chunks)
    if name in _ALL_IN_FLIGHT:
        held = np.array([[(at == rank) * microbatches for at in positions] for rank in range(ranks)], dtype=np.int64)
        last = np.array([max(s for s, at in enumerate(positions) if at == rank) for rank in range(ranks)])
        held[np.arange(ranks), last] -= 1
        return _Moments(np.concatenate([held, held]), np.tile(last, 2), np.zeros(2 * ranks, np.int64))
    few = min(microbatches, FEW * ranks)
    exists = rule_of(name).violation(ranks, few, chunks) is None
    rows = actions(name, ranks, few if exists else microbatches, chunks)
    change = np.array([_CHANGE[kind] for kind in KINDS])[rows.kind]
    total = np.cumsum(change)  # a rank ends with nothing
    held = np.zeros((2 * ranks, len(positions)), dtype=np.int64)
    chosen = np.empty(2 * ranks, dtype=np.int64)
    for rank in range(ranks):
        first, end = rows.start[rank], rows.start[rank + 1]
        most = first + int(np.argmax(total[first:end]))
        for moment, action in ((rank, most), (ranks + rank, most + 1)):
            chosen[moment] = action
            held[moment] = np.bincount(rows.stage[first:action], change[first:action], len(positions))
    return _Moments(held, rows.stage[chosen], rows.kind[chosen])


FEW = 4
"""Microbatches a pipeline rank that suffice to see most of them in flight."""

_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT: -1, ActionKind.WEIGHT: 0}
"""By kind of action, the change in the number of microbatches that a stage keeps whole."""


def _with(plan: Plan, state: StateChoice) -> Plan:
    """Return a plan under a choice of states."""
    return replace(
        plan,
        zero=state.zero,
        reshard_after_forward=state.reshard_after_forward,
        overlap_gradients=state.overlap_gradients,
        gradient_reduction=state.gradient_reduction,
        offload=state.offload,
    )


def _each(values: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return the different values, and for every value the index among these."""
    places: dict[T, int] = {}
    found = [places.setdefault(value, len(places)) for value in values]
    return list(places), found
