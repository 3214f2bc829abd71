"""Nothing fits: the device that lacks most, what fills it, and the cheapest changes that make a plan fit."""

from typing import Any

from scenarios.scenario import Scenario
from simulator.units import format_size
from strategies.completion import complete
from strategies.explanation.ranking import ranking
from strategies.explanation.relief import Relief, reliefs
from strategies.explanation.shortfall import Shortfall, shortfall
from strategies.layout import Layout
from strategies.problem import Problem


class Nothing(Exception):
    """Nothing fits: carries what is known as JSON-ready data."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document["reason"])
        self.document = document


def nothing_fits_in(value: Scenario) -> dict[str, Any]:
    """Return why no layout of a scenario's space fits, and the cheapest changes that make one fit."""
    found = ranking(value.problem, value.search_settings.make_space())
    candidates = sorted(found.candidates, key=lambda each: each.peak)
    return nothing_fits(value.problem, [each.layout for each in candidates])


def nothing_fits(problem: Problem, tried: list[Layout]) -> dict[str, Any]:
    """Return why none of some layouts fits, the least first, and the cheapest changes that make one fit."""
    if not tried:
        reason = "nothing fits: the search space is empty; the limits in search.space allow no legal plan"
        return {"reason": reason, "lacking": None, "plan": None, "changes": []}
    plan = complete(problem, tried[0])
    lacking = shortfall(problem, plan)
    changes = reliefs(problem, tried)
    return {
        "reason": f"nothing fits: {plan.describe()}: {lacking_in_words(lacking)}",
        "plan": plan.describe(),
        "lacking": shortfall_document(lacking),
        "changes": [_relief(each) for each in changes],
    }


def lacking_in_words(found: Shortfall) -> str:
    """Return in one line which device lacks how much, for what, and when."""
    stages = ", ".join(map(str, found.stages))
    held = ", ".join(f"{name} {format_size(size)}" for name, size in found.held if size)
    lacks = format_size(found.lacks)
    return (
        f"stage {stages} needs {format_size(found.needs)}, a device has {format_size(found.has)}, {lacks} too little "
        f"({held}; at {found.time:.3g} s, {found.during})"
    )


def shortfall_document(found: Shortfall) -> dict[str, Any]:
    """Return what a device lacks as JSON-ready data."""
    return {
        "stages": list(found.stages),
        "needs": found.needs,
        "has": found.has,
        "lacks": found.lacks,
        "held": dict(found.held),
        "time": found.time,
        "during": found.during,
        "words": lacking_in_words(found),
    }


def _relief(found: Relief) -> dict[str, Any]:
    return {
        "change": found.change,
        "plan": found.plan.describe(),
        "step_time": found.step_time,
        "peak_memory": found.peak_memory,
        "devices": found.devices,
        "device_seconds": found.cost,
        "machine": found.machine,
    }
