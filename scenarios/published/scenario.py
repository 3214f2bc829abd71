"""A row as a scenario, and fast step times for the plans of many problems: rows with one problem share its costs."""

from dataclasses import replace
from functools import lru_cache

from meshwise.scenarios.intervals import FIRST_THAT_FITS, with_margin
from meshwise.scenarios.memory_forecast import MemoryForecast, forecast_memory
from meshwise.scenarios.published.machine import build_machine
from meshwise.scenarios.published.network import build_model
from meshwise.scenarios.published.plan import (
    Batch,
    Degrees,
    count_sequence_parts,
    find_nearest,
    list_choices,
    read_batch,
    read_degrees,
    read_layout,
    read_sequence,
)
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.published.training import read_training
from meshwise.scenarios.scenario import Scenario, SearchSettings
from meshwise.simulator.engine import step_time
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
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


def estimate_step_time(problem: Problem, plan: Plan) -> float:
    """Return the step time of a plan in seconds.

    Once its stages are full, a pipeline takes the same time for every further round of microbatches. The time of a
    long step is therefore extrapolated from two short steps of the same plan.
    """
    costs, num_microbatches = costs_of(problem), _count_microbatches(problem, plan)
    if plan.num_microbatches <= 2 * num_microbatches:
        return _simulate_step(costs, plan)
    short_time, long_time = (
        _simulate_step(costs, replace(plan, num_microbatches=count))
        for count in (num_microbatches, 2 * num_microbatches)
    )
    return long_time + (plan.num_microbatches / num_microbatches - 2) * (long_time - short_time)


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether the tensors of a plan fit in the memory of every device with a margin."""
    return costs_of(problem).fits(_shorten_plan(problem, plan))


def forecast_run(problem: Problem, plan: Plan) -> MemoryForecast:
    """Return the memory of a plan in three ways, and whether it fits."""
    return forecast_memory(costs_of(problem), _shorten_plan(problem, plan))


def _shorten_plan(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with few microbatches and the same peak memory; the plan itself where stages buffer every one."""
    num_microbatches = 2 * _count_microbatches(problem, plan)
    if plan.num_microbatches <= num_microbatches or (
        plan.pipeline > 1 and problem.training.conventions.buffers_every_microbatch
    ):
        return plan
    return replace(plan, num_microbatches=num_microbatches)


@lru_cache(maxsize=64)
def _simulate_step(costs: SimulatedCost, plan: Plan) -> float:
    return step_time(lower(costs.problem, plan, costs=costs.costs))


def _count_microbatches(problem: Problem, plan: Plan) -> int:
    """Return the number of microbatches of a short step that still fills every stage and that the schedule allows."""
    min_microbatches = max(2, MANY_PASSES // len(problem.graph.occurrences) // 2)
    if plan.pipeline == 1:
        return min_microbatches
    rounds = max(1, min_microbatches // plan.pipeline)
    while plan.rule.find_violation(plan.pipeline, rounds * plan.pipeline, plan.chunks) is not None and rounds < 8:
        rounds += 1
    return rounds * plan.pipeline


def build_scenario(row: Row, place: str) -> Scenario:
    """Return the scenario of a row; raise `Skip`, or another ``ValueError``, where it cannot be made."""
    degrees = read_degrees(row)
    model = build_model(row)
    has_tokens = isinstance(model, Transformer | Bert | T5)
    length = read_sequence(row, has_fixed_size=not has_tokens)
    batch = read_batch(row, degrees, length)
    degrees, batch = _share_sequences(row, degrees, batch)
    batch = _divide_batch(row, degrees, batch)
    cluster = build_machine(row, degrees.devices)
    training = read_training(row, cluster.accelerator, batch.total, length)
    graph = build(model, length, training.dtype)
    if graph.sequence != length:
        row.assume(f"samples of {graph.sequence} tokens, as {model.name} has them")
        training = replace(training, sequence=graph.sequence)
    problem = with_margin(Problem(graph, cluster, training))
    cluster.accelerator.peak(training.precision)  # raises where the device lacks this precision
    layout = find_nearest(row, problem, read_layout(row, problem, degrees, batch))
    plan = _choose_plan(row, problem, tuple(list_choices(row, layout, batch, graph)))
    name = row.text("row_id")[:100] or "row"
    return Scenario(name, place, problem, model, plan, SearchSettings(), None, tuple(row.assumed))


def _share_sequences(row: Row, degrees: Degrees, batch: Batch) -> tuple[Degrees, Batch]:
    """Return degrees and batch with context parallelism, where there are fewer sequences than data ranks."""
    parts = count_sequence_parts(row)
    if parts == 1 and batch.total < degrees.data and degrees.data % batch.total == 0:
        parts = degrees.data // batch.total
    if parts == 1 or degrees.data % parts:
        return degrees, batch
    row.assume(f"context parallel over {parts} ranks, for a rank has 1/{parts} of a sequence")
    return degrees._replace(data=degrees.data // parts, context=degrees.context * parts), batch._replace(micro=1)


def _divide_batch(row: Row, degrees: Degrees, batch: Batch) -> Batch:
    """Return the batch nearest to the stated one that data ranks and microbatches divide; raise `Skip` without one."""
    micro = batch.micro or 1
    if batch.micro is not None and batch.total % (degrees.data * micro) and batch.total % degrees.data == 0:
        rank_batch = batch.total // degrees.data
        rank_microbatch = max(count for count in range(1, min(micro, rank_batch) + 1) if rank_batch % count == 0)
        row.assume(f"micro_batch {rank_microbatch}, for {micro} does not divide the {rank_batch} sequences of a rank")
        return batch._replace(micro=rank_microbatch)
    sequences = degrees.data * micro
    accumulation_steps = row.count("grad_accum")
    if batch.micro is not None and accumulation_steps is not None and batch.total != sequences * accumulation_steps:
        reason = f"global_batch({batch.total}) is not {sequences} * {accumulation_steps}"
        row.assume(f"grad_accum {batch.total / sequences:g}, for {reason}")
    if batch.total % sequences == 0:
        return batch
    total = sequences * max(1, round(batch.total / sequences))
    if not 0.5 <= total / batch.total <= 2:
        raise Skip(f"global_batch {batch.total} is not cut over dp({degrees.data}) * micro_batch({micro})")
    row.assume(f"global_batch {total}, for dp({degrees.data}) * micro_batch({micro}) do not divide {batch.total}")
    return batch._replace(total=total)


def _choose_plan(row: Row, problem: Problem, layouts: tuple[Layout, ...]) -> Plan:
    """Return the plan of the first layout that fits, or of the last layout where none fits."""
    if len(layouts) == 1:
        return complete(problem, layouts[0])
    plans = [(layout, complete(problem, layout)) for layout in layouts]
    layout, plan = next((pair for pair in plans if fits(problem, pair[1])), plans[-1])
    row.assume(f"recompute {layout.recompute}, micro_batch {layout.microbatch}: {FIRST_THAT_FITS}")
    return plan
