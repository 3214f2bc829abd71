"""Whether other transfers use the ports of the tensor axis's collectives while those run."""

from strategies.lowering.data import overlaps
from strategies.lowering.operator import GroupShape
from strategies.lowering.pieces import Granularity
from strategies.lowering.stage import StageCosts
from strategies.mesh import DATA, TENSOR
from strategies.plan import Plan


def exact_granularity(costs: StageCosts, plan: Plan) -> Granularity:
    """Return the coarsest tasks with which the step time is exact.

    A whole pass is one task only where nothing shares the ports of the collectives inside it.
    """
    return Granularity.SEGMENT if contends(costs, plan) else Granularity.ACTION


def contends(costs: StageCosts, plan: Plan) -> bool:
    """Return whether a rank moves activations or gradients over ports that its tensor collectives use."""
    if plan.tensor == 1:
        return False
    table = costs.classes(plan.mesh)
    for index in range(len(table.members)):
        tensor = _ports(table.shape(index, TENSOR))
        others: set[str] = _ports(table.shape(index, DATA)) if overlaps(costs.problem.cluster, plan) else set()
        if plan.pipeline > 1:
            for step in (1, -1):
                others |= _ports(table.pair_shape(index, table.neighbour(index, step)[0]))
        if tensor & others:
            return True
    return False


def _ports(shape: GroupShape) -> set[str]:
    """Return the kinds of ports that a group of ``shape`` uses."""
    return ({"device"} if max(shape.span) > 1 else set()) | ({"nic"} if len(shape.span) > 1 else set())
