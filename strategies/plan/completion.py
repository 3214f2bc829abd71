"""From a layout to its complete plan, and from a plan back to its layout."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from meshwise.strategies.plan.layout import MESH_DEGREES, Layout, step_decisions
from meshwise.strategies.plan.mesh import (
    AXES,
    DATA,
    EXPERT,
    PIPELINE,
    REPLICA,
    TENSOR,
    Axis,
    Mesh,
    normalise_microbatch,
)
from meshwise.strategies.plan.parallelism import Attention, Parallelism, shard_operators
from meshwise.strategies.plan.partition import count_stage_layers, partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, count_node_ranks
from meshwise.strategies.plan.rules import count_chunks, violations
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.tables.completion import complete_embeddings
from meshwise.strategies.tables.table import list_tables


def complete(problem: Problem, layout: Layout) -> Plan:
    """Return the complete plan of ``layout`` for ``problem``.

    Raises
    ------
    ValueError
        Where the layout breaks a rule; the message is that of the first violation.
    """
    violation = next(violations(problem, layout), None)
    if violation is not None:
        raise ValueError(f"{violation.field}: {violation.message}")
    if layout.embeddings:  # data ranks share tables as they share experts
        tables, samples = list_tables(problem.graph), layout.sequences
        node_ranks = count_node_ranks(problem, layout.data)
        embeddings = complete_embeddings(tables, layout.embeddings, samples, layout.data, node_ranks)
        layout = replace(layout, embeddings=embeddings, expert=layout.data)
    parallelism = Parallelism(
        tensor=layout.tensor > 1,
        sequence_parallel=layout.sequence_parallel,
        expert=layout.expert > 1,
        attention=layout.attention if layout.context > 1 else None,
        rows=layout.tensor_rows > 1,
        gathers_logits=problem.training.gathers_logits,
    )
    rule, free_devices = find_rule(layout.schedule), problem.cluster.free_devices
    # ranks in order on all devices have an empty placement, so that equal plans compare equal
    placement = layout.placement or (() if len(free_devices) == problem.cluster.num_devices else free_devices)
    return Plan(
        **step_decisions(layout)
        | {
            "chunks": count_chunks(layout, rule),
            "microbatch": normalise_microbatch(layout.microbatch),
            "attention": parallelism.attention,
            "placement": tuple(placement),
        },
        mesh=build_mesh(layout),
        stages=partition_layers(problem.graph, rule.count_stages(layout.pipeline, layout.chunks), layout.stages),
        shardings=shard_operators(problem.graph, parallelism),
        num_microbatches=problem.training.global_batch // layout.sequences,
    )


def build_mesh(layout: Layout) -> Mesh:
    """Return the mesh of a layout, with an axis for replicas where groups of data ranks share states."""
    sizes = {name: getattr(layout, name) for name in AXES}
    # the data degree of a layout counts expert ranks and replicas; in the mesh both have axes of their own
    sizes[DATA] //= layout.expert * layout.replica
    return _build_mesh(layout.order, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _build_mesh(order: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the mesh of axes in an order, without axes of one rank other than pipeline, data and tensor."""
    names, axis_sizes = list(order), dict(sizes)
    if REPLICA not in names:
        names.insert(names.index(DATA), REPLICA)
    base_axes = (PIPELINE, DATA, TENSOR)
    return Mesh(tuple(Axis(name, axis_sizes[name]) for name in names if name in base_axes or axis_sizes[name] > 1))


def recover_layout(problem: Problem, plan: Plan) -> Layout:
    """Return the layout from which ``plan`` was completed, its stages as counts of layers.

    Raises
    ------
    ValueError
        Where the stages do not have every block of the graph once.
    """
    names = [name for name, _ in problem.graph.occurrences]
    counts = Counter(name for stage in plan.stages for name in stage.blocks)
    if counts != Counter(names):
        wrong_name = next(iter((counts - Counter(names)) + (Counter(names) - counts)))
        finding = f"{counts[wrong_name]} times" if wrong_name in names else "which this model does not have"
        raise ValueError(f"stages hold every block of the model once, met {wrong_name}, {finding}")
    return replace(layout_without_stages(plan), stages=count_stage_layers(problem.graph, plan.stages))


def layout_without_stages(plan: Plan) -> Layout:
    """Return the layout of a plan with default stages, for plans whose stages no layout can express."""
    degrees = {name: plan.mesh.size(name) for name in MESH_DEGREES} | {"data": plan.data}
    if plan.embeddings:  # along the axis of experts they share tables
        degrees[EXPERT] = 1
    return Layout(
        **step_decisions(plan) | degrees | {"attention": plan.attention or Attention.RING},
        order=_find_order(plan),
        zero_shards=plan.data // plan.replica if plan.replica > 1 else 0,
    )


def _find_order(plan: Plan) -> tuple[str, ...]:
    """Return the order of a plan's axes: the usual order where the axes of the mesh agree with it."""
    order = tuple(axis.name for axis in plan.mesh.axes)
    return AXES if order == tuple(name for name in AXES if name in order) else order
