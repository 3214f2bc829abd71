"""Stages with operators of their own: the fastest of any span of blocks, and the fastest of all together.

A span's time is that of the fastest shardings of its operators that fit in the memory of its pipeline rank, with the
recomputation that they need. Stages are assembled exactly for the sum of their times and the slowest one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.memo import memoise
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.cost_graph import Shortfall
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.stage_costs import Span, StageGraph, StageOperators
from meshwise.strategies.plan.mesh import FORWARD
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import LayerRecompute, PerStage, Recompute, find_stage_recompute
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, Action, ActionKind
from meshwise.strategies.stages.block_division import divide_blocks
from meshwise.strategies.stages.division import FloatArray

STAGE_GAP = 0.01
"""Fraction by which the time of a stage may be above the least within its memory."""


class StageSolution(NamedTuple):
    """The ticks of a step on a stage, a choice for every operator of it, and what it computes again.

    ``is_free`` says that more memory would not make it faster.
    """

    ticks: float
    choice: tuple[int, ...]
    recompute: LayerRecompute
    is_free: bool = False


@dataclass(frozen=True)
class _SpanKey:
    """A span of blocks, equal to those of equal blocks that read from equal operators."""

    content: tuple[tuple[int, ...], tuple[int, ...]]
    num_alive: int
    first: int = field(compare=False)
    end: int = field(compare=False)

    @property
    def span(self) -> Span:
        """The span, without recomputation."""
        return Span(self.first, self.end, self.num_alive, Recompute.NONE)


@dataclass(frozen=True, eq=False)
class StageSolver:
    """The fastest shardings of any span of blocks within a limit of bytes; equal spans are solved once."""

    operators: StageOperators
    limit: int
    recompute_choices: tuple[Recompute, ...]

    def solve_span(self, first: int, end: int, num_alive: int) -> StageSolution | None:
        """Return the fastest solution of the blocks ``first`` to ``end``; ``None`` where nothing fits."""
        content = self.operators.describe_span(Span(first, end, num_alive, Recompute.NONE))
        return self._solve(_SpanKey(content, num_alive, first, end))

    @memoise
    def _solve(self, key: _SpanKey) -> StageSolution | None:
        if Recompute.NONE in self.recompute_choices:
            free_solution = self._solve_unlimited(replace(key, num_alive=0))
            if self.operators.count_bytes(key.span, free_solution.choice) <= self.limit:
                return free_solution
        graphs = (
            (self.operators.build_graph((key.span._replace(recompute=recompute_choice),)), recompute_choice)
            for recompute_choice in self.recompute_choices
        )
        solutions = (self._solve_limited(graph, recompute_choice) for graph, recompute_choice in graphs)
        return min(filter(None, solutions), key=lambda solution: solution.ticks, default=None)

    @memoise
    def _solve_unlimited(self, key: _SpanKey) -> StageSolution:
        return self._solve_free(self.operators.build_graph((key.span,)), Recompute.NONE)

    def solve_after(self, span: Span, known_choices: Mapping[int, int]) -> StageSolution | None:
        """Return the fastest solution of a span whose inputs come in known layouts."""
        graph = self.operators.build_graph((span,), known_choices)
        solution = self._solve_free(graph, span.recompute)
        if span.recompute is Recompute.NONE and self.operators.count_bytes(span, solution.choice) <= self.limit:
            return solution
        return self._solve_limited(graph, span.recompute)

    @staticmethod
    def _solve_free(stage_graph: StageGraph, recompute: LayerRecompute) -> StageSolution:
        """Return the fastest solution of a cost graph with unlimited memory."""
        solution = frontier(stage_graph.graph)
        assert not isinstance(solution, Shortfall)  # without a limit
        return StageSolution(solution.time, solution.choice[stage_graph.num_outside :], recompute, is_free=True)

    def _solve_limited(self, stage_graph: StageGraph, recompute: LayerRecompute) -> StageSolution | None:
        """Return the fastest solution of a cost graph within the limit; ``None`` where none fits."""
        solution = frontier(stage_graph.graph, self.limit, gap=STAGE_GAP)
        if isinstance(solution, Shortfall):
            return None
        return StageSolution(solution.time, solution.choice[stage_graph.num_outside :], recompute)


class Assembly(NamedTuple):
    """The stages of a plan: the end of the blocks of every stage, and its solution."""

    ends: tuple[int, ...]
    stages: tuple[StageSolution, ...]


class BoundaryTicks(NamedTuple):
    """Ticks that depend on where stages end.

    Parameters
    ----------
    crossings
        Of a microbatch that crosses the boundary before each block, forward and backward.
    ties
        For each pair of blocks, the first one first, that use one parameter: those in which their stages, if they are
        two, sum its gradients at the end of a step.
    """

    crossings: FloatArray
    ties: tuple[tuple[int, int, float], ...]


def count_boundary_ticks(operators: StageOperators, costs: StageCosts) -> BoundaryTicks:
    """Return the ticks of boundaries where every rank sends its share; how operators are cut may make it more."""
    problem, plan = operators.problem, operators.plan
    occurrences = problem.graph.occurrences
    crossings = np.zeros(len(occurrences) + 1)
    if plan.pipeline == 1:
        return BoundaryTicks(crossings, ())
    machine, setting = costs.machine(plan), operators.table.setting
    group = machine.list_distinct_groups(FORWARD, Collective.SEND)[0]

    def count_ticks(size: float) -> int:
        return machine.least_ticks(FORWARD, group, Collective.SEND, size / plan.operator_ranks)

    layouts = {block.name: setting.build_layout(block) for block in problem.graph.blocks}
    for number, (_, block) in enumerate(occurrences[:-1], 1):
        sizes = map(layouts[block.name].tensor_bytes, dict.fromkeys(block.outputs))
        crossings[number] = 2 * count_ticks(float(sum(sizes)))
    numbers = {name: number for number, (name, _) in enumerate(occurrences)}
    ties = []
    for (first_name, parameter), (second_name, _) in problem.graph.tied:
        tensor = dict(occurrences)[first_name].tensor[parameter]
        size = float(prod(tensor.shape) * problem.training.gradient_bytes)
        first, second = sorted((numbers[first_name], numbers[second_name]))
        ties.append((first, second, 2.0 * count_ticks(size)))
    return BoundaryTicks(crossings, tuple(ties))


class AssemblyProblem(NamedTuple):
    """Stages to be chosen on one mesh.

    Parameters
    ----------
    plan
        The mesh and the schedule.
    operators
        The operators of every stage on its devices.
    boundaries
        Ticks that depend on where stages end.
    share
        Part of the memory for choices that may be used.
    recompute_choices
        What a stage may compute again, from the fastest to the leanest.
    """

    plan: Plan
    operators: tuple[StageOperators, ...]
    boundaries: BoundaryTicks
    share: float
    recompute_choices: tuple[Recompute, ...]

    def list_limits(self) -> list[int]:
        """Return the bytes for choices on a device of every stage."""
        return [int(operators.limit * self.share) for operators in self.operators]


Assembler = Callable[[AssemblyProblem], Assembly | None]
"""Returns the stages that it chooses; ``None`` where nothing fits."""


def assemble_exactly(problem: AssemblyProblem, spread: float) -> Assembly | None:
    """Return the stages that are fastest together, each with the fastest shardings within its memory.

    ``spread`` is that of `assemble_stages`.
    """
    solvers = {
        operators: StageSolver(operators, limit, problem.recompute_choices)
        for operators, limit in zip(problem.operators, problem.list_limits(), strict=True)
    }
    stage_solvers = [solvers[operators] for operators in problem.operators]
    return assemble_stages(stage_solvers, problem.plan, problem.boundaries, spread)


def assemble_stages(
    solvers: Sequence[StageSolver], plan: Plan, boundaries: BoundaryTicks, spread: float
) -> Assembly | None:
    """Return the stages of a plan that are fastest together, each by its solver; ``None`` where nothing fits.

    ``plan`` has the mesh and the schedule. A stage has between ``1 - spread`` and ``1 + spread`` times its share of the
    least ticks of blocks, or one block. A rank with several stages runs their microbatches one after another, as if it
    had so many more.
    """
    num_blocks, num_stages, num_microbatches = len(boundaries.crossings) - 1, len(solvers), plan.num_microbatches
    alive = count_alive(plan)
    # by stage, as devices differ: the least ticks of the blocks before each, and the share that evens out times
    totals = [np.concatenate([[0.0], np.cumsum(solver.operators.table.least_kernel_ticks)]) for solver in solvers]
    even_time = 1 / sum(1 / max(float(row[-1]), 1.0) for row in totals)
    times = np.full((num_stages, num_blocks + 1, num_blocks + 1), inf)
    for stage in range(num_stages):
        last_end = num_blocks - (num_stages - 1 - stage)
        for first in (0,) if stage == 0 else range(stage, last_end):
            for end in (num_blocks,) if stage == num_stages - 1 else range(first + 1, last_end + 1):
                work = float(totals[stage][end] - totals[stage][first])
                is_near = (1 - spread) * even_time <= work <= (1 + spread) * even_time
                if not is_near and end - first > 1:
                    continue
                solution = solvers[stage].solve_span(first, end, alive[stage])
                if solution is not None:
                    ticks = sum(ticks for earlier, later, ticks in boundaries.ties if earlier < first <= later < end)
                    times[stage, first, end] = (solution.ticks + ticks) / num_microbatches
    division = divide_blocks(times, num_microbatches * plan.chunks, boundaries.crossings)
    if division is None:
        return None
    solutions: list[StageSolution] = []
    known_choices: dict[int, int] = {}
    for stage, (first, end) in enumerate(zip((0, *division.ends[:-1]), division.ends, strict=True)):
        solver = solvers[stage]
        stage_solution = solver.solve_span(first, end, alive[stage])
        assert stage_solution is not None  # its time is finite
        span = Span(first, end, alive[stage], stage_solution.recompute)
        if stage:
            # it was chosen as if its inputs came as it likes them
            stage_solution = solver.solve_after(span, known_choices) or stage_solution
        known_choices |= dict(zip(solver.operators.list_nodes((span,)), stage_solution.choice, strict=True))
        solutions.append(stage_solution)
    return Assembly(division.ends, tuple(solutions))


def build_joint_plan(operators: StageOperators, assembly: Assembly) -> Plan:
    """Return the plan of assembled stages."""
    names = [name for name, _ in operators.problem.graph.occurrences]
    spans = list(zip((0, *assembly.ends[:-1]), assembly.ends, strict=True))
    choices = [index for solution in assembly.stages for index in solution.choice]
    recompute_choices = tuple(solution.recompute for solution in assembly.stages)
    return replace(
        operators.plan,
        stages=tuple(Stage(tuple(names[first:end])) for first, end in spans),
        shardings=operators.build_shardings(choices),
        recompute=recompute_choices[0] if len(set(recompute_choices)) == 1 else PerStage(recompute_choices),
    )


def count_alive(plan: Plan) -> tuple[int, ...]:
    """Return for every stage the microbatches that its rank keeps at the moment when it keeps most in all."""
    result = [0] * len(plan.positions)
    for position, actions in enumerate(plan.actions.orders):
        for stage, num_alive in _count_alive(actions, plan.stages_at(position)).items():
            result[stage] = num_alive
    return tuple(result)


def list_position_spans(problem: Problem, plan: Plan) -> list[tuple[Span, ...]]:
    """Return the spans of blocks of every pipeline position, at the moment when it keeps most microbatches.

    Of a stage that recomputes its first layers, these are a span of their own.
    """
    numbers = {name: number for number, (name, _) in enumerate(problem.graph.occurrences)}
    layers = {name for name, block in problem.graph.occurrences if block.layer}
    result = []
    alive = count_alive(plan)
    for position in range(plan.pipeline):
        spans: list[Span] = []
        for stage in plan.stages_at(position):
            blocks = plan.stages[stage].blocks
            if not blocks:
                continue
            choice = find_stage_recompute(plan.recompute, stage)
            first, end = numbers[blocks[0]], numbers[blocks[-1]] + 1
            middle = end
            if choice.layers is not None:
                layer_names = [name for name in blocks if name in layers][: choice.layers]
                middle = numbers[layer_names[-1]] + 1 if layer_names else first
            spans += [Span(first, middle, alive[stage], choice.layer)] if middle > first else []
            spans += [Span(middle, end, alive[stage], Recompute.NONE)] if end > middle else []
        result.append(tuple(spans))
    return result


def _count_alive(actions: Sequence[Action], stages: Sequence[int]) -> dict[int, int]:
    """Return the microbatches of every stage that a rank keeps at the moment when it keeps most."""
    num_alive = dict.fromkeys(stages, 0)
    fullest = dict(num_alive)
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            num_alive[action.stage] += 1
        elif action.kind in MAKES_GRADIENTS:
            num_alive[action.stage] -= 1
        if sum(num_alive.values()) > sum(fullest.values()):
            fullest = dict(num_alive)
    return fullest
