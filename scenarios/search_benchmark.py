"""How fast searches for layouts prove what they find, in CPU time of one core."""

from typing import Any

from scenarios.figure import Figure, seconds
from scenarios.loader import load

GPT3, LLAMA, MIXED = "gpt3-175b-1024-a100", "llama3-405b-16384-1f1b", "llama2-70b-16-h100-16-a100"


def best_first() -> list[Figure]:
    """Measure the proven optimum of the usual plans of GPT-3."""
    taken, found = _search(GPT3, "best_first")
    what = f"the proven optimum of {found.considered:,} plans, {found.evaluations} of them simulated"
    return [Figure("best-first search of GPT-3", taken, "s", None, what)]


def wide() -> list[Figure]:
    """Measure the proven optimum of more than a million uniform plans of GPT-3: ZeRO 0 and 1, schedules with a flush.

    All but dualpipev, of whose pairs of passes little is bounded: with it the proof takes minutes.
    """
    from strategies.schedule import SCHEDULES
    from strategies.search import BestFirst, Space, search

    schedules = tuple(name for name, rule in SCHEDULES.items() if not rule.asynchronous and name != "dualpipev")
    problem, space = load(GPT3).problem, Space(wide=True, zero=(0, 1), schedule=schedules)
    found: list[Any] = []
    taken = seconds(lambda: found.append(search(BestFirst(), problem, space)))
    what = f"gap {100 * found[0].gap:.1f} % over {found[0].considered:,} plans, {found[0].evaluations} simulated"
    return [Figure("best-first search of GPT-3, wide", taken, "s", 30.0, what)]


def auto() -> list[Figure]:
    """Measure the searches that divide layers among stages after uniform plans."""
    return [
        *_auto(GPT3, "GPT-3", 0.01),
        *_auto(LLAMA, "Llama 3 405B", 0.02),
        *_auto(MIXED, "mixed H100 and A100", None),
    ]


def mixed() -> list[Figure]:
    """Measure what a mixed cluster gains over plans that are made for one kind of device, simulated on it."""
    from dataclasses import replace

    from strategies.cost_model import SimulatedCost
    from strategies.search import Auto, search

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
