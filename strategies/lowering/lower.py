"""Lower a plan: cut its passes, build the skeleton of its schedule, and fill in what each task does."""

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
"""Most tasks of a program to which further steps are added until the steps repeat."""

UNCOUNTED = 0
"""Microbatches of a plan that stands for all plans that differ in their number alone; no schedule has so few."""

RUN = 256
"""Microbatches of the first program that is tried without a flush: transfers that share links settle in so many."""


def lower(
    problem: Problem,
    plan: Plan,
    granularity: str = Granularity.CHAIN,
    *,
    costs: StageCosts | None = None,
    folded: bool = True,
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

    Raises
    ------
    ValueError
        Where the schedule's orders cannot finish.
    """
    costs = costs or StageCosts(problem)
    with no_collection():
        uncounted = replace(plan, num_microbatches=UNCOUNTED)
        # Passes do not depend on the number of microbatches: plans that differ in it alone share one cache entry.
        step = _Step(_passes(costs, uncounted, Granularity(granularity), folded=folded), plan)
        return _steady(step) if plan.asynchronous else step.program()


@in_brief
class Sited(NamedTuple):
    """A program, and where each of its tasks runs: a template with the class of ranks or groups, chosen by ``rows``."""

    program: Program
    table: ClassTable
    slots: tuple[tuple[Slot, int], ...]
    rows: IntArray


def lower_with_sites(problem: Problem, plan: Plan) -> Sited:
    """Return the program of one step with a task for every operator and collective, and the groups that run its tasks.

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
    """The passes of a plan: how they are cut and what they do, for any number of microbatches."""

    def __init__(self, cuts: Cuts) -> None:
        volumes = Volumes(cuts)
        self.cuts, self.shape, self.contents = cuts, step_shape(cuts, volumes), Contents(cuts, volumes)


@lru_cache(maxsize=1)
def _passes(costs: StageCosts, plan: Plan, granularity: Granularity, *, folded: bool) -> _Passes:
    """Return the passes of a plan.

    The latest result is cached: a search often asks next for a plan that differs in its number of microbatches alone.
    """
    return _Passes(Cuts(costs, plan, costs.machine(plan, folded=folded), granularity))


class _Step(NamedTuple):
    """The program of a plan's step, from its passes and its number of microbatches."""

    passes: _Passes
    plan: Plan

    def program(self, count: int = 1) -> Program:
        """Return the program of ``num_steps`` steps in a row."""
        cuts, plan = self.passes.cuts, self.plan
        costs, machine, table = cuts.costs, cuts.machine, cuts.machine.table
        shape = self.passes.shape._replace(microbatches=plan.num_microbatches)
        # Skeletons know the number of microbatches, the contents of tasks do not: those stay cached in `passes`.
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
    """Return the program of so many steps in a row that a step repeats an earlier one."""
    plan = step.plan
    # Four tasks a microbatch and rank: a pass and a send, forward and backward.
    most = MANY_TASKS // (4 * plan.pipeline * plan.num_microbatches)  # a pass and a send, forward and backward
    count = max(min(max(8 * plan.depth, ceil(RUN / plan.num_microbatches)), most), 3 * plan.depth)
    program = step.program(count)
    while not window(program, finish_times(program)[1]).repeats and 2 * program.num_tasks <= MANY_TASKS:
        count *= 2
        program = step.program(count)
    return program


def _links(table: ClassTable) -> tuple[LinkClass, ...]:
    """Return the link classes of a table, named as the interconnect names their representatives."""
    names = interconnect(table.cluster).names(table.first_link)
    return tuple(map(LinkClass, names, table.bandwidth, table.link_count.tolist()))
