"""Benchmarks of searches, in CPU time of one core: those that prove a layout, and those that shard operators."""

from dataclasses import replace
from functools import partial
from typing import Any

from meshwise.scenarios.loader import load
from meshwise.scenarios.studies.figure import Figure, best, seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.operators.costs import operator_costs
from meshwise.strategies.operators.elimination import eliminate
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.integer_programming import integer_programming
from meshwise.strategies.operators.recursion import Level, recurse
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search import Auto, BestFirst, Space, search

GPT3, LLAMA, MIXED = "gpt3-175b-1024-a100", "llama3-405b-16384-1f1b", "llama2-70b-16-h100-16-a100"


def best_first() -> list[Figure]:
    """Time the search that proves the optimum of the usual plans of GPT-3."""
    taken, found = _search(GPT3, "best_first")
    what = f"the proven optimum of {found.considered:,} plans, {found.evaluations} of them simulated"
    return [Figure("best-first search of GPT-3", taken, "s", None, what)]


def wide() -> list[Figure]:
    """Time the proof of the optimum of over a million uniform plans of GPT-3: ZeRO 0 and 1, schedules with a flush.

    dualpipev is left out: the bounds of its paired passes are weak, so that the proof would take minutes.
    """
    schedules = tuple(name for name, rule in SCHEDULES.items() if not rule.asynchronous and name != "dualpipev")
    problem, space = load(GPT3).problem, Space(wide=True, zero=(0, 1), schedule=schedules)
    found: list[Any] = []
    taken = seconds(lambda: found.append(search(BestFirst(), problem, space)))
    what = f"gap {100 * found[0].gap:.1f} % over {found[0].considered:,} plans, {found[0].evaluations} simulated"
    return [Figure("best-first search of GPT-3, wide", taken, "s", 30.0, what)]


def auto() -> list[Figure]:
    """Time the searches that first try uniform plans and then divide layers among stages."""
    return [
        *_auto(GPT3, "GPT-3", 0.01),
        *_auto(LLAMA, "Llama 3 405B", 0.02),
        *_auto(MIXED, "mixed H100 and A100", None),
    ]


def mixed() -> list[Figure]:
    """Compare the plan for a mixed cluster with those searched for one kind of device, simulated on it."""
    problem = load(MIXED).problem
    cluster, costs = problem.cluster, SimulatedCost(problem)
    alike = []
    for node, _ in cluster.nodes:
        assumed = replace(problem, cluster=replace(cluster, nodes=((node, cluster.num_nodes),)))
        best = search(Auto(), assumed).best
        if best is not None and costs.fits(best.plan):
            alike.append((costs.evaluate(best.plan).step_time, node.accelerator.name))
    found = search(Auto(), problem).best
    assert found is not None and alike
    least, name = min(alike)
    what = f"a step; {least:.4g} s by the best plan for {name} alone, simulated on the same devices"
    return [Figure("auto's plan for mixed H100 and A100", found.evaluation.step_time, "s", least, what)]


def _auto(name: str, title: str, most: float | None) -> list[Figure]:
    taken, found = _search(name, "auto")
    what = f"{found.considered:,} uniform plans and every division of their layers, {found.evaluations} simulated"
    return [
        Figure(f"auto search of {title}", taken, "s", 60.0, what),
        Figure(f"auto search of {title}, gap", found.gap, "fraction", most, f"{found.best.evaluation.step_time:.4g} s"),
    ]


def _search(name: str, algorithm: str) -> tuple[float, Any]:
    scenario = load(name)
    found: list[Any] = []
    taken = seconds(lambda: found.append(scenario.search(algorithm)))
    return taken, found[0]


PUBLIC_PLANNER = 44.0
"""Seconds that PyTorch's integer-programming planner takes for Llama 8B, the least published time
(meta-pytorch/autoparallel, pull request 521: 44 to 47 s)."""


def gpt3() -> list[Figure]:
    """Time the searches of GPT-3's operator shardings on 8 x 128 devices, where memory binds, with no costs cached."""
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
    levels = (Level(TENSOR_ROWS, 128, 20.0), Level(TENSOR, 8))
    return best(lambda: recurse(problem.graph, levels, 384, 4))


def llama() -> list[Figure]:
    """Time the searches of Llama 8B's operator shardings on 8 devices, beside another planner's published time."""
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
