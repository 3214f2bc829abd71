"""Chooses how the operators of a captured module are cut over ranks: `choose_cuts`.

A search takes the cheapest legal cuts of all operators. Which cuts an axis may make is a rule of its word:

* ``tensor`` cuts any dim but samples, and parameters of heavy operators wherever one divides;
* ``context`` cuts no parameter and no samples, so what is left: the sequence, or heads inside attention;
* ``expert`` cuts the parameters that are stacks of one a expert along that stack, and other operators by samples.

References
----------
Jacobs et al. 2023, "DeepSpeed Ulysses" (heads inside attention, the sequence outside of it); Lepikhin et al. 2021,
"GShard" (experts over the ranks that have different samples).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from meshwise.executor.modules.layout import CUTS
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind
from meshwise.strategies.operators.cost_graph import CostGraph, Shortfall
from meshwise.strategies.operators.costs import OperatorCosts, compute_operator_costs
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.operator_plan import build_operator_plan, operators_by_name
from meshwise.strategies.plan.mesh import TENSOR, divisors
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.search.operator_search import solve_tied

EXPERT_AXIS, CONTEXT_AXIS = CUTS["expert"], CUTS["context"]

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

PRODUCTS = frozenset({OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.GROUPED_MATMUL})
"""Operators whose parameters may be those of several experts."""


def choose_cuts(
    graph: OperatorGraph,
    *,
    data: int,
    samples: int,
    num_microbatches: int,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
) -> Plan:
    """Return a plan in which every operator is cut over ranks, or whole, at the least cost.

    Of all plans that the axes allow it is the one with the least sum of operators' times and redistributions within a
    percent, by `frontier`.

    Parameters
    ----------
    samples
        Those of a microbatch on a data rank.

    Raises
    ------
    ValueError
        Where an axis cuts nothing of what it is for.
    """
    words = {"expert": expert, "context": context, "tensor": tensor}
    degrees = {axis: words[word] for word, axis in CUTS.items() if words[word] > 1}
    shown = " * ".join(f"{word}({size})" for word, size in words.items() if size > 1)
    training = Training(samples * num_microbatches, graph.sequence, "fp32", "adamw", framework="torch")
    problem = Problem(graph, _build_cluster(prod(degrees.values())), training)
    rules = CutRules(problem, degrees)
    table = compute_operator_costs(problem, degrees, samples, choice_filter=rules.keep_cutting)
    table = replace(table, graph=_add_imbalance(table, degrees))
    _, solution = solved = solve_tied(table, table.limit, lambda costs, limit: frontier(costs.graph, limit))
    if isinstance(solution, Shortfall):
        raise ValueError(f"{shown}: a part of the module fits a device, met {solution.memory:,} bytes")
    shardings = solved[0].build_plan(solution.choice).shardings
    rules.require_cuts(shardings)
    whole = Training(samples * num_microbatches * data, graph.sequence, "fp32", "adamw", framework="torch")
    whole_problem = Problem(graph, _build_cluster(data * prod(degrees.values())), whole)
    return build_operator_plan(whole_problem, degrees, samples, shardings, data=data)


def find_causal_imbalance(operator: Operator, sharding: OperatorSharding, degrees: Mapping[str, int]) -> float:
    """Return the scores of the rank that has most, over the mean; 1 where causal attention has all queries.

    The last of ``n`` contiguous parts of queries sees ``(n - 1/2) / n`` of the keys, and all parts a half on average.
    """
    if operator.kind is not OperatorKind.ATTENTION or operator.executed_fraction == 1:
        return 1.0
    return 2 - 1 / prod(degrees[axis] for axis in dict(sharding.cuts).get(SEQUENCE, ()))


def keep_causal_queries_whole(graph: OperatorGraph) -> OperatorGraph:
    """Return a graph in which no axis cuts the queries of causal attention.

    The cost model of searches takes parts to be of equal work, which contiguous parts of causal queries are not.
    """

    def keep(block: Block, operator: Operator) -> Operator:
        if operator.kind is not OperatorKind.ATTENTION or operator.executed_fraction == 1:
            return operator
        query, keys = (block.tensor[name].dims for name in operator.inputs[:2])
        rows = (SEQUENCE,) if SEQUENCE in query else tuple(dim for dim in query if dim not in keys)
        return replace(operator, uncut=tuple(dict.fromkeys((*operator.uncut, *rows))))

    blocks = (
        replace(block, operators=tuple(keep(block, operator) for operator in block.operators)) for block in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))


def _add_imbalance(table: OperatorCosts, degrees: Mapping[str, int]) -> CostGraph:
    """Return the costs in which ranks wait for the one with the most scores of causal attention."""
    times = list(table.graph.times)
    for number, (node, choices) in enumerate(zip(table.nodes, table.choices, strict=True)):
        if node.operator.kind is OperatorKind.ATTENTION:
            factors = [find_causal_imbalance(node.operator, sharding, degrees) for sharding in choices]
            times[number] = (times[number] * np.array(factors)).astype(np.int64)
    return replace(table.graph, times=tuple(times))


def _build_cluster(num_devices: int) -> Cluster:
    """Return devices on one fast network: only ratios of computing to bytes that move decide."""
    peaks = tuple((precision, 1e14) for precision in ("fp64", "fp32", "fp16", "bf16", "fp8"))
    accelerator = Accelerator("any", peaks, memory=2.0**50, memory_bandwidth=2e12)
    link = Link(latency=1e-8, bandwidth=1e11)
    return build_homogeneous("any", accelerator, Host("any", 2.0**50), 1, num_devices, link, link)


def _list_stack_dims(block: Block, operator: Operator) -> Iterator[str]:
    """Yield the dims of a product's parameters along which matrices are stacked, one for each expert.

    Both operands have such a dim, or its name says so; besides it the parameter has dims of a matrix.
    """
    if operator.kind not in PRODUCTS:
        return
    input_dims = {dim for name in operator.inputs for dim in block.tensor[name].dims}
    for parameter in operator.parameters:
        dims = block.tensor[parameter].dims
        rows = [dim for dim in dims if dim in operator.reduced and dim in input_dims]
        columns = [dim for dim in dims if dim not in operator.reduced and dim not in input_dims]
        for dim in dims:
            # a dim of one operand alone is summed over only where each row is of one expert
            is_stack = dim == EXPERTS or (dim in input_dims) != (dim in operator.reduced)
            if is_stack and set(rows) - {dim} and set(columns) - {dim}:
                yield dim


def has_experts(graph: OperatorGraph) -> bool:
    """Return whether products have parameters that are stacks of one an expert."""
    operators = ((block, operator) for block in graph.blocks for operator in block.operators)
    return any(any(_list_stack_dims(block, operator)) for block, operator in operators)


class CutRules:
    """What each axis may cut of the operators of a problem."""

    def __init__(self, problem: Problem, degrees: Mapping[str, int]) -> None:
        self.degrees, self.operators = degrees, operators_by_name(problem)
        stacks = {name: set(_list_stack_dims(*found)) for name, found in self.operators.items()}
        self.stacks = {name for name, dims in stacks.items() if dims}
        self.expert_dims = frozenset[str]().union(*stacks.values())

    def keep_cutting(self, name: str, shardings: tuple[OperatorSharding, ...]) -> tuple[OperatorSharding, ...]:
        """Return the shardings of an operator that its axes allow, and of these those that cut it if it is heavy."""
        block, operator = self.operators[name]
        allowed = tuple(sharding for sharding in shardings if self._allows(name, block, operator, sharding))
        for axis in self.degrees:
            if operator.kind in HEAVY or (axis == CONTEXT_AXIS and operator.kind is OperatorKind.ATTENTION):
                allowed = tuple(item for item in allowed if self._cuts(axis, block, operator, item)) or allowed
        return allowed

    def require_cuts(self, shardings: Sequence[OperatorSharding]) -> None:
        """Raise where an axis cuts no operator for whose sake it is there."""
        for word, axis in CUTS.items():
            degree = self.degrees.get(axis, 1)
            if degree == 1 or any(self._serves(axis, sharding) for sharding in shardings):
                continue
            sizes = {size for _, size in self._list_heavy_dims(axis)}
            degrees = {number for size in sizes for number in divisors(size)} - {degree}
            nearest = min(degrees, key=lambda number: (abs(number - degree), number), default=1)
            shown = f", {' or '.join(f'{size:,}' for size in sorted(sizes, reverse=True)[:3])}" if sizes else ""
            met = degree if sizes else "none"
            raise ValueError(f"{word}({degree}) divides {_PURPOSES[word]}{shown}, met {met}; nearest: {nearest}")

    def _allows(self, name: str, block: Block, operator: Operator, sharding: OperatorSharding) -> bool:
        parameter_dims = {dim for parameter in operator.parameters for dim in block.tensor[parameter].dims}
        allowed_dims = self.expert_dims if name in self.stacks else {BATCH}
        if not (operator.parameters and operator.kind in HEAVY):
            allowed_dims = {BATCH, *self.expert_dims}
        rules: dict[str, Callable[[str], bool]] = {
            TENSOR: lambda dim: dim != BATCH,
            # a table of positions is cut with the sequence
            CONTEXT_AXIS: lambda dim: dim != BATCH and (dim not in parameter_dims or dim == SEQUENCE),
            EXPERT_AXIS: allowed_dims.__contains__,
        }
        return not sharding.kept and all(rules[axis](dim) for dim, axes in sharding.cuts for axis in axes)

    def _cuts(self, axis: str, block: Block, operator: Operator, sharding: OperatorSharding) -> bool:
        """Return whether an axis cuts an operator; of a tensor axis, whether it cuts the largest parameter."""
        if axis != TENSOR:
            return any(axis in axes for _, axes in sharding.cuts)
        if not operator.parameters:
            return True
        largest = max((block.tensor[parameter] for parameter in operator.parameters), key=lambda item: item.size)
        return axis in sharding.find_input_spec(largest).cut_axes

    def _serves(self, axis: str, sharding: OperatorSharding) -> bool:
        operator = self.operators[sharding.operator][1]
        dims = {dim for dim, axes in sharding.cuts if axis in axes}
        if axis == CONTEXT_AXIS:
            return bool(dims) and operator.kind in HEAVY and bool(operator.parameters)
        return bool(dims & self.expert_dims if axis == EXPERT_AXIS else dims)

    def _list_heavy_dims(self, axis: str) -> Iterator[tuple[str, int]]:
        """Yield the dims of heavy operators that an axis is there for, with their sizes."""
        for block, operator in self.operators.values():
            if operator.kind in HEAVY and operator.parameters:
                parameter_dims = {dim for name in operator.parameters for dim in block.tensor[name].dims}
                for dim, size in operator.dims:
                    serves = {
                        TENSOR: dim in parameter_dims,
                        CONTEXT_AXIS: dim != BATCH and dim not in parameter_dims,
                        EXPERT_AXIS: dim in self.expert_dims,
                    }
                    if serves[axis]:
                        yield dim, size


_PURPOSES = {
    "tensor": "a dim of some parameter",
    "context": "the tokens of a sequence",
    "expert": "the experts, of which parameters have a matrix each",
}
"""What an axis divides, in words."""
