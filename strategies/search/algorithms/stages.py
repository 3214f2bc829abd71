"""Algorithms that choose the layers and the recomputation of every stage, by dynamic and integer programs.

`PipelineDP` chooses layers by the dynamic programs of PipeDream, DAPPLE, Piper and Alpa; `LayerDP` chooses the
recomputation of every layer within the memory of its stage, after Galvatron [1]_; `InterStageMILP` chooses both at
once by critical paths, after Mist [2]_.

References
----------
.. [1] Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB
   2023, section 3.3.
.. [2] Zhu et al., "Mist: efficient distributed training of large language models via memory-parallelism
   co-optimization", EuroSys 2025.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from meshwise.simulator.units import TICKS_PER_SECOND, to_seconds
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.lowering import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import OfStage, Recompute
from meshwise.strategies.search.driver import Proof, Proposals
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.stage_search import (
    Found,
    best_of,
    dividable,
    divided,
    least_recompute,
    meshes,
    of_layers,
    promising,
    recomputed,
    stage_options,
    ways,
    whole_layers,
)
from meshwise.strategies.stages.division import DivisionProblem, FloatArray
from meshwise.strategies.stages.dynamic_programs import (
    Choice,
    Partition,
    fastest_ways,
    fastest_ways_on_grid,
    least_bottleneck,
    pivot,
    sum_and_slowest,
)
from meshwise.strategies.stages.integer_programs import Divided, DivisionProgram, inter_stage, rounded
from meshwise.strategies.stages.tables import division_problem, least_work

MIST_SPREAD = 2
"""Layers by which a stage of Mist may differ from an even division (``inter_tuning_mip.py``)."""


class _Waiting(NamedTuple):
    """A mesh in the queue: a lower bound of its step time in seconds, and whether it is from its linear program."""

    bound: float
    relaxed: bool
    number: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class InterStageMILP:
    """Layers and recomputed layers of every stage, by integer programs with critical paths (after Mist, EuroSys 2025).

    A mesh is a layout of the space without its stages and recomputation. Meshes wait by their lower bound: first the
    bound of their work, then that of a linear program whose rows are critical paths, then that of its integer program,
    whose solution is simulated. The search ends when no bound in the queue is below the best step time. The proof holds
    for all divisions whose stages have at least one layer and differ from an even division by at most the spread, and
    which recompute the first layers of every stage, selectively or fully.

    Parameters
    ----------
    spread, looped_spread
        Layers by which a stage may differ from an even division: for schedules with one chunk per rank, and for
        schedules with several. Every stage may also have as few and as many layers as any stage of the mesh.
    nodes
        Nodes of an integer program's tree after which its bound is taken as it is.
    tolerance
        Plans that are faster than the best by no more than this fraction are not looked for.
    faithful
        As published: for every mesh whose schedule has one chunk per rank, the division with at most two layers more or
        fewer per stage for which Mist's formula is least; the plans with the least times are simulated, and nothing is
        proven.
    choices
        Used with ``faithful``: the number of plans that are simulated.
    """

    name: ClassVar[str] = "inter_stage_milp"
    most_plans: ClassVar[int] = 0

    spread: int = 16
    looped_spread: int = 0
    nodes: int = 20
    tolerance: float = 0.01
    faithful: bool = False
    choices: int = 32

    def __post_init__(self) -> None:
        if min(self.spread, self.looped_spread, self.nodes - 1, self.choices - 1) < 0 or not self.tolerance >= 0:
            raise ValueError(
                "inter_stage_milp: spread, looped_spread and tolerance are at least 0, nodes and choices 1, met "
                f"{self.spread}, {self.looped_spread}, {self.tolerance}, {self.nodes} and {self.choices}"
            )

    def _spread(self, layout: Layout) -> int:
        return self.looped_spread if layout.chunks > 1 else self.spread

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, then better and better divisions, and proofs of how fast any division can be."""
        if self.faithful:
            yield from best_of(problem, space, costs, _published(problem, space), self.choices)
            return None
        first = promising(problem, space, costs)
        best = inf if first is None else (yield complete(problem, first)).step_time
        return (yield from self.refine(problem, space, costs, meshes(problem, space), best))

    def refine(
        self, problem: Problem, space: Space, costs: CostModel, among: Iterable[Layout], best: float
    ) -> Proposals:
        """Yield divisions of meshes that may take less than ``best_time`` seconds; return the proof about all of them.

        Nothing is proven where the space forbids layers without recomputation, or a mesh has no critical paths.
        """
        tables, allowed, floor = StageCosts(problem), ways(space), inf
        queue: list[_Waiting] = []
        proves = whole_layers(space)
        for number, layout in enumerate(among):
            if dividable(layout):
                plan = complete(problem, layout)
                costs.bound(plan)  # raises OutOfTime where time is up: tables look at no plan and would not notice
                work = to_seconds(int(least_work(tables, plan, self._spread(layout))))
                heappush(queue, _Waiting(work, False, number, layout))
            else:
                proves = False
        while queue and queue[0].bound < (enough := best / (1 + self.tolerance)):
            if proves:
                yield Proof(min(queue[0].bound, floor))
            mesh = heappop(queue)
            plan = complete(problem, mesh.layout)
            costs.bound(plan)
            given = division_problem(tables, plan, allowed, self._spread(mesh.layout))
            program = DivisionProgram(given)
            found = program.relaxed(enough * TICKS_PER_SECOND)
            if found is not None and mesh.relaxed:
                found = program.whole(self.nodes, enough * TICKS_PER_SECOND)
            bound = max(mesh.bound, min(program.bound / TICKS_PER_SECOND, enough))
            if not mesh.relaxed and found is not None:
                heappush(queue, mesh._replace(bound=bound, relaxed=True))
                continue
            floor = min(floor, bound)
            chosen = None if found is None else _plan(problem, mesh.layout, given, found, allowed)
            if chosen is not None and costs.fits(chosen):
                best = min(best, (yield chosen).step_time)
        proven = min(floor, best / (1 + self.tolerance))
        return Proof(proven) if proves and proven < inf else None


def _published(problem: Problem, space: Space) -> Iterator[tuple[float, Layout]]:
    """Yield for every mesh the division for which Mist's formula is least, and the formula's seconds."""
    tables, allowed = StageCosts(problem), ways(space)
    for layout in meshes(problem, space):
        if layout.chunks > 1 or not dividable(layout):
            continue
        given = division_problem(tables, complete(problem, layout), allowed, MIST_SPREAD)
        counts = range(given.fewest, given.most + 1)
        rows: list[dict[int, list[tuple[float, OfStage]]]] = [
            {n: options for n in counts if (options := stage_options(given, allowed, stage, n))}
            for stage in range(given.stages)
        ]
        after = [{n: float(given.tail[s] + n * given.tail_layer[s]) for n in row} for s, row in enumerate(rows)]
        points = [
            {n: [(time, extra[n]) for time, _ in options] for n, options in row.items()}
            for row, extra in zip(rows, after, strict=True)
        ]
        microbatches = len(given.arranged.code) // (2 * given.stages)
        found = inter_stage(points, given.layers, microbatches)
        if found is not None:
            chosen = zip(rows, found.counts, found.points, strict=True)
            yield found.time, divided(layout, found.counts, [row[n][point][1] for row, n, point in chosen])


def _plan(
    problem: Problem, layout: Layout, given: DivisionProblem, found: Divided, allowed: tuple[Recompute, ...]
) -> Plan:
    """Return the plan of a fractional solution, rounded to whole layers."""
    counts = rounded(found.counts, np.full(given.stages, float(given.most)), given.ranks)
    again = np.array([rounded(row, counts.astype(float), given.ranks) for row in found.recomputed]).reshape(
        -1, given.stages
    )
    return complete(problem, divided(layout, counts.tolist(), recomputed(counts, again, allowed)))


@dataclass(frozen=True, slots=True)
class LayerDP:
    """Recomputation of every layer by a dynamic program over layers and memory (Galvatron, VLDB 2023).

    For every mesh whose schedule has one chunk per rank, stages have the layers of the mesh. Each layer is recomputed
    or not, so that the stage fits and takes least time; the plan then recomputes as many first layers of the stage, in
    one way. The plans with the shortest critical paths are simulated. Nothing is proven.

    Parameters
    ----------
    choices
        The number of plans that are simulated.
    faithful
        As published: every layer's bytes are rounded up to a megabyte.
    """

    name: ClassVar[str] = "layer_dp"
    most_plans: ClassVar[int] = 0

    choices: int = 32
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"layer_dp: choices is at least 1, met {self.choices}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, and the plans with the best recomputation."""
        yield from best_of(problem, space, costs, self._found(problem, space), self.choices)
        return None

    def _found(self, problem: Problem, space: Space) -> Iterator[Found | None]:
        """Yield for every mesh the fastest recomputation of its layers; ``None`` where none fits."""
        tables, allowed = StageCosts(problem), ways(space)
        for layout in meshes(problem, space):
            if layout.chunks > 1 or not dividable(layout):
                continue
            plan = complete(problem, layout)
            given = division_problem(tables, plan, allowed, 1)
            counts = _layers(problem, plan)
            chosen = [self._stage(given, allowed, stage, count) for stage, count in enumerate(counts)]
            hows = [each[0] for each in chosen if each is not None]
            if len(hows) != len(counts):
                yield None
            else:
                again = [[each[1] if each and each[2] is way else 0 for each in chosen] for way in allowed]
                yield given.step(counts, again), divided(layout, counts, hows)

    def _stage(
        self, given: DivisionProblem, allowed: Sequence[Recompute], stage: int, count: int
    ) -> tuple[OfStage, int, Recompute] | None:
        """Return the recompute choice of a stage, its number of layers and its way; ``None`` where it cannot fit."""
        best: tuple[float, OfStage, int, Recompute] | None = None
        for number, way in enumerate(allowed) if allowed else [(None, Recompute.NONE)]:
            choice = self._choice(given, stage, count, number)
            if choice is not None and (best is None or choice.time < best[0]):
                again = sum(choice.ways)
                best = choice.time, of_layers(way, again, count), again, way
        return best and best[1:]

    def _choice(self, given: DivisionProblem, stage: int, count: int, way: int | None) -> Choice | None:
        """Return the fastest choice, for every layer of a stage, between no recomputation and one way."""
        moments = given.moments[stage]
        alive, room = (int(moments.alive[0, stage]), float(moments.room[0])) if len(moments.room) else (0, 0.0)
        limit = room - count * given.states[stage] - alive * given.kept[stage]
        plain = 0.0, alive * float(given.kept_layer[stage])
        options = [plain]
        if way is not None:
            options.append((float(given.again[way, stage]), plain[1] - alive * float(given.saved[way, stage])))
        solve = fastest_ways_on_grid if self.faithful else fastest_ways
        return solve([options] * count, limit)


def _layers(problem: Problem, plan: Plan) -> list[int]:
    """Return the number of layers of every stage of a plan."""
    names = {name for name, block in problem.graph.occurrences if block.layer} or {problem.graph.occurrences[0][0]}
    return [sum(name in names for name in stage.blocks) for stage in plan.stages]


METHODS = ("alpa", "dapple", "piper", "pipedream")
"""The published methods whose formulas can be used."""


@dataclass(frozen=True, slots=True)
class PipelineDP:
    """Division of layers among stages by dynamic programming (Alpa, OSDI 2022; DAPPLE, Piper, PipeDream).

    For every mesh whose schedule has one chunk per rank, layers are divided so that the formula of the method is
    least, where each stage recomputes as few layers as its memory allows. The plans with the least times by the formula
    are simulated. Nothing is proven, because no formula is the simulator's.

    Parameters
    ----------
    method
        ``alpa``: sum and slowest stage; ``dapple``: sum up to the pivot; ``piper`` and ``pipedream``: slowest stage.
    choices
        The number of divisions that are simulated.
    spread
        Layers by which a stage may differ from an even division.
    faithful
        As published: PipeDream and DAPPLE ignore memory, and so recompute nothing.
    """

    name: ClassVar[str] = "pipeline_dp"
    most_plans: ClassVar[int] = 0

    method: str = "alpa"
    choices: int = 32
    spread: int = 16
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"pipeline_dp: method is one of {', '.join(METHODS)}, met {self.method}")
        if self.choices < 1 or self.spread < 0:
            raise ValueError(
                f"pipeline_dp: choices is at least 1 and spread at least 0, met {self.choices} and {self.spread}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, and the divisions that are best by the formula."""
        yield from best_of(problem, space, costs, self._found(problem, space), self.choices)
        return None

    def _found(self, problem: Problem, space: Space) -> Iterator[Found | None]:
        """Yield for every mesh the division that is best by the formula; ``None`` where none fits."""
        tables, allowed = StageCosts(problem), ways(space)
        for layout in meshes(problem, space):
            if layout.chunks > 1 or not dividable(layout):
                continue
            given = division_problem(tables, complete(problem, layout), allowed, self.spread)
            chosen = least_recompute(given, allowed, forgets=self.faithful and self.method in ("pipedream", "dapple"))
            division = self._divided(given, chosen.times, layout)
            if division is None:
                yield None
            else:
                hows = [chosen.hows[stage][count] for stage, count in enumerate(division.counts)]
                yield division.time, divided(layout, division.counts, hows)

    def _divided(self, given: DivisionProblem, times: FloatArray, layout: Layout) -> Partition | None:
        microbatches = len(given.arranged.code) // (2 * given.stages)
        if self.method == "alpa":
            found = sum_and_slowest(times, given.layers, microbatches)
        elif self.method == "dapple":
            found = pivot(times, given.layers, microbatches)
        else:
            found = least_bottleneck(times, given.layers)
            return found and found._replace(time=found.time * microbatches)
        return found
