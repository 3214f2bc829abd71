"""Chooses how the operators of a captured module are cut over the ranks of one tensor axis."""

from functools import partial

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.operator_graph import BATCH, OperatorGraph, OperatorKind
from meshwise.strategies.operators.cost_graph import Shortfall
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.operator_plan import build_operator_plan, operators_by_name
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.search.operator_search import solve_tied

HEAVY = frozenset(
    {
        OperatorKind.MATMUL,
        OperatorKind.BATCH_MATMUL,
        OperatorKind.GROUPED_MATMUL,
        OperatorKind.EMBEDDING,
        OperatorKind.CONVOLUTION,
    }
)
"""Operators whose parameters are cut wherever that is legal: for their memory and work a module is cut at all."""


def choose_cuts(graph: OperatorGraph, *, data: int, tensor: int, samples: int, num_microbatches: int) -> Plan:
    """Return a plan in which every operator is cut over ``tensor`` ranks, or whole, at the least cost.

    Samples are cut over data ranks alone; parameters of heavy operators are cut where a dim divides. Of all such plans
    it is the one with the least sum of operators' times and redistributions within a percent, by `frontier`.

    Parameters
    ----------
    samples
        Those of a microbatch on a data rank.

    Raises
    ------
    ValueError
        Where no operator of the module can be cut over so many ranks.
    """
    training = Training(samples * num_microbatches, graph.sequence, "fp32", "adamw", framework="torch")
    problem = Problem(graph, _build_cluster(tensor), training)
    choice_filter = partial(_keep_cutting, problem)
    table = compute_operator_costs(problem, {TENSOR: tensor}, samples, choice_filter=choice_filter)
    _, solution = solved = solve_tied(table, table.limit, lambda costs, limit: frontier(costs.graph, limit))
    if isinstance(solution, Shortfall):
        raise ValueError(f"tensor({tensor}): a part of the module fits a device, met {solution.memory:,} bytes")
    shardings = solved[0].build_plan(solution.choice).shardings
    if not any(sharding.cuts for sharding in shardings):
        raise ValueError(f"tensor({tensor}) divides a dim of some operator, met none; nearest: 1")
    whole = Training(samples * num_microbatches * data, graph.sequence, "fp32", "adamw", framework="torch")
    whole_problem = Problem(graph, _build_cluster(data * tensor), whole)
    return build_operator_plan(whole_problem, {TENSOR: tensor}, samples, shardings, data=data)


def _build_cluster(num_devices: int) -> Cluster:
    """Return devices on one fast network: only ratios of computing to bytes that move decide."""
    peaks = tuple((precision, 1e14) for precision in ("fp64", "fp32", "fp16", "bf16", "fp8"))
    accelerator = Accelerator("any", peaks, memory=2.0**50, memory_bandwidth=2e12)
    link = Link(latency=1e-8, bandwidth=1e11)
    return build_homogeneous("any", accelerator, Host("any", 2.0**50), 1, num_devices, link, link)


def _keep_cutting(problem: Problem, name: str, shardings: tuple[OperatorSharding, ...]) -> tuple[OperatorSharding, ...]:
    """Return the shardings of an operator that leave samples whole, and cut its parameters if it is heavy."""
    block, operator = operators_by_name(problem)[name]
    allowed = tuple(item for item in shardings if not item.kept and BATCH not in dict(item.cuts))
    if operator.kind in HEAVY and operator.parameters:
        largest = max((block.tensor[parameter] for parameter in operator.parameters), key=lambda item: item.size)
        cutting = tuple(item for item in allowed if item.find_input_spec(largest).cuts)
        return cutting or allowed
    return allowed
