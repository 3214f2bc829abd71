"""The whole lowering: how passes are cut, the skeleton of the schedule, and what each task does."""

from math import ceil

from simulator.collection import no_collection
from simulator.engine.longest_path import finish_times
from simulator.engine.steady import window
from simulator.interconnect.interconnect import interconnect
from simulator.program import LinkClass, Program
from strategies.lowering.assemble import assemble
from strategies.lowering.classes import ClassTable
from strategies.lowering.contents import Contents
from strategies.lowering.cuts import Cuts
from strategies.lowering.pieces import Granularity
from strategies.lowering.residents import hosts, residents
from strategies.lowering.shape import step_shape
from strategies.lowering.skeleton import skeleton
from strategies.lowering.stage import StageCosts
from strategies.lowering.tenants import background
from strategies.lowering.traffic import traffic
from strategies.lowering.unflushed import steps, unflushed, updates
from strategies.lowering.volumes import Volumes
from strategies.plan import Plan
from strategies.problem import Problem

MANY_TASKS = 100_000
"""Tasks of a program beyond which no more steps are added to see them repeat."""

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
        cuts = Cuts(costs, plan, costs.machine(plan, folded=folded), Granularity(granularity))
        return _steady(cuts) if plan.asynchronous else _program(cuts)


def _steady(cuts: Cuts) -> Program:
    """Return so many steps in a row that they repeat, each like some before it."""
    plan = cuts.plan
    most = MANY_TASKS // (4 * plan.pipeline * plan.num_microbatches)  # a pass and a send, forward and backward
    count = max(min(max(8 * plan.depth, ceil(RUN / plan.num_microbatches)), most), 3 * plan.depth)
    program = _program(cuts, count)
    while not window(program, finish_times(program)[1]).repeats and 2 * program.num_tasks <= MANY_TASKS:
        count *= 2
        program = _program(cuts, count)
    return program


def _program(cuts: Cuts, count: int = 1) -> Program:
    """Return one step, or ``count`` of those that run in a row."""
    costs, plan, machine = cuts.costs, cuts.plan, cuts.machine
    table, volumes = machine.table, Volumes(cuts)
    shape = step_shape(cuts, volumes)
    tasks = unflushed(shape, updates(costs, plan), count) if plan.asynchronous else skeleton(shape)
    columns = assemble(tasks, table, Contents(cuts, volumes).of)
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
        capacity=tuple(machine.rank(index).accelerator.memory for index in range(len(table))),
        links=_links(table),
        traffic=traffic(cuts),
        hosts=hosts(machine) if plan.offload else (),
        background=flows,
        slowdown=cuts.cluster.overlap_slowdown,
        steps=steps(tasks, columns.frame, plan) if plan.asynchronous else None,
    )


def _links(table: ClassTable) -> tuple[LinkClass, ...]:
    names = interconnect(table.cluster).names(table.first_link)
    return tuple(map(LinkClass, names, table.bandwidth, table.link_count.tolist()))
