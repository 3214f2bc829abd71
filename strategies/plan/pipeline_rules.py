"""The rules that the pipeline of a layout must keep: its stages, and its schedule."""

from collections.abc import Iterator

from meshwise.strategies.plan.layout import Layout, Violation, listed
from meshwise.strategies.plan.mesh import nearest_divisor as _nearest
from meshwise.strategies.plan.partition import most_stages, num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.schedules.orders import in_order
from meshwise.strategies.schedules.rule import ScheduleRule, WrittenRule
from meshwise.strategies.schedules.schedule import OrderError, rule_of, schedule


def pipeline_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that the stages or the schedule of ``layout`` break."""
    layers = num_layers(problem.graph)
    try:
        rule = rule_of(layout.schedule)
    except ValueError as error:
        yield Violation(f"schedule.{error.rank}" if isinstance(error, OrderError) else "schedule", str(error))
        return
    stages = rule.num_stages(layout.pipeline, layout.chunks)
    number = f"pipeline({layout.pipeline}) * chunks({layout.chunks}) = {stages}"
    if isinstance(rule, WrittenRule):
        number = f"the order's {stages}"
        yield from _written_violations(problem, layout, rule)
    else:
        yield from _schedule_violations(problem, layout, rule)
    if isinstance(layout.stages, tuple):
        if len(layout.stages) != stages or sum(layout.stages) != layers or min(layout.stages) < 0:
            yield Violation(
                "stages",
                f"stages are {number} counts that add to "
                f"layers({layers}), met {listed(layout.stages)} = {sum(layout.stages)}",
            )
    elif layout.stages not in ("even", "balanced"):
        yield Violation("stages", f"stages is even, balanced or a list of layers a stage, met {layout.stages}")
    elif layout.stages == "even" and layers % stages:
        yield Violation(
            "pipeline",
            f"{number} stages divide layers({layers}) where stages is even; "
            f"nearest: {_nearest(layers, stages)} stages, or stages: balanced",
        )
    elif stages > most_stages(problem.graph):
        ends = most_stages(problem.graph) - layers
        beside = f" and {ends} for what is around them" if ends else ""
        yield Violation("pipeline", f"{number} stages are at most layers({layers}){beside}")


def known_rule(layout: Layout) -> ScheduleRule | None:
    """Return the rule of a layout's schedule; None where there is none."""
    try:
        return rule_of(layout.schedule)
    except ValueError:
        return None


def chunks_of(layout: Layout, rule: ScheduleRule) -> int:
    """Return the most stages of a rank: of an order that is written out its own number, if none is asked for."""
    return rule.chunks[0] if isinstance(rule, WrittenRule) and layout.chunks == 1 else layout.chunks


def _written_violations(problem: Problem, layout: Layout, rule: WrittenRule) -> Iterator[Violation]:
    """Yield what an order that is written out does not go with, or where it waits for itself for ever."""
    wrong = rule.undefined(layout.pipeline, rule.microbatches, chunks_of(layout, rule))
    if wrong is not None:
        yield Violation("chunks" if layout.pipeline == rule.ranks else "pipeline", wrong)
        return
    whole, count = problem.training.global_batch, rule.microbatches
    each = layout.sequences
    if whole % each == 0 and whole // each != count:
        near = f"; nearest microbatch: {whole // (layout.data * count)}" if whole % (layout.data * count) == 0 else ""
        yield Violation(
            "schedule",
            f"global_batch({whole}) / {layout.all_sequences} = {whole // each} "
            f"microbatches, the order has {count}{near}",
        )
        return
    try:
        for _ in in_order(schedule(layout.schedule, rule.ranks, count, rule.chunks[0])):
            pass
    except OrderError as error:
        yield Violation(f"schedule.{error.rank}", str(error))


def _schedule_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    each = layout.sequences
    if rule.asynchronous:
        yield from _unflushed_violations(problem, layout, rule)
    fewest, most = rule.chunks
    if layout.chunks < fewest or layout.chunks > (most or layout.chunks):
        broken = rule.violation(layout.pipeline, max(layout.pipeline, 1) * 2, layout.chunks)
        yield Violation("chunks", str(broken))
    elif layout.chunks > 1 and layout.pipeline < 2:
        yield Violation("pipeline", f"{rule.name}: pipeline(1) >= 2 does not hold; nearest: 2")
    elif problem.training.global_batch % each == 0:
        broken = rule.violation(layout.pipeline, problem.training.global_batch // each, layout.chunks)
        if broken is not None:
            yield Violation("schedule", broken)


def _unflushed_violations(problem: Problem, layout: Layout, rule: ScheduleRule) -> Iterator[Violation]:
    """Yield what a pipeline cannot have whose stages update their weights at different times."""
    name = layout.schedule
    if layout.zero >= 2:
        shard = "gathered shards of the newest one" if layout.zero == 3 else "a shard of their sum"
        whole = "whole weights of several versions" if layout.zero == 3 else "whole gradients until each update"
        yield Violation(
            "zero",
            f"zero({layout.zero}) <= 1 does not hold for {name}: without a flush a stage keeps {whole}, not {shard}; "
            "nearest: 1",
        )
    if problem.training.gradient_clipping:
        yield Violation(
            "schedule",
            f"{name} has no flush: stages update at different times, gradient_clipping needs the norm of all at once; "
            "nearest: 1f1b, or gradient_clipping: false",
        )
    if rule.updates_every_microbatch and problem.graph.tied and layout.pipeline > 1:
        yield Violation(
            "schedule",
            f"{name} updates every stage as soon as it has gradients, tied embeddings sum those of the first and the "
            "last stage before; nearest: pipedream_2bw, or tied_embeddings: false",
        )
