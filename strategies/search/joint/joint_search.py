"""Stages and the shardings of their operators, chosen together.

On a mesh of pipeline ranks, data ranks and operator axes, and for a size of microbatches, a stage may have any span of
blocks. Its time is that of the fastest shardings of its operators that fit in the memory of its pipeline rank, with the
recomputation that they need: an exact cover of the stage (`meshwise.strategies.operators.frontier`). The stages are
then assembled exactly for the sum of their times and the slowest one
(`meshwise.strategies.stages.block_division`). So one stage may be cut along heads and the next along the batch, as if
their tensor- and data-parallel degrees differed. What no sum of operators shows, such as gradients that are summed
under backward, is left to the simulation of the best plans.

References
----------
Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022: stages
on meshes, each by an integer program, assembled by a dynamic program.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from meshwise.simulator.memo import LatestResults
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.bucket_elimination import EntangledGraphError
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
from meshwise.strategies.operators.stage_costs import StageOperators, compute_stage_operators
from meshwise.strategies.plan.layout import CORE_SCHEDULES, DECISIONS
from meshwise.strategies.plan.mesh import AXES, DATA, OPERATOR_AXES, PIPELINE, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import ACTIVATION, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.search.choices import allows_value
from meshwise.strategies.search.joint.courses import BestPlans
from meshwise.strategies.search.joint.meshes import JointMesh, bound_mesh, list_joint_meshes
from meshwise.strategies.search.joint.stages import (
    STAGE_GAP,
    Assembler,
    AssemblyProblem,
    build_joint_plan,
    count_boundary_ticks,
    list_position_spans,
)
from meshwise.strategies.search.proposals import Proof
from meshwise.strategies.search.space import Space

RECOMPUTE_ORDER = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""What a stage may compute again, from the fastest to the leanest."""

RETRIES = 4
"""How often a mesh is solved, each time with a limit nearer to the bytes that its plan really takes."""

MAX_TABLE_BYTES = 2**28
"""Bytes of the tables that are kept for other meshes, those used last."""

MOST_REFINED = 4
"""Plans of other searches whose operators are cut anew."""


class JointSearch:
    """The search of one problem: tables are shared between meshes, and the best time so far drops meshes."""

    def __init__(self, problem: Problem, space: Space, costs: CostModel, assemble: Assembler, best: BestPlans) -> None:
        self.problem, self.space, self.costs, self.assemble, self.best = problem, space, costs, assemble, best
        self.stage_costs, self.pins = StageCosts(problem), resolve_pins(problem.graph, space.pin)
        self.tables = LatestResults[PassTable](MAX_TABLE_BYTES)
        self.least_time = least_step_time(problem)
        """Seconds in which all devices at their peak compute a step: no plan of any mesh takes less."""
        self.splits_backward = any(
            find_rule(schedule).splits_backward for schedule in MESH_SCHEDULES if self._allows("schedule", schedule)
        )
        meshes = (
            mesh
            for mesh in list_joint_meshes(problem, space)
            if not find_pin_violation(self.pins, dict(mesh.degrees), mesh.microbatch)
        )
        # tables of two axes take ten times as long as those of one; a long wait for the first microbatch comes last
        self.meshes = sorted(meshes, key=lambda mesh: (len(mesh.degrees), self._guess_time(mesh), mesh))
        if not self._is_open():
            self.meshes = []
        self.bound = inf
        """The least bound of the meshes looked at: no plan on one of them takes less seconds."""
        self.num_searched = 0

    @property
    def total_bound(self) -> float:
        """The least bound of all meshes, those included that were not looked at."""
        return self.bound if self.num_searched == len(self.meshes) > 0 else min(self.bound, self.least_time)

    def _guess_time(self, mesh: JointMesh) -> float:
        return mesh.bound_step(self.least_time * mesh.pipeline / mesh.num_microbatches)

    def _is_open(self) -> bool:
        """Return whether a space leaves stages and operators open; trainers can say no operators cut apart."""
        acceptor = self.space.accepts
        return (acceptor is None or acceptor.cuts_operators) and self.space.stages is None

    def run(self) -> Generator[Plan | Proof, Evaluation, None]:
        """Yield the plans of `run_meshes`, then the fastest plans of other searches with operators cut anew.

        Last come changes of the best plan.
        """
        yield from self.run_meshes()
        if not self._is_open():
            return
        for plan in sorted(self.best.step_times, key=self.best.step_times.__getitem__)[:MOST_REFINED]:
            try:
                yield from self._cut_anew(plan)
                yield from self._divide_anew(plan)
            except EntangledGraphError:
                continue
        yield from self._change_decisions()

    def run_meshes(self) -> Generator[Plan | Proof, Evaluation, None]:
        """Yield the best plan of every mesh that may be faster than the best so far, the most promising mesh first.

        After every mesh the least bound so far is told.
        """
        for mesh in self.meshes:
            try:
                yield from self._propose_mesh(mesh)
            except EntangledGraphError:
                self.bound = min(self.bound, self.least_time)
            self.num_searched += 1
            yield Proof(self.total_bound)

    def _propose(self, plan: Plan) -> Generator[Plan, Evaluation, bool]:
        """Yield a plan unless it cannot be the best; return whether it is the best."""
        best_time = self.best.time
        if not self.keeps_limits(plan) or not self.costs.fits(plan) or self.costs.plan_bound(plan) >= best_time:
            return False
        evaluation = yield plan
        self.best.note(plan, evaluation)
        return evaluation.fits and evaluation.step_time < best_time

    def keeps_limits(self, plan: Plan) -> bool:
        """Return whether a plan keeps the limits of the space; the driver holds those of stages and recomputation."""
        if self.space.core and plan.schedule not in CORE_SCHEDULES:
            return False
        values = {name: getattr(plan, name, decision.default) for name, decision in DECISIONS.items()}
        values |= {"devices": plan.mesh.num_ranks, "tensor_depth": plan.tensor_depth, "order": AXES, "stages": None}
        limits = self.space.limits.items()
        return all(values[name] in limit for name, limit in limits if name not in ("stages", "recompute"))

    def _propose_mesh(self, mesh: JointMesh) -> Generator[Plan, Evaluation, None]:
        self.costs.check_time()
        base_plan = self.build_base_plan(mesh)
        bound = bound_mesh(mesh, self._find_tables(base_plan), self.splits_backward)
        self.bound = min(self.bound, bound)
        if bound >= self.best.time:
            return
        stages = tuple(zero for zero in (1, 2, 3) if mesh.data > 1 and self._allows("zero", zero)) or (0,)
        for zero in stages:
            is_memory_bound = yield from self._propose_division(replace(base_plan, zero=zero))
            if not is_memory_bound:
                break  # further sharing of states only adds gathers

    def _divide_anew(self, plan: Plan) -> Generator[Plan, Evaluation, None]:
        """Yield a plan with other stages, recomputation and cuts of operators, on its mesh and schedule."""
        num_stages = len(plan.stages)
        if self._is_expressible(plan) and 1 < num_stages <= len(self.problem.graph.occurrences):
            base_plan = replace(_without_layout(self.problem, plan), stages=self._list_first_stages(num_stages))
            yield from self._propose_division(replace(base_plan, recompute=Recompute.NONE))

    def _propose_division(self, base_plan: Plan) -> Generator[Plan, Evaluation, bool]:
        """Yield the best stages of a plan's mesh and schedule that fit; return whether memory binds them."""
        tables = self._find_tables(base_plan)
        positions = self._describe_positions(base_plan, tables)
        share, boundaries = 1.0 / base_plan.chunks, count_boundary_ticks(positions[0], self.stage_costs)
        for _ in range(RETRIES):
            self.costs.check_time()
            operators = tuple(positions[position] for position in base_plan.positions)
            assembly = self.assemble(AssemblyProblem(base_plan, operators, boundaries, share, self._list_recomputes()))
            if assembly is None:
                return True
            plan = with_tied_layouts(self.problem, build_joint_plan(positions[0], assembly))
            if any(list_operator_violations(self.problem, plan)):
                return False
            if self.costs.fits(plan):
                yield from self._propose_variants(plan)
                return not all(solution.is_free for solution in assembly.stages)
            share = self._shrink_share(plan, positions, share)
        return True

    def _propose_variants(self, plan: Plan) -> Generator[Plan, Evaluation, None]:
        """Yield a plan with data parallelism in the mesh, every schedule, and tensor communication beside products."""
        variants = list_data_variants(self.problem, plan) if plan.data == 1 and not self.pins else (plan,)
        schedules = MESH_SCHEDULES if plan.pipeline > 1 and plan.chunks == 1 else ()
        rivals = [
            replace(variant, schedule=schedule, overlap_tensor=overlap)
            for variant in variants
            for schedule in dict.fromkeys((variant.schedule, *schedules))
            for overlap in {False, variant.operator_ranks > 1 and cuts_operators(self.problem, variant)}
            if self._allows("schedule", schedule) and self._allows("overlap_tensor", overlap)
        ]
        legal_plans = [rival for rival in rivals if not any(list_operator_violations(self.problem, rival))]
        for rival in sorted(legal_plans, key=self.costs.plan_bound):
            yield from self._propose(rival)

    def _describe_positions(self, plan: Plan, tables: Sequence[PassTable]) -> list[StageOperators]:
        """Return the operators of the stages of every position; equal positions share theirs."""
        operators = {table: compute_stage_operators(self.problem, plan, table, self.stage_costs) for table in tables}
        return [operators[table] for table in tables]

    def _shrink_share(self, plan: Plan, positions: Sequence[StageOperators], share: float) -> float:
        """Return the share of the memory for choices with which a plan that did not fit may fit."""
        limit = min(operators.limit for operators in positions)
        resident_bytes = min(operators.resident_bytes for operators in positions)
        needed_bytes = self.costs.peak_memory(plan) - resident_bytes
        return min(share * limit / needed_bytes, 0.97 * share)

    def _allows(self, name: str, value: object) -> bool:
        return allows_value(getattr(self.space, name), value)

    def _is_expressible(self, plan: Plan) -> bool:
        """Return whether a plan is one of single operators but for its shardings."""
        axes = {axis.name for axis in plan.mesh.axes if axis.size > 1}
        is_even = isinstance(plan.microbatch, int)
        is_known = axes <= {PIPELINE, DATA, TENSOR, TENSOR_ROWS} and is_even and not plan.offload
        return is_known and plan.placement == _without_layout(self.problem, plan).placement

    def _cut_anew(self, plan: Plan) -> Generator[Plan, Evaluation, None]:
        """Yield a plan with the operators of every pipeline rank cut anew within its memory."""
        if not self._is_expressible(plan):
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
        stages, degrees = self._list_first_stages(mesh.pipeline), dict(mesh.degrees)
        plan = build_operator_plan(self.problem, degrees, mesh.microbatch, data=mesh.data, stages=stages)
        schedules = (
            schedule
            for schedule in MESH_SCHEDULES
            if self._allows("schedule", schedule)
            and not find_rule(schedule).find_violation(mesh.pipeline, mesh.num_microbatches, 1)
        )
        return replace(plan, schedule=next(schedules, plan.schedule)) if mesh.pipeline > 1 else plan

    def _list_first_stages(self, num_stages: int) -> tuple[Stage, ...]:
        names, last = [name for name, _ in self.problem.graph.occurrences], num_stages - 1
        return (*(Stage((name,)) for name in names[:last]), Stage(tuple(names[last:])))

    def _find_tables(self, plan: Plan) -> list[PassTable]:
        """Return the table of every position's rank of the lowest peak; no degree outside operator axes changes it."""
        precision, positions = self.problem.training.precision, self.stage_costs.machine(plan).ranks
        ranks = [min(row, key=lambda rank: rank.accelerator.peak(precision)) for row in positions]
        tables = {rank: self._find_table(plan, rank) for rank in dict.fromkeys(ranks)}
        return [tables[rank] for rank in ranks]

    def _find_table(self, plan: Plan, rank: RankProfile) -> PassTable:
        degrees = tuple((axis.name, axis.size) for axis in plan.mesh.axes if axis.name in OPERATOR_AXES)
        run = plan.num_microbatches > 1, plan.splits_backward, plan.overlap_tensor, plan.zero >= 2
        key = degrees, plan.sequences, run, rank

        def compute_table() -> tuple[PassTable, int]:
            setting = Setting(self.problem, plan, self.stage_costs, rank)
            table = compute_pass_table(setting, partial(filter_choices, self.pins))
            return table, table.num_bytes

        return self.tables.look_up(key, compute_table)


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


MESH_SCHEDULES = ("1f1b", "zb1p", "gpipe")
"""Schedules of one stage a rank with which the plan of every mesh is tried."""


def list_step_changes(plan: Plan, space: Space) -> Iterator[Plan]:
    """Yield a plan with one decision of its step changed that a space allows."""
    changes: dict[str, Sequence[Any]] = {
        "zero": (0, 1, 2, 3) if plan.data > 1 else (),
        "overlap_tensor": (True, False) if plan.operator_ranks > 1 else (),
        "recompute": (*RECOMPUTE_ORDER, SomeOperators((ACTIVATION,))),
        "schedule": MESH_SCHEDULES if plan.pipeline > 1 and plan.chunks == 1 else (),
    }
    for name, values in changes.items():
        for value in values:
            if value != getattr(plan, name) and allows_value(getattr(space, name), value):
                yield replace(plan, **{name: value})
