"""A row as a scenario."""

from dataclasses import replace

from scenarios.prediction_interval import FIRST_THAT_FITS, with_margin
from scenarios.rows.costs import fits
from scenarios.rows.degrees import Batch, Degrees, batch, degrees, fraction_of_sequence, sequence
from scenarios.rows.machine import machine
from scenarios.rows.network import network
from scenarios.rows.plan import choices, layout, nearest
from scenarios.rows.row import Row, Skip
from scenarios.rows.training import training
from scenarios.scenario import Scenario, SearchSettings
from simulator.models.bert import Bert
from simulator.models.model import build
from simulator.models.t5 import T5
from simulator.models.transformer import Transformer
from strategies.completion import complete
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.problem import Problem


def scenario_of(row: Row, place: str) -> Scenario:
    """Return the scenario that a row states; raises `Skip`, or another ``ValueError``, where it states none."""
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
    cluster.accelerator.peak(trained.precision)
    wanted = nearest(row, problem, layout(row, problem, at, size))
    plan = _chosen(row, problem, tuple(choices(row, wanted, size, graph)))
    name = row.text("row_id")[:100] or "row"
    return Scenario(name, place, problem, model, plan, SearchSettings(), None, tuple(row.assumed))


def _whole_sequences(row: Row, at: Degrees, size: Batch) -> tuple[Degrees, Batch]:
    """Return degrees by which ranks share the sequences that are fewer than the ranks."""
    parts = fraction_of_sequence(row)
    if parts == 1 and size.total < at.data and at.data % size.total == 0:
        parts = at.data // size.total
    if parts == 1 or at.data % parts:
        return at, size
    row.assume(f"context parallel over {parts} ranks, for a rank has 1/{parts} of a sequence")
    return at._replace(data=at.data // parts, context=at.context * parts), size._replace(micro=1)


def _divided(row: Row, at: Degrees, size: Batch) -> Batch:
    """Return the batch that is nearest to the stated one and that microbatches of all data ranks divide."""
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
    """Return the plan of the first layout that fits, or of the last one where none does."""
    if len(layouts) == 1:
        return complete(problem, layouts[0])
    plans = [complete(problem, each) for each in layouts]
    found = next((index for index, plan in enumerate(plans) if fits(problem, plan)), len(plans) - 1)
    row.assume(f"recompute {layouts[found].recompute}, micro_batch {layouts[found].microbatch}: {FIRST_THAT_FITS}")
    return plans[found]
