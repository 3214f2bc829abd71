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
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.partition import count_stage_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute, StageRecompute
from meshwise.strategies.search.proposals import Proof, Proposals
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.stage_search import (
    TimedLayout,
    allows_whole_layers,
    divide_layout,
    find_least_recompute,
    find_promising,
    is_dividable,
    list_flat_meshes,
    list_meshes,
    list_recompute_choices,
    list_stage_options,
    list_stage_recomputes,
    propose_best,
    recompute_layers,
)
from meshwise.strategies.stages.division import DivisionProblem, FloatArray
from meshwise.strategies.stages.dynamic_programs import (
    LayerChoice,
    Partition,
    choose_options,
    choose_options_on_grid,
    minimize_bottleneck,
    minimize_pivot,
    minimize_sum_and_slowest,
)
from meshwise.strategies.stages.integer_programs import (
    DivisionProgram,
    DivisionSolution,
    round_parts,
    solve_inter_stage,
)
from meshwise.strategies.stages.tables import build_division_problem, compute_work_bound

MIST_SPREAD = 2
"""Layers by which a stage of Mist may differ from an even division (``inter_tuning_mip.py``)."""


class _QueuedMesh(NamedTuple):
    """A mesh in the queue: a lower bound of its step time in seconds, and whether it is from its linear program."""

    bound: float
    is_relaxed: bool
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

    def _find_spread(self, layout: Layout) -> int:
        return self.looped_spread if layout.chunks > 1 else self.spread

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, then better and better divisions, and proofs of how fast any division can be."""
        if self.faithful:
            yield from propose_best(problem, space, costs, _list_published(problem, space), self.choices)
            return None
        uniform_layout = find_promising(problem, space, costs)
        best_time = inf if uniform_layout is None else (yield complete(problem, uniform_layout)).step_time
        return (yield from self.refine(problem, space, costs, list_meshes(problem, space), best_time))

    def refine(
        self, problem: Problem, space: Space, costs: CostModel, mesh_layouts: Iterable[Layout], best_time: float
    ) -> Proposals:
        """Yield divisions of meshes that may take less than ``best_time`` seconds; return the proof about all of them.

        Nothing is proven where the space forbids layers without recomputation, or a mesh has no critical paths.
        """
        tables, allowed_choices, lower_bound = StageCosts(problem), list_recompute_choices(space), inf
        queue: list[_QueuedMesh] = []
        can_prove = allows_whole_layers(space)
        for number, layout in enumerate(mesh_layouts):
            if is_dividable(layout):
                plan = complete(problem, layout)
                costs.plan_bound(plan)  # raises OutOfTime where time is up: tables look at no plan and would not notice
                work_time = to_seconds(int(compute_work_bound(tables, plan, self._find_spread(layout))))
                heappush(queue, _QueuedMesh(work_time, False, number, layout))
            else:
                can_prove = False
        while queue and queue[0].bound < (target_time := best_time / (1 + self.tolerance)):
            if can_prove:
                yield Proof(min(queue[0].bound, lower_bound))
            mesh = heappop(queue)
            plan = complete(problem, mesh.layout)
            costs.plan_bound(plan)
            stage_problem = build_division_problem(tables, plan, allowed_choices, self._find_spread(mesh.layout))
            program = DivisionProgram(stage_problem)
            solution = program.solve_relaxed(target_time * TICKS_PER_SECOND)
            if solution is not None and mesh.is_relaxed:
                solution = program.solve_integer(self.nodes, target_time * TICKS_PER_SECOND)
            bound = max(mesh.bound, min(program.bound / TICKS_PER_SECOND, target_time))
            if not mesh.is_relaxed and solution is not None:
                heappush(queue, mesh._replace(bound=bound, is_relaxed=True))
                continue
            lower_bound = min(lower_bound, bound)
            if solution is None:
                continue
            chosen_plan = _build_plan(problem, mesh.layout, stage_problem, solution, allowed_choices)
            if costs.fits(chosen_plan):
                best_time = min(best_time, (yield chosen_plan).step_time)
        proven_bound = min(lower_bound, best_time / (1 + self.tolerance))
        return Proof(proven_bound) if can_prove and proven_bound < inf else None


def _list_published(problem: Problem, space: Space) -> Iterator[tuple[float, Layout]]:
    """Yield for every mesh the division for which Mist's formula is least, and the formula's seconds."""
    tables, allowed_choices = StageCosts(problem), list_recompute_choices(space)
    for plan, layout in list_flat_meshes(problem, space):
        stage_problem = build_division_problem(tables, plan, allowed_choices, MIST_SPREAD)
        counts = range(stage_problem.min_layers, stage_problem.max_layers + 1)
        rows: list[dict[int, list[tuple[float, StageRecompute]]]] = [
            {n: options for n in counts if (options := list_stage_options(stage_problem, allowed_choices, stage, n))}
            for stage in range(stage_problem.num_stages)
        ]
        tail_times = [
            {n: float(stage_problem.tail_ticks[index] + n * stage_problem.tail_layer_ticks[index]) for n in row}
            for index, row in enumerate(rows)
        ]
        points = [
            {n: [(time, tail[n]) for time, _ in options] for n, options in row.items()}
            for row, tail in zip(rows, tail_times, strict=True)
        ]
        microbatches = len(stage_problem.arrangement.code) // (2 * stage_problem.num_stages)
        solution = solve_inter_stage(points, stage_problem.num_layers, microbatches)
        if solution is not None:
            chosen_rows = zip(rows, solution.counts, solution.points, strict=True)
            yield (
                solution.time,
                divide_layout(layout, solution.counts, [row[n][point][1] for row, n, point in chosen_rows]),
            )


def _build_plan(
    problem: Problem,
    layout: Layout,
    stage_problem: DivisionProblem,
    solution: DivisionSolution,
    allowed_choices: tuple[Recompute, ...],
) -> Plan:
    """Return the plan of a fractional solution, rounded to whole layers."""
    counts = round_parts(
        solution.counts, np.full(stage_problem.num_stages, float(stage_problem.max_layers)), stage_problem.num_ranks
    )
    num_recomputed = np.array(
        [round_parts(row, counts.astype(float), stage_problem.num_ranks) for row in solution.recompute_counts]
    ).reshape(-1, stage_problem.num_stages)
    return complete(
        problem, divide_layout(layout, counts.tolist(), list_stage_recomputes(counts, num_recomputed, allowed_choices))
    )


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
        yield from propose_best(problem, space, costs, self._list_divisions(problem, space), self.choices)
        return None

    def _list_divisions(self, problem: Problem, space: Space) -> Iterator[TimedLayout | None]:
        """Yield for every mesh the fastest recomputation of its layers; ``None`` where none fits."""
        tables, allowed_choices = StageCosts(problem), list_recompute_choices(space)
        for plan, layout in list_flat_meshes(problem, space):
            stage_problem = build_division_problem(tables, plan, allowed_choices, 1)
            counts = count_stage_layers(problem.graph, plan.stages)
            stage_choices = [
                self._choose_stage(stage_problem, allowed_choices, stage, count) for stage, count in enumerate(counts)
            ]
            recompute_choices = [stage_choice[0] for stage_choice in stage_choices if stage_choice is not None]
            if len(recompute_choices) != len(counts):
                yield None
            else:
                num_recomputed = [
                    [
                        stage_choice[1] if stage_choice and stage_choice[2] is recompute_choice else 0
                        for stage_choice in stage_choices
                    ]
                    for recompute_choice in allowed_choices
                ]
                yield (
                    stage_problem.compute_step_ticks(counts, num_recomputed),
                    divide_layout(layout, counts, recompute_choices),
                )

    def _choose_stage(
        self, stage_problem: DivisionProblem, allowed_choices: Sequence[Recompute], stage: int, count: int
    ) -> tuple[StageRecompute, int, Recompute] | None:
        """Return the recompute choice of a stage, its number of layers and its way; ``None`` where it cannot fit."""
        best_choice: tuple[float, StageRecompute, int, Recompute] | None = None
        for choice_index, recompute_choice in (
            enumerate(allowed_choices) if allowed_choices else [(None, Recompute.NONE)]
        ):
            choice = self._choose_layers(stage_problem, stage, count, choice_index)
            if choice is not None and (best_choice is None or choice.time < best_choice[0]):
                num_recomputed = sum(choice.options)
                best_choice = (
                    choice.time,
                    recompute_layers(recompute_choice, num_recomputed, count),
                    num_recomputed,
                    recompute_choice,
                )
        return best_choice and best_choice[1:]

    def _choose_layers(
        self, stage_problem: DivisionProblem, stage: int, count: int, choice_index: int | None
    ) -> LayerChoice | None:
        """Return the fastest choice, for every layer of a stage, between no recomputation and one way."""
        moments = stage_problem.moments[stage]
        num_alive, room = (
            (int(moments.num_alive[0, stage]), float(moments.free_bytes[0])) if len(moments.free_bytes) else (0, 0.0)
        )
        limit = room - count * stage_problem.state_bytes[stage] - num_alive * stage_problem.base_kept_bytes[stage]
        plain_option = 0.0, num_alive * float(stage_problem.layer_kept_bytes[stage])
        options = [plain_option]
        if choice_index is not None:
            options.append(
                (
                    float(stage_problem.recompute_ticks[choice_index, stage]),
                    plain_option[1] - num_alive * float(stage_problem.saved_bytes[choice_index, stage]),
                )
            )
        solve = choose_options_on_grid if self.faithful else choose_options
        return solve([options] * count, limit)


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
        yield from propose_best(problem, space, costs, self._list_divisions(problem, space), self.choices)
        return None

    def _list_divisions(self, problem: Problem, space: Space) -> Iterator[TimedLayout | None]:
        """Yield for every mesh the division that is best by the formula; ``None`` where none fits."""
        tables, allowed_choices = StageCosts(problem), list_recompute_choices(space)
        for plan, layout in list_flat_meshes(problem, space):
            stage_problem = build_division_problem(tables, plan, allowed_choices, self.spread)
            stage_times = find_least_recompute(
                stage_problem, allowed_choices, ignores_memory=self.faithful and self.method in ("pipedream", "dapple")
            )
            division = self._divide_stages(stage_problem, stage_times.times)
            if division is None:
                yield None
            else:
                recompute_choices = [
                    stage_times.recompute_choices[stage][count] for stage, count in enumerate(division.counts)
                ]
                yield division.time, divide_layout(layout, division.counts, recompute_choices)

    def _divide_stages(self, stage_problem: DivisionProblem, times: FloatArray) -> Partition | None:
        microbatches = len(stage_problem.arrangement.code) // (2 * stage_problem.num_stages)
        if self.method == "alpa":
            partition = minimize_sum_and_slowest(times, stage_problem.num_layers, microbatches)
        elif self.method == "dapple":
            partition = minimize_pivot(times, stage_problem.num_layers, microbatches)
        else:
            partition = minimize_bottleneck(times, stage_problem.num_layers)
            return partition and partition._replace(time=partition.time * microbatches)
        return partition
