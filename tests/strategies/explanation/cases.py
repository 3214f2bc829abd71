"""A small problem in which memory, links and FLOP all matter, and the brute force that answers are compared with."""

from dataclasses import replace

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.ranking import Ranking, ranking
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.space import Space, layouts

from ..problems import IDEAL, problem

SPACE = Space(schedule=("1f1b",), sequence_parallel=(False,), recompute=(Recompute.NONE,))
CRAMPED = problem(nodes=2, devices=4, layers=4, batch=16, bandwidth=4e8, accelerator=replace(IDEAL, memory=51.8e6))
RANKED: Ranking = ranking(SimulatedCost(CRAMPED), SPACE)
FAST = problem(nodes=2, devices=4, layers=4, batch=16, bandwidth=2.4e10)
"""Links near those with which fewer stages become the best plan."""
RANKED_FAST: Ranking = ranking(SimulatedCost(FAST), SPACE)


def brute_force(problem: Problem, memory: float, space: Space = SPACE) -> list[tuple[float, float]]:
    """Return step time and memory of every plan that needs at most so much memory, the fastest first."""
    costs = SimulatedCost(problem)
    plans = [complete(problem, layout) for layout in layouts(problem, space)]
    found = ((costs.step_time(plan), costs.peak_memory(plan)) for plan in plans)
    return sorted(each for each in found if each[1] <= memory)
