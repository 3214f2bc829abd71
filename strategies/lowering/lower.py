"""Lower a plan: cut its passes, build the skeleton of its schedule, and fill in what each task does."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from meshwise.simulator.brief import with_brief_repr
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.engine.steady_state import find_window
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.program import IntArray, LinkClass, Program, pause_collection
from meshwise.strategies.lowering.contents import Contents, count_traffic
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.program import assemble, build_frame, list_steps
from meshwise.strategies.lowering.rank_classes.classes import ClassTable
from meshwise.strategies.lowering.rank_classes.machine import list_background
from meshwise.strategies.lowering.residents import list_class_residents, list_hosts, schedule_updates
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.step_shape import step_shape
from meshwise.strategies.lowering.tasks.skeleton import TaskTemplate
from meshwise.strategies.lowering.tasks.step import build_step
from meshwise.strategies.lowering.tasks.unflushed import build_unflushed
from meshwise.strategies.lowering.volumes import Volumes
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MAX_TASKS = 100_000
"""Most tasks of a program to which further steps are added until the steps repeat."""

ANY_COUNT = 0
"""Microbatches of a plan that stands for all plans that differ in their number alone; no schedule has so few.

Passes, volumes and contents of tasks do not depend on the number.
"""

SETTLING_MICROBATCHES = 256
"""Microbatches of the first program that is tried without a flush: transfers that share links settle in so many."""


def lower(
    problem: Problem,
    plan: Plan,
    granularity: str = Granularity.CHAIN,
    *,
    costs: StageCosts | None = None,
    folded: bool = True,
    apart: bool = False,
) -> Program:
    """Return the program of one training step under ``plan``, or of several where its schedule has no flush.

    Parameters
    ----------
    granularity
        What becomes one task: every ``operator``, or a ``chain`` of operators that nothing can disturb.
        Both take the same ticks, and the pieces of a chain show its operators.
    costs
        Block and stage costs already computed for the problem.
    folded
        Whether equal ranks are simulated once; ``False`` simulates every rank.
    apart
        Whether data ranks are simulated apart, equal or not: microbatches of each may then differ.

    Raises
    ------
    ValueError
        Where the schedule's orders cannot finish.
    """
    costs = costs or StageCosts(problem)
    with pause_collection():
        lowering = _StepLowering(_lower_passes(costs, plan, Granularity(granularity), folded=folded, apart=apart), plan)
        return _lower_steady(lowering) if plan.asynchronous else lowering.build_program()


@with_brief_repr
class SitedProgram(NamedTuple):
    """A program, and where each of its tasks runs: a template with the class of ranks or groups, chosen by ``rows``."""

    program: Program
    table: ClassTable
    templates: tuple[tuple[TaskTemplate, int], ...]
    rows: IntArray


def lower_with_sites(problem: Problem, plan: Plan) -> SitedProgram:
    """Return the program of one step with a task for every operator and collective, and the groups that run its tasks.

    Raises
    ------
    ValueError
        Where the schedule has no flush: a step of it is no step of its own.
    """
    if plan.asynchronous:
        raise ValueError(f"the tasks of one step need a schedule with a flush, met {plan.schedule}")
    costs = StageCosts(problem)
    with pause_collection():
        passes = _lower_passes(costs, plan, Granularity.OPERATOR, folded=True)
        tasks = build_step(passes.shape._replace(microbatches=plan.num_microbatches))
        table = passes.cuts.machine.table
        task_frame = build_frame(tasks, table)
        templates = zip(tasks.templates, task_frame.instances, strict=True)
        placed_templates = tuple((template, instance) for template, instances in templates for instance in instances)
        return SitedProgram(_StepLowering(passes, plan).build_program(), table, placed_templates, task_frame.rows)


class _LoweredPasses:
    """The passes of a plan: how they are cut and what they do, for any number of microbatches."""

    def __init__(self, cuts: Cuts) -> None:
        volumes = Volumes(cuts.costs, cuts.plan, cuts.sharing, cuts.buckets)
        self.cuts, self.shape, self.contents = cuts, step_shape(cuts, volumes), Contents(cuts, volumes)


@lru_cache(maxsize=1)
def _lower_generic_passes(
    costs: StageCosts, plan: Plan, granularity: Granularity, folded: bool, apart: bool
) -> _LoweredPasses:
    """Return the passes of a plan.

    The latest result is kept, with the costs of its problem: what is asked next is often a plan that differs in its
    number of microbatches alone. It is kept here and not with the costs, to which it refers, for the two would then be
    a cycle that stays until the garbage collector finds it.
    """
    machine = (costs.machine_apart if apart else costs.machine if folded else costs.build_unfolded_machine)(plan)
    return _LoweredPasses(Cuts(costs, plan, machine, granularity))


def _lower_passes(
    costs: StageCosts, plan: Plan, granularity: Granularity, *, folded: bool, apart: bool = False
) -> _LoweredPasses:
    """Return the passes of a plan, for any number of microbatches."""
    return _lower_generic_passes(costs, replace(plan, num_microbatches=ANY_COUNT), granularity, folded, apart)


class _StepLowering(NamedTuple):
    """The program of a plan's step, from its passes and its number of microbatches."""

    passes: _LoweredPasses
    plan: Plan

    def build_program(self, num_steps: int = 1) -> Program:
        """Return the program of ``num_steps`` steps in a row."""
        cuts, plan = self.passes.cuts, self.plan
        costs, machine, table = cuts.costs, cuts.machine, cuts.machine.table
        shape = self.passes.shape._replace(microbatches=plan.num_microbatches)
        # Skeletons know the number of microbatches, the contents of tasks do not: those stay cached in `passes`.
        tasks = (
            build_unflushed(shape, schedule_updates(costs, plan), num_steps) if plan.asynchronous else build_step(shape)
        )
        columns = assemble(tasks, table, self.passes.contents.describe_task)
        flows = list_background(table)
        return Program(
            rank_classes=table.list_rank_classes(plan.positions),
            streams=columns.frame.streams,
            work=columns.work,
            flows=columns.flows,
            work_of=columns.work_of,
            flow_of=columns.flow_of,
            microbatch_of=columns.frame.microbatch_of,
            stream_start=columns.frame.stream_start,
            stream_of=columns.frame.stream_of,
            predecessor_start=columns.frame.predecessor_start,
            predecessor_of=columns.frame.predecessor_of,
            resident_memory=list_class_residents(machine, costs, plan, cuts.host_shares),
            capacity=tuple(costs.problem.usable_memory(machine.rank(index).accelerator) for index in range(len(table))),
            links=_list_links(table),
            traffic=count_traffic(cuts, plan),
            hosts=list_hosts(machine) if plan.offload or plan.embeddings.uses_hosts else (),
            background=flows,
            steps=list_steps(tasks, columns.frame, plan.depth) if plan.asynchronous else None,
        )


def _lower_steady(lowering: _StepLowering) -> Program:
    """Return the program of so many steps in a row that a step repeats an earlier one."""
    plan = lowering.plan
    max_steps = MAX_TASKS // (4 * plan.pipeline * plan.num_microbatches)  # a pass and a send, forward and backward
    num_steps = max(
        min(max(8 * plan.depth, ceil(SETTLING_MICROBATCHES / plan.num_microbatches)), max_steps), 3 * plan.depth
    )
    program = lowering.build_program(num_steps)
    while not find_window(program, finish_times(program)[1]).repeats and 2 * program.num_tasks <= MAX_TASKS:
        num_steps *= 2
        program = lowering.build_program(num_steps)
    return program


def _list_links(table: ClassTable) -> tuple[LinkClass, ...]:
    """Return the link classes of a table, named as the interconnect names their representatives."""
    names = interconnect(table.cluster).names(table.link_representatives)
    return tuple(map(LinkClass, names, table.bandwidth, table.link_count.tolist()))
