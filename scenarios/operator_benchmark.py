"""The speed of the searches that choose a sharding for every operator, in CPU time."""

from functools import partial
from typing import Any

from scenarios.figure import Figure, best, seconds

PUBLIC_PLANNER = 44.0
"""Seconds of the integer-programming planner for PyTorch for Llama 8B, the least of those published
(meta-pytorch/autoparallel, pull request 521: 44 to 47 s)."""


def gpt3() -> list[Figure]:
    """Measure the searches of GPT-3's operators on 8 x 128 devices, where memory binds, and nothing is known yet."""
    from scenarios.loader import load
    from strategies.mesh import TENSOR, TENSOR_ROWS
    from strategies.operators.costs import operator_costs
    from strategies.operators.frontier import frontier

    problem = load("gpt3-175b-1024-a100").problem
    found: list[Any] = []
    table = seconds(lambda: found.append(operator_costs(problem, {TENSOR_ROWS: 128, TENSOR: 8}, 384)))
    costs = found[0]
    solve = seconds(lambda: found.append(frontier(costs.graph, costs.limit, gap=0.01)))
    what = f"GPT-3, {len(costs.nodes)} operators on 8 x 128 devices, of up to {max(costs.graph.sizes)} shardings"
    return [
        Figure("frontier, with its table of costs", table + solve, "s", 1.0, f"{what}, within memory"),
        Figure("frontier, the table alone", table, "s", None, "simulated time and memory of every sharding"),
        Figure("frontier, its gap", found[1].gap, "fraction", 0.01, "proven, of the sum of costs"),
        Figure("recursive programming", _recursion(problem), "s", 0.05, what),
    ]


def _recursion(problem: Any) -> float:
    from strategies.mesh import TENSOR, TENSOR_ROWS
    from strategies.operators.recursion import Level, recurse

    levels = (Level(TENSOR_ROWS, 128, 20.0), Level(TENSOR, 8))
    return best(lambda: recurse(problem.graph, levels, 384, 4))


def llama() -> list[Figure]:
    """Measure the searches of Llama 8B's operators on 8 devices, beside what is published of another planner."""
    from scenarios.loader import load
    from strategies.mesh import TENSOR, TENSOR_ROWS
    from strategies.operators.costs import operator_costs
    from strategies.operators.elimination import eliminate
    from strategies.operators.integer_programming import integer_programming

    problem = load("gallery/models/llama3-8b-8-h100").problem
    result = []
    for mesh, degrees in (("8", {TENSOR: 8}), ("2 x 4", {TENSOR_ROWS: 2, TENSOR: 4})):
        take = partial(operator_costs, problem, degrees, 8)
        table, building = take(), best(take)
        what = f"Llama 3 8B, {len(table.nodes)} operators on {mesh} devices, the table of {building:.2g} s included"
        solve = partial(integer_programming, table.graph, table.limit, gap=0.01)
        for layers, tie in (("alike", True), ("apart", False)):
            taken = building + best(partial(solve, tie=tie))
            beside = f"{what}; one for PyTorch takes {PUBLIC_PLANNER:.0f} s, {PUBLIC_PLANNER / taken:.3g} times that"
            result.append(Figure(f"integer program, layers {layers}, {mesh}", taken, "s", PUBLIC_PLANNER, beside))
        taken = building + best(partial(eliminate, table.graph, table.limit))
        result.append(Figure(f"dynamic programming, {mesh}", taken, "s", None, what))
    return result
