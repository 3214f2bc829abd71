"""Plans that fit and that a target cannot say: which decisions keep it from them."""

from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
from time import perf_counter

import numpy as np

from scenarios.interchange.acceptance import Acceptance
from scenarios.nothing_fits import Left
from scenarios.prediction_interval import out_of_memory_of
from scenarios.scenario import Scenario
from simulator.units import format_size
from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.explanation.ranking import unlimited
from strategies.explanation.uncertainty import risk_in_words
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.search.acceptance import Answers
from strategies.search.choices import offloadings
from strategies.search.space import groups

SECONDS = 10.0
"""How long plans are looked at."""

LOOKED_AT = 16
"""Members of a group that are asked about, those with the least bounds."""

COMPLETED = 200
"""Plans, those with the fewest reasons against them, of which it is looked at whether they fit."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A plan that fits, and every decision of it that a target cannot say.

    ``peak_memory`` are the bytes of its fullest device, and ``out_of_memory`` is the probability that they do not do.
    """

    plan: Plan
    peak_memory: float
    out_of_memory: float
    lacks: tuple[str, ...]

    def describe(self, target: str) -> str:
        """Return the plan, what it needs and what keeps the target from it, in one line."""
        size, needs = format_size(self.peak_memory), " and ".join(self.lacks)
        risk = risk_in_words(self.out_of_memory)
        return f"{self.plan.describe()} fits with {size}, {risk}, but needs {needs}, which {target} cannot say"


def near_misses(value: Scenario, count: int = 3, left: Left = unlimited) -> tuple[NearMiss, ...]:
    """Return plans that fit and that the target of a scenario refuses for as few reasons as possible, each for others.

    Of plans with as many reasons against them those with the least bounds of a step come first. After `SECONDS`, or
    where no seconds are ``left``, the plans are those that have been looked at.
    """
    assert value.target is not None
    problem, accepts = value.problem, Acceptance(value.target, value.spec)
    answers, costs, start = Answers(accepts.rules(problem)), SimulatedCost(problem), perf_counter()
    found: list[tuple[int, float, int, Layout]] = []
    space = value.search_settings.make_space()
    offloaded = [replace(space, offload=offloadings())] if space.offload is None else []
    for group in chain.from_iterable(groups(problem, among) for among in (space, *offloaded)):
        bounds = costs.table(group).ravel()
        for cell in np.argsort(bounds, kind="stable")[:LOOKED_AT].tolist():
            if np.isfinite(bounds[cell]):
                layout = group.member(*divmod(cell, len(group.states)))
                if reasons := answers.refusals(layout):
                    found.append((len(reasons), float(bounds[cell]), len(found), layout))
        if perf_counter() - start > SECONDS or left() <= 0:
            break
    result: dict[tuple[str, ...], NearMiss] = {}
    for _, _, _, layout in nsmallest(COMPLETED, found):
        reasons = answers.refusals(layout)
        if reasons not in result and costs.fits(plan := complete(problem, layout)):
            peak = costs.peak_memory(plan)
            result[reasons] = NearMiss(plan, peak, out_of_memory_of(problem, peak), accepts.lacks(problem, plan))
            if len(result) == count:
                break
    return tuple(result.values())
