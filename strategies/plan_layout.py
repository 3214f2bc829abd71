"""The layout that a plan was completed from."""

from collections import Counter
from dataclasses import replace

from strategies.layout import Layout
from strategies.mesh import AXES
from strategies.parallelism import Attention
from strategies.plan import Plan
from strategies.problem import Problem


def layout_of(problem: Problem, plan: Plan) -> Layout:
    """Return the layout of which ``plan`` is the completion.

    Raises
    ------
    ValueError
        Where a stage names a block that the graph does not have.
    """
    names = [name for name, _ in problem.graph.occurrences]
    layers = {name for name, block in problem.graph.occurrences if block.layer} or set(names[:1])
    counts = Counter(name for stage in plan.stages for name in stage.blocks)
    if counts != Counter(names):
        wrong = next(iter((counts - Counter(names)) + (Counter(names) - counts)))
        raise ValueError(f"stages: hold every block of the model once, met {wrong} {counts[wrong]} times")
    stages = tuple(sum(name in layers for name in stage.blocks) for stage in plan.stages)
    return replace(layout_without_stages(plan), stages=stages)


def layout_without_stages(plan: Plan) -> Layout:
    """Return the layout of a plan without its stages, which no layout may be able to express."""
    return Layout(
        data=plan.data,
        tensor=plan.tensor,
        tensor_rows=plan.tensor_rows,
        pipeline=plan.pipeline,
        microbatch=plan.microbatch,
        schedule=plan.schedule_name,
        chunks=plan.chunks,
        zero=plan.zero,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        context=plan.context,
        expert=plan.expert,
        attention=plan.attention or Attention.RING,
        overlap_gradients=plan.overlap_gradients,
        scatter_gather=plan.scatter_gather,
        order=_order(plan),
        placement=plan.placement,
        offload=plan.offload,
        zero_shards=plan.shards // plan.context if plan.replica > 1 else 0,
        reshard_after_forward=plan.reshard_after_forward,
        gradient_reduction=plan.gradient_reduction,
        overlap_tensor=plan.overlap_tensor,
    )


def _order(plan: Plan) -> tuple[str, ...]:
    """Return the order of a plan's axes: the usual one where the axes that it has are in that order."""
    order = tuple(axis.name for axis in plan.mesh.axes)
    return AXES if order == tuple(name for name in AXES if name in order) else order
