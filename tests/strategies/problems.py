"""Small problems that several tests share."""

from dataclasses import fields, replace

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Fabric, Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.memory import BlockMemory, StageMemory
from meshwise.strategies.lowering.costs.segments import Kernels, Segment
from meshwise.strategies.lowering.stage_costs import BlockCost, StageCosts
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import LayerRecompute, find_stage_recompute

IDEAL = Accelerator("ideal", (("fp32", 1e12), ("bf16", 2e12)), memory=1e12, memory_bandwidth=1e12)


def problem(
    *,
    nodes: int = 1,
    devices: int = 8,
    nics: int = 8,
    layers: int = 8,
    batch: int = 32,
    bandwidth: float = 1e9,
    accelerator: Accelerator = IDEAL,
    tied: bool = False,
    precision: str = "fp32",
    fabric: Fabric = FULL_BISECTION,
    launch: float = 0.0,
    **changes: object,
) -> Problem:
    """Return a small transformer on ``nodes`` times ``devices`` ideal accelerators."""
    sizes = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 256, "vocab": 128} | changes
    spec = Transformer(layers, tied_embeddings=tied, **sizes)  # type: ignore[arg-type]
    host, inside, outside = Host("host", 1e12, launch=launch), Link(1e-6, bandwidth), Link(2e-6, bandwidth / 4)
    cluster = replace(
        build_homogeneous("small", accelerator, host, nodes, devices, inside, outside, nics), fabric=fabric
    )
    return on(cluster, spec, batch, precision)


def on(cluster: Cluster, spec: Transformer, batch: int, precision: str = "fp32") -> Problem:
    """Return a network on a cluster, for sequences of 32 tokens."""
    training = Training(batch, 32, precision)
    return Problem(build(spec, 32, training.dtype), cluster, training)


def find_block_cost(costs: StageCosts, plan: Plan, name: str) -> BlockCost:
    """Return the cost of a kind of block on rank 0, recomputed as the plan does in its first stage."""
    run, choice, rank = costs.find_keys(plan).run, find_choice(plan), costs.machine(plan).rank(0)
    return BlockCost(costs.blocks.work(run, name, choice), costs.block_passes(run, name, choice, rank))


def list_stage_memories(costs: StageCosts, plan: Plan) -> tuple[StageMemory, ...]:
    """Return the memory of one microbatch of every stage on a rank."""
    keys = costs.find_keys(plan)
    return costs.list_stage_memories(keys.passes, keys.stages)


def find_block_layout(costs: StageCosts, plan: Plan, name: str) -> BlockLayout:
    """Return a kind of block as a plan cuts it, with the smallest of the plan's microbatches."""
    keys = costs.find_keys(plan)
    return costs.blocks.layout(keys.cut, name, keys.run.least_sequences)


def find_block_memory(costs: StageCosts, plan: Plan, name: str) -> BlockMemory:
    """Return the memory of one microbatch of a kind of block, recomputed as the plan does in its first stage."""
    return costs.blocks.memory(costs.find_keys(plan).run, name, find_choice(plan))


def find_choice(plan: Plan) -> LayerRecompute:
    """Return what a plan recomputes of the layers of its first stage."""
    return find_stage_recompute(plan.recompute, 0).layer


def describe_cost(cost: BlockCost) -> tuple[object, ...]:
    """Return all that a block does and takes on a rank, by value: costs of other plans or problems share no objects."""
    passes = (cost.passes.forward, cost.passes.backward, cost.passes.inputs, cost.passes.weights)
    return (
        cost.work._replace(segments=None, split_passes=None),  # type: ignore[arg-type]
        cost.work.segments.num_loss_segments,
        [row and ([(describe_segment(segment), n) for segment, n in row.segments], row.ticks) for row in passes],
    )


def describe_segment(segment: Segment) -> tuple[object, ...]:
    """Return all that a segment says, with the values of its kernels."""
    kernels = segment.work
    if not isinstance(kernels, Kernels):
        return segment
    return (*segment._replace(work=None), [getattr(kernels, field.name) for field in fields(kernels)])
