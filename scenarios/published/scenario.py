"""A row as a scenario, and fast step times for the plans of many problems: rows with one problem share its costs."""

from dataclasses import replace
from functools import lru_cache

from meshwise.scenarios.intervals import FIRST_THAT_FITS, with_margin
from meshwise.scenarios.published.machine import machine
from meshwise.scenarios.published.network import network
from meshwise.scenarios.published.plan import (
    Batch,
    Degrees,
    batch,
    choices,
    degrees,
    fraction_of_sequence,
    layout,
    nearest,
    sequence,
)
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.published.training import training
from meshwise.scenarios.scenario import Scenario, SearchSettings
from meshwise.simulator.engine import step_time
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MANY_PASSES = 400
"""Number of passes through layers in a step beyond which its time is extrapolated from shorter steps."""


def costs_of(problem: Problem) -> SimulatedCost:
    """Return the cost model of a problem; all global batches share one, since plans state their microbatches."""
    return _costs(replace(problem, training=replace(problem.training, global_batch=1)))


@lru_cache(maxsize=32)
def _costs(problem: Problem) -> SimulatedCost:
    return SimulatedCost(problem)


def seconds_of(problem: Problem, plan: Plan) -> float:
    """Return the step time of a plan in seconds.

    Once its stages are full, a pipeline takes the same time for every further round of microbatches. The time of a
    long step is therefore extrapolated from two short steps of the same plan.
    """
    costs, few = costs_of(problem), _fewest(problem, plan)
    if plan.num_microbatches <= 2 * few:
        return _simulated(costs, plan)
    short, longer = (_simulated(costs, replace(plan, num_microbatches=count)) for count in (few, 2 * few))
    return longer + (plan.num_microbatches / few - 2) * (longer - short)


def peak_memory_of(problem: Problem, plan: Plan) -> float:
    """Return the peak memory of the fullest device in bytes, which later rounds of microbatches do not change."""
    return costs_of(problem).peak_memory(_for_memory(problem, plan))


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan fits in the memory of every device."""
    return costs_of(problem).fits(_for_memory(problem, plan))


def _for_memory(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with few microbatches and the same peak memory; the plan itself where stages buffer every one."""
    few = 2 * _fewest(problem, plan)
    if plan.num_microbatches <= few or (plan.pipeline > 1 and problem.training.conventions.buffers_every_microbatch):
        return plan
    return replace(plan, num_microbatches=few)


@lru_cache(maxsize=64)
def _simulated(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _fewest(problem: Problem, plan: Plan) -> int:
    """Return the number of microbatches of a short step that still fills every stage and that the schedule allows."""
    wanted = max(2, MANY_PASSES // len(problem.graph.occurrences) // 2)
    if plan.pipeline == 1:
        return wanted
    rounds = max(1, wanted // plan.pipeline)
    while plan.rule.violation(plan.pipeline, rounds * plan.pipeline, plan.chunks) is not None and rounds < 8:
        rounds += 1
    return rounds * plan.pipeline


def scenario_of(row: Row, place: str) -> Scenario:
    """Return the scenario of a row; raise `Skip`, or another ``ValueError``, where it cannot be made."""
    at = degrees(row)
    model = network(row)
    by_tokens = isinstance(model, Transformer | Bert | T5)
    length = sequence(row, fixed=not by_tokens)
    size = batch(row, at, length)
    at, size = _whole_sequences(row, at, size)
    size = _divided(row, at, size)
    cluster = machine(row, at.devices)
    trained = training(row, cluster.accelerator, size.total, length)
    graph = build(model, length, trained.dtype)
    if graph.sequence != length:
        row.assume(f"samples of {graph.sequence} tokens, as {model.name} has them")
        trained = replace(trained, sequence=graph.sequence)
    problem = with_margin(Problem(graph, cluster, trained))
    cluster.accelerator.peak(trained.precision)  # raises where the device lacks this precision
    wanted = nearest(row, problem, layout(row, problem, at, size))
    plan = _chosen(row, problem, tuple(choices(row, wanted, size, graph)))
    name = row.text("row_id")[:100] or "row"
    return Scenario(name, place, problem, model, plan, SearchSettings(), None, tuple(row.assumed))


def _whole_sequences(row: Row, at: Degrees, size: Batch) -> tuple[Degrees, Batch]:
    """Return degrees and batch with context parallelism, where there are fewer sequences than data ranks."""
    parts = fraction_of_sequence(row)
    if parts == 1 and size.total < at.data and at.data % size.total == 0:
        parts = at.data // size.total
    if parts == 1 or at.data % parts:
        return at, size
    row.assume(f"context parallel over {parts} ranks, for a rank has 1/{parts} of a sequence")
    return at._replace(data=at.data // parts, context=at.context * parts), size._replace(micro=1)


def _divided(row: Row, at: Degrees, size: Batch) -> Batch:
    """Return the batch nearest to the stated one that data ranks and microbatches divide; raise `Skip` without one."""
    micro = size.micro or 1
    if size.micro is not None and size.total % (at.data * micro) and size.total % at.data == 0:
        own = size.total // at.data
        fitting = max(count for count in range(1, min(micro, own) + 1) if own % count == 0)
        row.assume(f"micro_batch {fitting}, for {micro} does not divide the {own} sequences of a rank")
        return size._replace(micro=fitting)
    each = at.data * micro
    stated = row.count("grad_accum")
    if size.micro is not None and stated is not None and size.total != each * stated:
        row.assume(f"grad_accum {size.total / each:g}, for global_batch({size.total}) is not {each} * {stated}")
    if size.total % each == 0:
        return size
    total = each * max(1, round(size.total / each))
    if not 0.5 <= total / size.total <= 2:
        raise Skip(f"global_batch {size.total} is not cut over dp({at.data}) * micro_batch({micro})")
    row.assume(f"global_batch {total}, for dp({at.data}) * micro_batch({micro}) do not divide {size.total}")
    return size._replace(total=total)


def _chosen(row: Row, problem: Problem, layouts: tuple[Layout, ...]) -> Plan:
    """Return the plan of the first layout that fits, or of the last layout where none fits."""
    if len(layouts) == 1:
        return complete(problem, layouts[0])
    plans = [complete(problem, each) for each in layouts]
    found = next((index for index, plan in enumerate(plans) if fits(problem, plan)), len(plans) - 1)
    row.assume(f"recompute {layouts[found].recompute}, micro_batch {layouts[found].microbatch}: {FIRST_THAT_FITS}")
    return plans[found]
