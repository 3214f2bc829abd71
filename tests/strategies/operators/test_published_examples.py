"""What planners of shardings publish on their own cost tables, and the defects that follow from their rules."""

from itertools import product

import numpy as np
import pytest

from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import BATCH, OperatorGraph
from meshwise.strategies.operators.cost_graph import CostGraph, Edge, Shortfall, Solution
from meshwise.strategies.operators.elimination import eliminate
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.integer_programming import integer_programming
from meshwise.strategies.operators.recursion import REDISTRIBUTION_COST, Level, _Recursion, recurse
from meshwise.strategies.plan.mesh import TENSOR

from .test_recursion import product as matrix_product

SOLVERS = [frontier, integer_programming, eliminate]
"""Exact solvers of a cost graph: ours, Alpa's integer program, and MindSpore's eliminations with all rows kept."""


def cost_graph(
    times: list[list[int]], memory: list[list[int]], edges: list[tuple[int, int, list[list[int]]]]
) -> CostGraph:
    rows, kept = (tuple(np.array(row, np.int64) for row in table) for table in (times, memory))
    moves = tuple(Edge(source, target, np.array(table, np.int64)) for source, target, table in edges)
    return CostGraph(rows, kept, tuple(np.zeros_like(row) for row in rows), moves, (-1,) * len(rows))


# nnScaler: microsoft/nnscaler, tests/autodist/test_dp_solver.py at 2d836f7; its times in tenths


@pytest.mark.parametrize("solve", SOLVERS)
def test_nnscaler_takes_the_first_partition_of_every_operator(solve: object) -> None:
    """A product, its ReLU and a product of two partitions each: "optimal all time 1 + 0.5 + 0.1 + 1 + 0.2 = 2.8"."""
    graph = cost_graph(
        [[10, 20], [5, 10], [10, 20]],
        [[1, 2]] * 3,
        [(0, 1, [[1, 10], [10, 0]]), (1, 2, [[2, 10], [10, 0]])],
    )
    solution = solve(graph, 80 * 1024)  # type: ignore[operator]
    assert isinstance(solution, Solution)
    assert (solution.time, solution.choice) == (28, (0, 0, 0))


@pytest.mark.parametrize("solve", SOLVERS)
def test_nnscaler_finds_no_plan_where_memory_is_short(solve: object) -> None:
    """Operators of 8, 5 and 11 bytes with one partition each and room for 10: no result."""
    solution = solve(cost_graph([[0], [0], [1]], [[8], [5], [11]], []), 10)  # type: ignore[operator]
    assert isinstance(solution, Shortfall) and solution.memory == 8 + 5 + 11


# MindSpore: tests/ut/cpp/parallel/auto_parallel/rec_partition_test.cc at 0bb38be


def test_mindspore_cuts_the_rows_of_the_product_of_its_own_test() -> None:
    """``test_PartitionNode``: A[3000, 1000] B[1000, 4000] on 2 devices; the result's rows are halved, columns are not.

    Symbolic costs: rows 0.25 * 1000 * 4000 / 2 = 500,000, columns 3000 * 1000 / 2, the summed dim 3000 * 4000 / 2.
    """
    graph = matrix_product(3000, 1000, 4000)
    level = Level(TENSOR, 2)
    costs = {dim: _Recursion(graph, 3000, 1)._compute_published_cost(0, dim, level) for dim in (BATCH, "wide", "inner")}
    assert costs == {BATCH: 500_000, "wide": 1_500_000, "inner": 6_000_000}
    (sharding,) = recurse(graph, [level], 3000, faithful=True)
    assert dict(sharding.cuts) == {BATCH: (TENSOR,)}


def residual_mlp(sequence: int, hidden: int, ffn: int) -> OperatorGraph:
    """Return x + down(activation(up(x)))."""
    builder = BlockBuilder("fp32", {"sequence": sequence, "hidden": hidden, "ffn": ffn})
    x, y, out = (builder.add_tensor(name, "batch sequence hidden") for name in ("x", "y", "out"))
    wide, active = (builder.add_tensor(name, "batch sequence ffn") for name in ("wide", "active"))
    linear(builder, "up", x, (wide,), "ffn")
    builder.add_elementwise("activation", "batch sequence ffn", (wide,), (active,))
    linear(builder, "down", active, (y,), "hidden", "ffn")
    builder.add_elementwise("residual", "batch sequence hidden", (x, y), (out,))
    return OperatorGraph("residual", (builder.build_block("layer", (x,), (out,)),), sequence)


def published_cost(recursion: _Recursion, dims: tuple[str | None, ...], level: Level) -> float:
    """Return the costs of cuts by the published formulas, disagreements of all neighbours included."""
    total = sum(recursion._compute_published_cost(number, dim, level) for number, dim in enumerate(dims))
    for edge in recursion.tensor_edges:
        source_dim = recursion._find_output_dim(edge, dims[edge.source])
        if source_dim != recursion._find_input_dim(edge, dims[edge.target]):
            total += recursion.count_elements(edge.source, edge.output_name) * REDISTRIBUTION_COST
    return total


def test_greedy_choices_of_the_double_recursion_cost_many_times_the_least() -> None:
    """A residual MLP of 8 tokens, hidden 8 and ffn 64: by its own costs the published order takes 1088 instead of 128.

    Each product alone is cheapest along ffn: 8 * 8 / 2 = 32 instead of 0.25 * 8 * 64 / 2 = 64 along the batch. But then
    its result is a sum that the residual does not read as any cut leaves it: 16 * 8 * 8 = 1024.
    """
    recursion, level = _Recursion(residual_mlp(4, 8, 64), 2, 1), Level(TENSOR, 2)
    greedy_dims = tuple(recursion.choose_greedily(level))
    assert greedy_dims == ("ffn", "ffn", "ffn", BATCH)
    least = min(published_cost(recursion, dims, level) for dims in product(*recursion.list_options(level)))
    assert (published_cost(recursion, greedy_dims, level), least) == (32 + 32 + 1024, 64 + 64)
