"""Tied parameters: one parameter used by two blocks, kept twice where they are on two stages.

Shoeybi et al. 2019, "Megatron-LM": the word embedding is also the output layer; with a
pipeline its gradient is summed between the first and the last stage.
"""

from collections.abc import Iterator

from simulator.cluster import Cluster, Collective
from simulator.program import TaskKind
from strategies.lowering.classes import ClassTable
from strategies.lowering.operator import GroupShape, Step, collective_step
from strategies.lowering.stage import StageCosts
from strategies.mesh import PIPELINE
from strategies.plan import Plan
from strategies.training import Training


def tied_parameters(costs: StageCosts, plan: Plan, table: ClassTable) -> Iterator[tuple[int, int, int]]:
    """Yield classes on two pipeline ranks that keep one parameter, and its local elements."""
    placed = {block for stage in plan.stages for block in stage.blocks}
    for first, second in costs.problem.graph.tied:
        if first[0] not in placed or second[0] not in placed:
            continue
        positions = [_position(plan, block) for block, _ in (first, second)]
        if positions[0] == positions[1]:
            continue
        for index in table.on_pipeline_rank(positions[0]):
            rank = table.members[index][0]
            other = rank + (positions[1] - positions[0]) * plan.mesh.stride(PIPELINE)
            yield index, table.class_of[other], costs.parameter_share(plan, second)


def tied_step(cluster: Cluster, training: Training, shape: GroupShape, count: int) -> Step:
    """Return the sum of a tied parameter's gradient between two ranks."""
    size = count * training.gradient_bytes
    kind = TaskKind.DATA_COMMUNICATION
    return collective_step(cluster, kind, Collective.ALL_REDUCE, shape, size, "tied gradients")


def _position(plan: Plan, block: str) -> int:
    stage = next(index for index, stage in enumerate(plan.stages) if block in stage.blocks)
    return stage % plan.pipeline
