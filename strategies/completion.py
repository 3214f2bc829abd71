"""The complete plan that a layout means."""

from functools import lru_cache

from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.local_batches import microbatch
from strategies.mesh import AXES, DATA, PIPELINE, REPLICA, TENSOR, Axis, Mesh
from strategies.parallelism import Parallelism, shardings
from strategies.partition import partition
from strategies.pipeline_rules import chunks_of
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.schedule import rule_of


def complete(problem: Problem, layout: Layout) -> Plan:
    """Return the complete plan that ``layout`` means for ``problem``.

    Raises
    ------
    ValueError
        Where the layout breaks a rule; the message is the first violation's.
    """
    broken = next(violations(problem, layout), None)
    if broken is not None:
        raise ValueError(f"{broken.field}: {broken.message}")
    by = Parallelism(
        tensor=layout.tensor > 1,
        sequence_parallel=layout.sequence_parallel,
        expert=layout.expert > 1,
        attention=layout.attention if layout.context > 1 else None,
        rows=layout.tensor_rows > 1,
        gathers_logits=problem.training.gathers_logits,
    )
    rule, free = rule_of(layout.schedule), problem.cluster.free_devices
    placement = layout.placement or (() if len(free) == problem.cluster.num_devices else free)
    return Plan(
        mesh=mesh_of(layout),
        stages=partition(problem.graph, rule.num_stages(layout.pipeline, layout.chunks), layout.stages),
        shardings=shardings(problem.graph, by),
        schedule_name=layout.schedule,
        chunks=chunks_of(layout, rule),
        microbatch=microbatch(layout.microbatch),
        num_microbatches=problem.training.global_batch // layout.sequences,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        overlap_gradients=layout.overlap_gradients,
        attention=by.attention,
        scatter_gather=layout.scatter_gather,
        placement=tuple(placement),
        offload=layout.offload,
        reshard_after_forward=layout.reshard_after_forward,
        gradient_reduction=layout.gradient_reduction,
        overlap_tensor=layout.overlap_tensor,
    )


def mesh_of(layout: Layout) -> Mesh:
    """Return the mesh of a layout; where groups of data ranks share states, with an axis for their replicas."""
    sizes = {name: getattr(layout, name) for name in AXES}
    sizes[DATA] //= layout.expert * layout.replica
    return _mesh_of(layout.order, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _mesh_of(order: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the mesh of axes in an order, those of one rank left out where no plan needs them."""
    names, of_axis = list(order), dict(sizes)
    if REPLICA not in names:
        names.insert(names.index(DATA), REPLICA)
    always = (PIPELINE, DATA, TENSOR)
    return Mesh(tuple(Axis(name, of_axis[name]) for name in names if name in always or of_axis[name] > 1))
