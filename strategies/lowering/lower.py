"""The whole lowering: how passes are cut, the skeleton of the schedule, and what each task does."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from meshwise.simulator.brief import in_brief
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.engine.steady_state import window
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.program import IntArray, LinkClass, Program, no_collection
from meshwise.strategies.lowering.costs.stage import StageCosts
from meshwise.strategies.lowering.rank_classes.classes import ClassTable
from meshwise.strategies.lowering.rank_classes.machine import background
from meshwise.strategies.lowering.tasks.contents import Contents, traffic
from meshwise.strategies.lowering.tasks.cuts import Cuts, Granularity
from meshwise.strategies.lowering.tasks.program import assemble, frame
from meshwise.strategies.lowering.tasks.residents import hosts, residents, updates
from meshwise.strategies.lowering.tasks.shape import Volumes, step_shape
from meshwise.strategies.lowering.tasks.skeleton import Slot
from meshwise.strategies.lowering.tasks.step import one_step
from meshwise.strategies.lowering.tasks.unflushed import steps, unflushed
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MANY_TASKS = 100_000
"""Tasks of a program beyond which no more steps are added to see them repeat."""

UNCOUNTED = 0
"""Microbatches of a plan that stands for all that differ from it in these alone: no schedule has so few."""

RUN = 256
"""Microbatches that are tried first: transfers that share links need so many to settle."""


def lower(
    problem: Problem,
    plan: Plan,
    granularity: str = Granularity.CHAIN,
    *,
    costs: StageCosts | None = None,
    folded: bool = True,
) -> Program:
    """Return the program of one training step under ``plan``, or of several in a row that have no flush between.

    Parameters
    ----------
    granularity
        What becomes one task: every ``operator``, or a ``chain`` of them that nothing can disturb.
        Both take the same ticks, and the pieces of a chain show its operators.
    costs
        Block and stage costs already known for the problem.
    folded
        Whether equal ranks are simulated once; ``False`` simulates every rank.

    Raises
    ------
    ValueError
        Where the schedule's orders cannot finish.
    """
    costs = costs or StageCosts(problem)
    with no_collection():
        uncounted = replace(plan, num_microbatches=UNCOUNTED)
        step = _Step(_passes(costs, uncounted, Granularity(granularity), folded=folded), plan)
        return _steady(step) if plan.asynchronous else step.program()


@in_brief
class Sited(NamedTuple):
    """A program, and for every task where it is: ``slots`` and the class of ranks or groups there, by ``rows``."""

    program: Program
    table: ClassTable
    slots: tuple[tuple[Slot, int], ...]
    rows: IntArray


def lower_with_sites(problem: Problem, plan: Plan) -> Sited:
    """Return the program of one step, every operator and collective a task, with the groups that run its tasks.

    Raises
    ------
    ValueError
        Where the schedule has no flush: a step of it is no step of its own.
    """
    if plan.asynchronous:
        raise ValueError(f"the tasks of one step need a schedule with a flush, met {plan.schedule}")
    costs = StageCosts(problem)
    with no_collection():
        uncounted = replace(plan, num_microbatches=UNCOUNTED)
        passes = _passes(costs, uncounted, Granularity.OPERATOR, folded=True)
        tasks = one_step(passes.shape._replace(microbatches=plan.num_microbatches))
        table = passes.cuts.machine.table
        place = frame(tasks, table)
        slots = zip(tasks.slots, place.instances, strict=True)
        every = tuple((slot, instance) for slot, instances in slots for instance in instances)
        return Sited(_Step(passes, plan).program(), table, every, place.rows)


class _Passes:
    """How the passes of a plan are cut and what they do, whatever the number of its microbatches."""

    def __init__(self, cuts: Cuts) -> None:
        volumes = Volumes(cuts)
        self.cuts, self.shape, self.contents = cuts, step_shape(cuts, volumes), Contents(cuts, volumes)


@lru_cache(maxsize=1)
def _passes(costs: StageCosts, plan: Plan, granularity: Granularity, *, folded: bool) -> _Passes:
    """Return the passes of a plan; the last ones are kept, for the next plan often differs in microbatches alone."""
    return _Passes(Cuts(costs, plan, costs.machine(plan, folded=folded), granularity))


class _Step(NamedTuple):
    """A step of a plan, or several: its passes, and how many microbatches they run."""

    passes: _Passes
    plan: Plan

    def program(self, count: int = 1) -> Program:
        """Return one step, or ``count`` of those that run in a row."""
        cuts, plan = self.passes.cuts, self.plan
        costs, machine, table = cuts.costs, cuts.machine, cuts.machine.table
        shape = self.passes.shape._replace(microbatches=plan.num_microbatches)
        tasks = unflushed(shape, updates(costs, plan), count) if plan.asynchronous else one_step(shape)
        columns = assemble(tasks, table, self.passes.contents.of)
        flows = background(table)
        return Program(
            rank_classes=table.rank_classes(plan.positions),
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
            resident=residents(machine, costs, plan, cuts.on_host),
            capacity=tuple(costs.problem.usable(machine.rank(index).accelerator) for index in range(len(table))),
            links=_links(table),
            traffic=traffic(cuts, plan),
            hosts=hosts(machine) if plan.offload else (),
            background=flows,
            slowdown=cuts.cluster.overlap_slowdown,
            steps=steps(tasks, columns.frame, plan) if plan.asynchronous else None,
        )


def _steady(step: _Step) -> Program:
    """Return so many steps in a row that they repeat, each like some before it."""
    plan = step.plan
    most = MANY_TASKS // (4 * plan.pipeline * plan.num_microbatches)  # a pass and a send, forward and backward
    count = max(min(max(8 * plan.depth, ceil(RUN / plan.num_microbatches)), most), 3 * plan.depth)
    program = step.program(count)
    while not window(program, finish_times(program)[1]).repeats and 2 * program.num_tasks <= MANY_TASKS:
        count *= 2
        program = step.program(count)
    return program


def _links(table: ClassTable) -> tuple[LinkClass, ...]:
    names = interconnect(table.cluster).names(table.first_link)
    return tuple(map(LinkClass, names, table.bandwidth, table.link_count.tolist()))
