"""What the ranks of every pipeline position keep on their hosts under a plan."""

from strategies.lowering.machine import Rank
from strategies.lowering.offload import OnHost
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.stage import StageCosts
from strategies.plan import Plan, blocks_on_host


def on_host(costs: StageCosts, plan: Plan) -> tuple[OnHost, ...]:
    """Return what is on the host for the whole step, by position; a tied parameter is there once."""
    return tuple(_at(costs, plan, position) for position in range(plan.pipeline))


def _at(costs: StageCosts, plan: Plan, position: int) -> OnHost:
    fraction = plan.offload.at("optimizer", position)
    if not plan.offload.in_passes:
        return OnHost(fraction)
    found = costs.of(plan)
    stages, held = plan.stages_at(position), found.held.positions[position]
    away = [block for stage in stages for block in found.stages[stage].blocks[: blocks_on_host(plan, stage)]]
    elements = updated_parameters(plan, sum(b.parameters for b in away), sum(b.experts for b in away))
    most = updated_parameters(plan, held.elements, held.experts)
    return OnHost(fraction, min(elements, most))


def buffer(costs: StageCosts, plan: Plan, position: int, rank: Rank) -> int:
    """Return the bytes of either buffer through which activations leave a rank of a position and come back."""
    if not plan.offload.in_passes:
        return 0
    stages = (costs.stage(plan, stage, rank) for stage in plan.stages_at(position))
    return max((block.away for stage in stages for block in stage.blocks), default=0)
