"""Benchmarks of searches, in CPU time of one core: those that prove a layout, and those that shard operators."""

from dataclasses import replace
from functools import partial
from math import inf

from meshwise.scenarios.benchmark.figure import Figure, measure_best, measure_call
from meshwise.scenarios.loader import load
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.operators.cost_graph import Solution
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.elimination import eliminate
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.integer_programming import integer_programming
from meshwise.strategies.operators.recursion import Level, recurse
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.driver import SearchResult
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

GPT3, LLAMA, MIXED = "gpt3-175b-1024-a100", "llama3-405b-16384-1f1b", "llama2-70b-16-h100-16-a100"

WIDE = Space(
    wide=True,
    zero=(0, 1),
    schedule=tuple(name for name, rule in SCHEDULES.items() if not rule.is_asynchronous and name != "dualpipev"),
)
"""Plans with ZeRO 0 and 1, and a schedule with a flush, as wide as a space is.

dualpipev is left out: the bounds of its paired passes are weak, so that the proof would take minutes.
"""


def time_best_first() -> list[Figure]:
    """Time the search that proves the optimum of the usual plans of GPT-3."""
    elapsed, result = _time_search(GPT3, "best_first")
    description = f"the proven optimum of {result.considered:,} plans, {result.evaluations} of them simulated"
    return [Figure("best-first search of GPT-3", elapsed, "s", None, description)]


def time_wide() -> list[Figure]:
    """Time the proof of the optimum of over a million uniform plans of GPT-3."""
    problem = load(GPT3).problem
    elapsed, result = measure_call(lambda: search(BestFirst(), problem, WIDE))
    assert result.gap is not None
    description = f"gap {100 * result.gap:.1f} % over {result.considered:,} plans, {result.evaluations} simulated"
    return [Figure("best-first search of GPT-3, wide", elapsed, "s", 30.0, description)]


def time_auto() -> list[Figure]:
    """Time the searches that first try uniform plans and then divide layers among stages."""
    return [
        *_time_auto(GPT3, "GPT-3", 0.01),
        *_time_auto(LLAMA, "Llama 3 405B", 0.02),
        *_time_auto(MIXED, "mixed H100 and A100", None),
    ]


def time_mixed() -> list[Figure]:
    """Compare the plan for a mixed cluster with those searched for one kind of device, simulated on it."""
    problem = load(MIXED).problem
    cluster, costs = problem.cluster, SimulatedCost(problem)
    uniform_plans = []
    for node, _ in cluster.nodes:
        uniform_problem = replace(problem, cluster=replace(cluster, nodes=((node, cluster.num_nodes),)))
        best = search(Auto(), uniform_problem).best
        if best is not None and costs.fits(best.plan):
            uniform_plans.append((costs.evaluate(best.plan).step_time, node.accelerator.name))
    best_trial = search(Auto(), problem).best
    assert best_trial is not None and uniform_plans
    least_time, name = min(uniform_plans)
    description = f"a step; {least_time:.4g} s by the best plan for {name} alone, simulated on the same devices"
    return [
        Figure("auto's plan for mixed H100 and A100", best_trial.evaluation.step_time, "s", least_time, description)
    ]


def _time_auto(name: str, title: str, gap_goal: float | None) -> list[Figure]:
    elapsed, result = _time_search(name, "auto")
    assert result.best is not None and result.gap is not None
    plans = f"{result.considered:,} uniform plans and every division of their layers, {result.evaluations} simulated"
    step_time = f"{result.best.evaluation.step_time:.4g} s"
    return [
        Figure(f"auto search of {title}", elapsed, "s", 60.0, plans),
        Figure(f"auto search of {title}, gap", result.gap, "fraction", gap_goal, step_time),
    ]


def _time_search(name: str, algorithm: str) -> tuple[float, SearchResult]:
    scenario = load(name)
    return measure_call(lambda: scenario.search_plan(algorithm, seconds=inf))  # to its proof on a busy machine too


PUBLIC_PLANNER = 44.0
"""Seconds that PyTorch's integer-programming planner takes for Llama 8B, the least published time
(meta-pytorch/autoparallel, pull request 521: 44 to 47 s)."""


def time_gpt3() -> list[Figure]:
    """Time the searches of GPT-3's operator shardings on 8 x 128 devices, where memory binds, with no costs cached."""
    problem = load(GPT3).problem
    degrees, levels = {TENSOR_ROWS: 128, TENSOR: 8}, (Level(TENSOR_ROWS, 128, 20.0), Level(TENSOR, 8))
    table_time, costs = measure_call(lambda: compute_operator_costs(problem, degrees, 384))
    solve_time, solution = measure_call(lambda: frontier(costs.graph, costs.limit, gap=0.01))
    assert isinstance(solution, Solution)
    recursion_time = measure_best(lambda: recurse(problem.graph, levels, 384, 4))
    description = f"GPT-3, {len(costs.nodes)} operators on 8 x 128 devices, of up to {max(costs.graph.sizes)} shardings"
    return [
        Figure("frontier, with its table of costs", table_time + solve_time, "s", 1.0, f"{description}, within memory"),
        Figure("frontier, the table alone", table_time, "s", None, "simulated time and memory of every sharding"),
        Figure("frontier, its gap", solution.gap, "fraction", 0.01, "proven, of the sum of costs"),
        Figure("recursive programming", recursion_time, "s", 0.05, description),
    ]


def time_llama() -> list[Figure]:
    """Time the searches of Llama 8B's operator shardings on 8 devices, beside another planner's published time."""
    problem = load("gallery/models/llama3-8b-8-h100").problem
    result = []
    for mesh, degrees in (("8", {TENSOR: 8}), ("2 x 4", {TENSOR_ROWS: 2, TENSOR: 4})):
        take = partial(compute_operator_costs, problem, degrees, 8)
        table, table_time = take(), measure_best(take)
        operators = f"Llama 3 8B, {len(table.nodes)} operators on {mesh} devices"
        description = f"{operators}, the table of {table_time:.2g} s included"
        solve = partial(integer_programming, table.graph, table.limit, gap=0.01)
        for layers, tie in (("alike", True), ("apart", False)):
            elapsed = table_time + measure_best(partial(solve, tie=tie))
            ratio = PUBLIC_PLANNER / elapsed
            comparison = f"{description}; one for PyTorch takes {PUBLIC_PLANNER:.0f} s, {ratio:.3g} times that"
            result.append(Figure(f"integer program, layers {layers}, {mesh}", elapsed, "s", PUBLIC_PLANNER, comparison))
        elapsed = table_time + measure_best(partial(eliminate, table.graph, table.limit))
        result.append(Figure(f"dynamic programming, {mesh}", elapsed, "s", None, description))
    return result
