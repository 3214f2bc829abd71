"""Stages and the shardings of their operators, chosen together.

On a mesh of pipeline ranks, data ranks and operator axes, and for a size of microbatches, a stage may have any span of
blocks. Its time is that of the fastest shardings of its operators that fit in the memory of its pipeline rank, with the
recomputation that they need: an exact cover of the stage (`meshwise.strategies.operators.frontier`). The stages are
then assembled exactly for the sum of their times and the slowest one
(`meshwise.strategies.stages.block_division`). So one stage may be cut along heads and the next along the batch, as if
their tensor- and data-parallel degrees differed. What no sum of operators shows, such as gradients that are summed
under backward, is left to the simulation of the best plans.

A mesh is dropped by a bound. Each of p pipeline ranks computes m microbatches of its stage, and rank k begins when one
microbatch has come through the stages before it. With stages of t_k ticks a step takes at least the largest
``m t_k + t_1 + .. + t_(k-1)``, and the t_k add up to the least ticks T in which devices compute a microbatch. It is
least where all of these are equal: ``T / (1 - (1 - 1/m)**p)``.

References
----------
Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022: stages
on meshes, each by an integer program, assembled by a dynamic program.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from meshwise.simulator.collective import Collective
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.choices import filter_choices, find_pin_violation, resolve_pins
from meshwise.strategies.operators.cost_graph import Shortfall
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.operator_plan import (
    FREE_DECISIONS,
    build_operator_plan,
    cuts_operators,
    list_data_variants,
    list_operator_violations,
    with_tied_layouts,
)
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import PassTable, compute_pass_table
from meshwise.strategies.operators.stage_costs import Span, StageGraph, StageOperators, compute_stage_operators
from meshwise.strategies.plan.mesh import DATA, FORWARD, OPERATOR_AXES, PIPELINE, TENSOR, TENSOR_ROWS, divisors
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import (
    ACTIVATION,
    LayerRecompute,
    PerStage,
    Recompute,
    SomeOperators,
    find_stage_recompute,
)
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, Action, ActionKind
from meshwise.strategies.search.choices import allows_value
from meshwise.strategies.search.proposals import Certificate, ConsideredPlans, Proof, Proposals, Upcoming
from meshwise.strategies.search.space import Space
from meshwise.strategies.stages.block_division import divide_blocks
from meshwise.strategies.stages.division import FloatArray

RECOMPUTE_ORDER = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""What a stage may compute again, from the fastest to the leanest."""

RETRIES = 4
"""How often a mesh is solved, each time with a limit nearer to the bytes that its plan really takes."""

MOST_REFINED = 4
"""Plans of other searches whose operators are cut anew."""

STAGE_GAP = 0.01
"""Fraction by which the time of a stage may be above the least within its memory."""


class JointMesh(NamedTuple):
    """Ranks along the axes of a plan, and its microbatches.

    ``degrees`` are those of the operator axes, the outermost first; ``microbatch`` are the sequences of a data rank.
    """

    pipeline: int
    data: int
    degrees: tuple[tuple[str, int], ...]
    microbatch: int
    num_microbatches: int

    def bound_step(self, work: float) -> float:
        """Return the least time of a step whose microbatches take ``work`` in all stages together.

        >>> JointMesh(2, 1, (("tensor", 1),), 1, 2).bound_step(3.0)
        4.0
        """
        return work / (1 - (1 - 1 / self.num_microbatches) ** self.pipeline)

    def bound_unequal_step(self, works: Sequence[float]) -> float:
        """Return a bound where ``works`` are those of all stages together on the devices of each position.

        All positions share the work in proportion to their speeds, and none waits.

        >>> JointMesh(2, 1, (("tensor", 1),), 1, 4).bound_unequal_step([3.0, 6.0])
        8.0
        """
        return self.num_microbatches / sum(1 / work for work in works)


def list_joint_meshes(problem: Problem, space: Space) -> Iterator[JointMesh]:
    """Yield the meshes of a space: operator axes inside a node, or of whole nodes; microbatches by powers of two.

    There are no more stages than blocks. Two operator axes over all devices, one stage and no data ranks, are what
    searches for operators alone look at.
    """
    devices, node_devices = len(problem.cluster.free_devices), problem.cluster.first_node.devices
    batch, num_blocks = problem.training.global_batch, len(problem.graph.occurrences)
    for pipeline in divisors(devices):
        if pipeline > num_blocks or not allows_value(space.pipeline, pipeline):
            continue
        for data in divisors(devices // pipeline):
            if batch % data or not allows_value(space.data, data):
                continue
            for degrees in _list_degrees(devices // pipeline // data, node_devices, space):
                if pipeline == data == 1 and len(degrees) > 1:
                    continue
                for microbatch in divisors(batch // data):
                    count = batch // data // microbatch
                    is_usual = count & (count - 1) == 0
                    if allows_value(space.microbatch, microbatch) and (space.microbatch or is_usual):
                        yield JointMesh(pipeline, data, degrees, microbatch, count)


def _list_degrees(ranks: int, node_devices: int, space: Space) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the degrees of two operator axes with so many ranks; the inner one lies inside a node."""
    for tensor in divisors(ranks):
        rows = ranks // tensor
        is_local = node_devices % tensor == 0 and (ranks <= node_devices or ranks % node_devices == 0)
        is_row_alone = tensor == 1 < rows  # the same as one inner axis
        if (
            is_local
            and not is_row_alone
            and allows_value(space.tensor, tensor)
            and allows_value(space.tensor_rows, rows)
        ):
            yield ((TENSOR_ROWS, rows), (TENSOR, tensor)) if rows > 1 else ((TENSOR, tensor),)


class _StageSolution(NamedTuple):
    """The ticks of a step on a stage, a choice for every operator of it, and what it computes again.

    ``is_free`` says that more memory would not make it faster.
    """

    ticks: float
    choice: tuple[int, ...]
    recompute: LayerRecompute
    is_free: bool = False


@dataclass(frozen=True, eq=False)
class StageSolver:
    """The fastest shardings of any span of blocks within a limit of bytes; equal spans are solved once."""

    operators: StageOperators
    limit: int
    recompute_choices: tuple[Recompute, ...]
    free_solutions: dict[tuple[str, ...], _StageSolution] = field(default_factory=dict)
    solutions: dict[tuple[tuple[str, ...], int], _StageSolution | None] = field(default_factory=dict)

    def solve_span(self, first: int, end: int, num_alive: int) -> _StageSolution | None:
        """Return the fastest solution of the blocks ``first`` to ``end``; ``None`` where nothing fits."""
        span = Span(first, end, num_alive, Recompute.NONE)
        names = self.operators.describe_span(span)
        key = names, num_alive
        if key not in self.solutions:
            self.solutions[key] = self._solve(names, span)
        return self.solutions[key]

    def _solve(self, names: tuple[str, ...], span: Span) -> _StageSolution | None:
        if Recompute.NONE in self.recompute_choices:
            if names not in self.free_solutions:
                self.free_solutions[names] = self._solve_free(self.operators.build_graph((span,)), Recompute.NONE)
            free_solution = self.free_solutions[names]
            if self.operators.count_bytes(span, free_solution.choice) <= self.limit:
                return free_solution
        graphs = (
            (self.operators.build_graph((span._replace(recompute=recompute_choice),)), recompute_choice)
            for recompute_choice in self.recompute_choices
        )
        solutions = (self._solve_limited(graph, recompute_choice) for graph, recompute_choice in graphs)
        return min(filter(None, solutions), key=lambda solution: solution.ticks, default=None)

    def solve_after(self, span: Span, known_choices: Mapping[int, int]) -> _StageSolution | None:
        """Return the fastest solution of a span whose inputs come in known layouts."""
        graph = self.operators.build_graph((span,), known_choices)
        solution = self._solve_free(graph, span.recompute)
        if span.recompute is Recompute.NONE and self.operators.count_bytes(span, solution.choice) <= self.limit:
            return solution
        return self._solve_limited(graph, span.recompute)

    @staticmethod
    def _solve_free(stage_graph: StageGraph, recompute: LayerRecompute) -> _StageSolution:
        """Return the fastest solution of a cost graph with unlimited memory."""
        solution = frontier(stage_graph.graph)
        assert not isinstance(solution, Shortfall)  # without a limit
        return _StageSolution(solution.time, solution.choice[stage_graph.num_outside :], recompute, is_free=True)

    def _solve_limited(self, stage_graph: StageGraph, recompute: LayerRecompute) -> _StageSolution | None:
        """Return the fastest solution of a cost graph within the limit; ``None`` where none fits."""
        solution = frontier(stage_graph.graph, self.limit, gap=STAGE_GAP)
        if isinstance(solution, Shortfall):
            return None
        return _StageSolution(solution.time, solution.choice[stage_graph.num_outside :], recompute)


class _Assembly(NamedTuple):
    """The stages of a plan: the end of the blocks of every stage, and its solution."""

    ends: tuple[int, ...]
    stages: tuple[_StageSolution, ...]


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


def assemble_stages(
    solvers: Sequence[StageSolver], mesh: JointMesh, boundaries: BoundaryTicks, spread: float
) -> _Assembly | None:
    """Return the stages of a mesh that are fastest together, each by its solver; ``None`` where nothing fits.

    A stage has between ``1 - spread`` and ``1 + spread`` times its share of the least ticks of blocks, or one block.
    """
    num_blocks, num_stages = len(boundaries.crossings) - 1, mesh.pipeline
    # by position, as devices differ: the least ticks of the blocks before each, and the share that evens out times
    totals = [np.concatenate([[0.0], np.cumsum(solver.operators.table.least_kernel_ticks)]) for solver in solvers]
    even_time = 1 / sum(1 / max(float(row[-1]), 1.0) for row in totals)
    times = np.full((num_stages, num_blocks + 1, num_blocks + 1), inf)
    for stage in reversed(range(num_stages)):
        num_alive = min(num_stages - stage, mesh.num_microbatches)
        firsts = (0,) if stage == 0 else range(stage, num_blocks - (num_stages - 1 - stage))
        for first in firsts:
            last_end = num_blocks - (num_stages - 1 - stage)
            ends = (num_blocks,) if stage == num_stages - 1 else range(first + 1, last_end + 1)
            for end in ends:
                work = float(totals[stage][end] - totals[stage][first])
                is_near = (1 - spread) * even_time <= work <= (1 + spread) * even_time
                if not is_near and end - first > 1:
                    continue
                solution = solvers[stage].solve_span(first, end, num_alive)
                if solution is not None:
                    ticks = sum(ticks for earlier, later, ticks in boundaries.ties if earlier < first <= later < end)
                    times[stage, first, end] = (solution.ticks + ticks) / mesh.num_microbatches
    division = divide_blocks(times, mesh.num_microbatches, boundaries.crossings)
    if division is None:
        return None
    solutions: list[_StageSolution] = []
    known_choices: dict[int, int] = {}
    for stage, (first, end) in enumerate(zip((0, *division.ends[:-1]), division.ends, strict=True)):
        num_alive = min(num_stages - stage, mesh.num_microbatches)
        solver = solvers[stage]
        stage_solution = solver.solve_span(first, end, num_alive)
        assert stage_solution is not None  # its time is finite
        span = Span(first, end, num_alive, stage_solution.recompute)
        if stage:
            # it was chosen as if its inputs came as it likes them
            stage_solution = solver.solve_after(span, known_choices) or stage_solution
        known_choices |= dict(zip(solver.operators.list_nodes((span,)), stage_solution.choice, strict=True))
        solutions.append(stage_solution)
    return _Assembly(division.ends, tuple(solutions))


def build_joint_plan(operators: StageOperators, assembly: _Assembly) -> Plan:
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


@dataclass(slots=True)
class BestPlans:
    """The plans that fit of those that a search has evaluated so far, and the best of them with its time in seconds."""

    time: float = inf
    plan: Plan | None = None
    evaluated: list[tuple[float, Plan]] = field(default_factory=list)

    def note(self, plan: Plan, evaluation: Evaluation) -> None:
        """Remember a plan that fits."""
        if evaluation.fits:
            self.evaluated.append((evaluation.step_time, plan))
            if evaluation.step_time < self.time:
                self.time, self.plan = evaluation.step_time, plan


@dataclass(slots=True)
class Course:
    """An algorithm that runs some proposals at a time, beside others, and the last proof that it made.

    Its proofs and certificates are about a part of what all of them look at, and go no further.
    """

    proposals: Proposals
    best: BestPlans
    answer: Evaluation | None = None
    proof: Proof | None = None
    is_done: bool = False

    def advance(self, count: float = inf) -> Generator[Plan | Upcoming | ConsideredPlans, Evaluation, None]:
        """Yield what the algorithm yields, ``count`` proposals at most, and note every plan."""
        while count > 0 and not self.is_done:
            count -= 1
            try:
                proposal = next(self.proposals) if self.answer is None else self.proposals.send(self.answer)
            except StopIteration as end:
                self.proof, self.is_done = end.value or self.proof, True
                return
            self.answer = None
            if isinstance(proposal, Plan):
                self.answer = yield proposal
                self.best.note(proposal, self.answer)
            elif isinstance(proposal, Proof):
                self.proof = proposal
            elif not isinstance(proposal, Certificate):
                yield proposal


class JointSearch:
    """The search of one problem: tables are shared between meshes, and the best time so far drops meshes."""

    def __init__(self, problem: Problem, space: Space, costs: CostModel, spread: float, best: BestPlans) -> None:
        self.problem, self.space, self.costs, self.spread, self.best = problem, space, costs, spread, best
        self.stage_costs, self.pins = StageCosts(problem), resolve_pins(problem.graph, space.pin)
        self.tables: dict[tuple[tuple[tuple[str, int], ...], int, bool, RankProfile], PassTable] = {}
        device_work = least_step_time(problem)
        bounded_meshes = (
            (mesh.bound_step(device_work * mesh.pipeline / mesh.num_microbatches), mesh)
            for mesh in list_joint_meshes(problem, space)
            if not find_pin_violation(self.pins, dict(mesh.degrees), mesh.microbatch)
        )
        # tables of two axes take ten times as long as those of one
        self.meshes = sorted(bounded_meshes, key=lambda pair: (len(pair[1].degrees), *pair))
        self.bound = inf
        """The least bound of the meshes looked at: no plan on one of them takes less seconds."""
        self.num_searched = 0

    @property
    def total_bound(self) -> float:
        """The least bound of all meshes, those included that were not looked at."""
        return min([self.bound, *(bound for bound, _ in self.meshes[self.num_searched :])])

    def run(self) -> Generator[Plan | Proof, Evaluation, None]:
        """Yield the best plan of every mesh that may be faster than the best so far, the most promising mesh first.

        Then yield the fastest plans of other searches with operators cut anew, and changes of the best plan. After
        every mesh the least bound so far is told.
        """
        for bound, mesh in self.meshes:
            if bound >= self.best.time:
                self.bound = min(self.bound, bound)
            else:
                try:
                    yield from self._propose_mesh(mesh)
                except ValueError:  # too entangled for the exact solver
                    self.bound = min(self.bound, bound)
            self.num_searched += 1
            yield Proof(self.total_bound)
        for _, plan in sorted(self.best.evaluated, key=lambda pair: pair[0])[:MOST_REFINED]:
            yield from self._cut_anew(plan)
        yield from self._change_decisions()

    def _propose(self, plan: Plan) -> Generator[Plan, Evaluation, bool]:
        """Yield a plan unless it cannot be the best; return whether it is the best."""
        if not self.costs.fits(plan) or self.costs.plan_bound(plan) >= self.best.time:
            return False
        evaluation = yield plan
        is_better = evaluation.fits and evaluation.step_time < self.best.time
        self.best.note(plan, evaluation)
        return is_better

    def _propose_mesh(self, mesh: JointMesh) -> Generator[Plan, Evaluation, None]:
        self.costs.check_time()
        base_plan = self.build_base_plan(mesh)
        tables = self._find_tables(base_plan)
        bound = bound_mesh(mesh, tables)
        self.bound = min(self.bound, bound)
        if bound >= self.best.time:
            return
        for zero in (0,) if mesh.data == 1 else (1, 2, 3):
            if not allows_value(self.space.zero, zero):
                continue
            plan = replace(base_plan, zero=zero)
            positions = self._describe_positions(plan, tables)
            is_bound = yield from self._propose_fitting(mesh, positions)
            if not is_bound:
                break  # memory does not bind: further sharing of states only adds gathers

    def _describe_positions(self, plan: Plan, tables: Sequence[PassTable]) -> list[StageOperators]:
        """Return the operators of the stages of every position; equal positions share theirs."""
        by_table = {id(table): compute_stage_operators(self.problem, plan, table, self.stage_costs) for table in tables}
        return [by_table[id(table)] for table in tables]

    def _propose_fitting(
        self, mesh: JointMesh, positions: Sequence[StageOperators]
    ) -> Generator[Plan, Evaluation, bool]:
        """Yield the best plan of a mesh that fits; return whether more memory might make it faster."""
        share, boundaries = 1.0, self._count_boundary_ticks(positions[0])
        for _ in range(RETRIES):
            by_operators = {
                id(operators): StageSolver(operators, int(operators.limit * share), self._list_recomputes())
                for operators in positions
            }
            solvers = [by_operators[id(operators)] for operators in positions]
            assembly = assemble_stages(solvers, mesh, boundaries, self.spread)
            if assembly is None:
                return True
            plan = with_tied_layouts(self.problem, build_joint_plan(positions[0], assembly))
            if any(list_operator_violations(self.problem, plan)):
                return False
            if self.costs.fits(plan):
                for variant in list_data_variants(self.problem, plan) if mesh.data == 1 and not self.pins else (plan,):
                    for rival in self._list_schedules(variant):
                        yield from self._propose(rival)
                return not all(solution.is_free for solution in assembly.stages)
            share = self._shrink_share(plan, positions, share)
        return True

    def _shrink_share(self, plan: Plan, positions: Sequence[StageOperators], share: float) -> float:
        """Return the share of the memory for choices with which a plan that did not fit may fit."""
        limit = min(operators.limit for operators in positions)
        resident_bytes = min(operators.resident_bytes for operators in positions)
        needed_bytes = self.costs.peak_memory(plan) - resident_bytes
        return min(share * limit / needed_bytes, 0.97 * share)

    def _count_boundary_ticks(self, operators: StageOperators) -> BoundaryTicks:
        """Return the ticks of boundaries where every rank sends its share; how operators are cut may make it more."""
        occurrences, plan = self.problem.graph.occurrences, operators.plan
        crossings = np.zeros(len(occurrences) + 1)
        if plan.pipeline == 1:
            return BoundaryTicks(crossings, ())
        machine, setting = self.stage_costs.machine(plan), operators.table.setting
        group = machine.list_distinct_groups(FORWARD, Collective.SEND)[0]

        def count_ticks(size: float) -> int:
            return machine.least_ticks(FORWARD, group, Collective.SEND, size / plan.operator_ranks)

        layouts = {block.name: setting.build_layout(block) for block in self.problem.graph.blocks}
        for number, (_, block) in enumerate(occurrences[:-1], 1):
            sizes = map(layouts[block.name].tensor_bytes, dict.fromkeys(block.outputs))
            crossings[number] = 2 * count_ticks(float(sum(sizes)))
        numbers = {name: number for number, (name, _) in enumerate(occurrences)}
        ties = []
        for (first_name, parameter), (second_name, _) in self.problem.graph.tied:
            tensor = dict(occurrences)[first_name].tensor[parameter]
            size = float(prod(tensor.shape) * self.problem.training.gradient_bytes)
            first, second = sorted((numbers[first_name], numbers[second_name]))
            ties.append((first, second, 2.0 * count_ticks(size)))
        return BoundaryTicks(crossings, tuple(ties))

    def _list_schedules(self, plan: Plan) -> list[Plan]:
        """Return a plan with every schedule that the space allows, the lowest bound first."""
        schedules = CHANGED_SCHEDULES if plan.pipeline > 1 else (plan.schedule,)
        plans = [replace(plan, schedule=schedule) for schedule in schedules if self._allows("schedule", schedule)]
        legal_plans = [rival for rival in plans if not any(list_operator_violations(self.problem, rival))]
        return sorted(legal_plans, key=self.costs.plan_bound)

    def _allows(self, name: str, value: object) -> bool:
        return allows_value(getattr(self.space, name), value)

    def _cut_anew(self, plan: Plan) -> Generator[Plan, Evaluation, None]:
        """Yield a plan with the operators of every pipeline rank cut anew within its memory."""
        axes = {axis.name for axis in plan.mesh.axes if axis.size > 1}
        if not axes <= {PIPELINE, DATA, TENSOR, TENSOR_ROWS} or not isinstance(plan.microbatch, int) or plan.offload:
            return
        base_plan = _without_layout(self.problem, plan)
        positions = self._describe_positions(base_plan, self._find_tables(base_plan))
        share, position_spans = 1.0, list_position_spans(self.problem, plan)
        for _ in range(RETRIES):
            self.costs.check_time()
            choice_by_node: dict[int, int] = {}
            for operators, spans in zip(positions, position_spans, strict=True):
                graph, num_outside = operators.build_graph(spans)
                solution = frontier(graph, int(operators.limit * share), gap=STAGE_GAP)
                if isinstance(solution, Shortfall):
                    return
                choice = solution.choice[num_outside:]
                choice_by_node |= dict(zip(operators.list_nodes(spans), choice, strict=True))
            shardings = positions[0].build_shardings([choice for _, choice in sorted(choice_by_node.items())])
            new_plan = with_tied_layouts(self.problem, replace(base_plan, shardings=shardings))
            if any(list_operator_violations(self.problem, new_plan)):
                return
            if self.costs.fits(new_plan):
                yield from self._propose(new_plan)
                return
            share = self._shrink_share(new_plan, positions, share)

    def _change_decisions(self) -> Generator[Plan, Evaluation, None]:
        """Yield the best plan with one decision of the step changed, as long as that makes it faster."""
        is_better = True
        while is_better and (plan := self.best.plan) is not None and cuts_operators(self.problem, plan):
            is_better = False
            for new_plan in list_step_changes(plan, self.space):
                if not any(list_operator_violations(self.problem, new_plan)):
                    is_better = (yield from self._propose(new_plan)) or is_better

    def _list_recomputes(self) -> tuple[Recompute, ...]:
        has_layers = any(block.layer for block in self.problem.graph.blocks)
        return tuple(
            choice
            for choice in RECOMPUTE_ORDER
            if allows_value(self.space.recompute, choice) and (has_layers or choice is Recompute.NONE)
        )

    def build_base_plan(self, mesh: JointMesh) -> Plan:
        """Return the plan of a mesh with whole operators, one block a stage and all others in the last."""
        names, last = [name for name, _ in self.problem.graph.occurrences], mesh.pipeline - 1
        stages = (*(Stage((name,)) for name in names[:last]), Stage(tuple(names[last:])))
        return build_operator_plan(
            self.problem, dict(mesh.degrees), mesh.microbatch, data=mesh.data, stages=stages, schedule="1f1b"
        )

    def _find_tables(self, plan: Plan) -> list[PassTable]:
        """Return the table of every position's slowest rank, which no degree outside the operator axes changes."""
        precision = self.problem.training.precision
        ranks = [min(row, key=lambda rank: rank.accelerator.peak(precision)) for row in self._list_ranks(plan)]
        return [self._find_table(plan, rank) for rank in ranks]

    def _list_ranks(self, plan: Plan) -> tuple[tuple[RankProfile, ...], ...]:
        return self.stage_costs.machine(plan).ranks

    def _find_table(self, plan: Plan, rank: RankProfile) -> PassTable:
        degrees = tuple((axis.name, axis.size) for axis in plan.mesh.axes if axis.name in OPERATOR_AXES)
        key = degrees, plan.sequences, plan.num_microbatches > 1, rank
        if key not in self.tables:
            setting = Setting(self.problem, plan, self.stage_costs, rank)
            self.tables[key] = compute_pass_table(setting, partial(filter_choices, self.pins))
        return self.tables[key]


def bound_mesh(mesh: JointMesh, tables: Sequence[PassTable]) -> float:
    """Return a lower bound in seconds of all plans on a mesh; ``tables`` are those of every position's ranks."""
    reference = np.array(tables[0].least_kernel_ticks, float)
    total = float(reference.sum()) / TICKS_PER_SECOND
    if all(table is tables[0] for table in tables):
        return mesh.bound_step(total)
    is_work = reference > 0
    ratios = ((np.array(table.least_kernel_ticks, float)[is_work] / reference[is_work]).min() for table in tables)
    return mesh.bound_unequal_step([total * float(ratio) for ratio in ratios])


def _without_layout(problem: Problem, plan: Plan) -> Plan:
    """Return a plan as one whose shardings alone say how operators are cut."""
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    built_plan = build_operator_plan(
        problem,
        degrees,
        plan.sequences,
        plan.shardings,
        data=plan.data,
        stages=plan.stages,
        schedule=plan.schedule,
        chunks=plan.chunks,
    )
    return replace(built_plan, **{name: getattr(plan, name) for name in FREE_DECISIONS})


def list_position_spans(problem: Problem, plan: Plan) -> list[tuple[Span, ...]]:
    """Return the spans of blocks of every pipeline position, at the moment when it keeps most microbatches.

    Of a stage that recomputes its first layers, these are a span of their own.
    """
    numbers = {name: number for number, (name, _) in enumerate(problem.graph.occurrences)}
    layers = {name for name, block in problem.graph.occurrences if block.layer}
    result = []
    for position, actions in enumerate(plan.actions.orders):
        num_alive = _count_alive(actions, plan.stages_at(position))
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
            spans += [Span(first, middle, num_alive[stage], choice.layer)] if middle > first else []
            spans += [Span(middle, end, num_alive[stage], Recompute.NONE)] if end > middle else []
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


CHANGED_SCHEDULES = ("1f1b", "zb1p", "gpipe")
"""Schedules of one stage a rank that the best plan is tried with."""


def list_step_changes(plan: Plan, space: Space) -> Iterator[Plan]:
    """Yield a plan with one decision of its step changed that a space allows."""
    changes: dict[str, Sequence[Any]] = {
        "zero": (0, 1, 2, 3) if plan.data > 1 else (),
        "overlap_tensor": (True, False) if plan.operator_ranks > 1 else (),
        "recompute": (*RECOMPUTE_ORDER, SomeOperators((ACTIVATION,))),
        "schedule": CHANGED_SCHEDULES if plan.pipeline > 1 and plan.chunks == 1 else (),
    }
    for name, values in changes.items():
        for value in values:
            if value != getattr(plan, name) and allows_value(getattr(space, name), value):
                yield replace(plan, **{name: value})
