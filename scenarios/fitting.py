"""Nothing fits: the device or host that lacks most, what fills it, and changes that make a plan fit.

They are the cheapest changes and, of a plan that does not fit, the plan nearest to it that does.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from meshwise.scenarios.intervals import RISK, caches_blocks, out_of_memory_of, uncertainty_of, with_margin
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import CostModel, SimulatedCost
from meshwise.strategies.explanation.ranking import ranking, unlimited
from meshwise.strategies.explanation.relief import Relief, reliefs
from meshwise.strategies.explanation.shortfall import Shortfall, shortfall
from meshwise.strategies.explanation.uncertainty import risk_in_words
from meshwise.strategies.plan.completion import complete, layout_of
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search import Space, neighbours
from meshwise.strategies.search.acceptance import Accepts
from meshwise.strategies.search.driver import FINISHED, OutOfTime, SearchResult

EMPTY_SPACE = "nothing fits: the search space is empty; the limits in search.space allow no legal plan"


class Nothing(Exception):
    """Nothing fits: carries what is known as JSON-ready data."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document["reason"])
        self.document = document


GRACE = 2.0
"""Seconds in which what follows a search is worked out when its time is up."""

Left = Callable[[], float]
"""How many seconds are left."""


def seconds_left(seconds: float | None, clock: Callable[[], float] = perf_counter) -> Left:
    """Return how many of some ``seconds`` from now on are left, and `GRACE`; infinitely many of ``None``."""
    if seconds is None:
        return unlimited
    end = clock() + seconds + GRACE
    return lambda: end - clock()


def nothing_is_known_to_fit(result: SearchResult) -> bool:
    """Return whether a search found nothing because nothing fits: not for lack of time, evaluations or luck.

    It is known where there are no plans, and where the algorithm has proven of all plans that none fits.
    """
    if result.best is not None or result.end != FINISHED:
        return False
    return result.nearest is None or (result.nothing_fits and not result.nearest.evaluation.fits)


def nothing_fits_in(value: Scenario, left: Left = unlimited) -> dict[str, Any]:
    """Return why no layout of a scenario's space fits, and the cheapest changes that make one fit.

    Of a large space known plans and those near them are tried. Where no seconds are ``left``, nothing is said of
    changes.
    """
    space = value.with_starts(value.make_space())
    try:
        found = ranking(value.problem, space, seconds=left)
        candidates = sorted((each for each in found.candidates if not each.fits), key=lambda each: each.peak)
    except OutOfTime:
        return {"reason": "nothing fits", "lacking": None, "plan": None, "changes": [], "all_tried": False}
    return nothing_fits(value.problem, [each.layout for each in candidates], space.accepts, left)


def nothing_fits(
    problem: Problem, tried: list[Layout], accepts: Accepts | None = None, left: Left = unlimited
) -> dict[str, Any]:
    """Return why none of some layouts fits, the least first, and the cheapest changes that make one fit.

    Where no seconds are ``left``, of those changes that were looked at.
    """
    if not tried:
        return {"reason": EMPTY_SPACE, "lacking": None, "plan": None, "changes": [], "all_tried": True}
    plan = complete(problem, tried[0])
    lacking = shortfall(problem, plan)
    changes = reliefs(problem, tried, accepts=accepts, seconds=left)
    return {
        "reason": f"nothing fits: {plan.describe()}: {lacking_in_words(problem, lacking)}{_with_pages(problem, plan)}",
        "plan": plan.describe(),
        "lacking": shortfall_document(problem, lacking),
        "changes": [_relief(each) for each in changes],
        "all_tried": left() > 0,
    }


def _with_pages(problem: Problem, plan: Plan) -> str:
    """Return that a plan fits where torch's allocator grows segments page by page, if it does then alone."""
    if problem.memory_margin == 1.0 or not caches_blocks(problem.training, problem.cluster):
        return ""
    pages = with_margin(replace(problem, training=replace(problem.training, expandable_segments=True)))
    return "; with training.expandable_segments: true it fits" if SimulatedCost(pages).evaluate(plan).fits else ""


def lacking_in_words(problem: Problem, found: Shortfall) -> str:
    """Return in one line which device or host lacks how much, for what, and when, and of a device with which risk."""
    stages = ", ".join(map(str, found.stages))
    held = ", ".join(f"{name} {format_size(size)}" for name, size in found.held if size)
    lacks = format_size(found.lacks)
    if found.host:
        return (
            f"{found.host} keeps {format_size(found.needs)} of stage {stages}, it has {format_size(found.has)}, "
            f"{lacks} too little ({held})"
        )
    device = next(kind for kind in problem.cluster.accelerators if kind.memory == found.reported)
    risk = uncertainty_of(problem).out_of_memory(found.needs, device.memory, device.reserved)
    return (
        f"stage {stages} needs {format_size(found.needs)}, {room_in_words(found.has, found.reported)}, "
        f"{lacks} too little ({held}; at {found.time:.3g} s, {found.during}); {risk_in_words(risk)}"
    )


def room_in_words(usable: float, reported: float) -> str:
    """Return what a device has in bytes, and how much of it is usable where that is less."""
    if usable == reported:
        return f"a device has {format_size(reported)}"
    has = f"usable are {format_size(usable)} of the {format_size(reported)} that the framework reports"
    return f"{has} (risk {RISK:.0%})".replace("%", " %")


def shortfall_document(problem: Problem, found: Shortfall) -> dict[str, Any]:
    """Return what a device or host lacks as JSON-ready data; ``host`` is empty for a device."""
    return {
        "host": found.host,
        "stages": list(found.stages),
        "needs": found.needs,
        "has": found.has,
        "reported": found.reported,
        "lacks": found.lacks,
        "held": dict(found.held),
        "time": found.time,
        "during": found.during,
        "words": lacking_in_words(problem, found),
    }


def _relief(found: Relief) -> dict[str, Any]:
    return {
        "change": found.change,
        "plan": found.plan.describe(),
        "step_time": found.step_time,
        "peak_memory": found.peak_memory,
        "out_of_memory": out_of_memory_of(found.problem, found.peak_memory),
        "devices": found.devices,
        "device_seconds": found.cost,
        "machine": found.machine,
    }


MAX_CHECKED = 400
"""Plans whose memory is looked at before giving up."""


def reason(problem: Problem, plan: Plan) -> str:
    """Return which stage or host needs how much memory for what, and what there is."""
    return f"the plan does not fit: {lacking_in_words(problem, shortfall(problem, plan))}"


def nearest_that_fits(problem: Problem, plan: Plan, accepts: Accepts | None = None) -> Plan | None:
    """Return a plan that fits and differs in as few decisions as possible, the one with the lowest bound of those.

    Decisions are those of the search space: a field, or a factor traded between two degrees. With ``accepts``, only
    plans that it accepts count. None where no plan within the first `MAX_CHECKED` does.
    """
    costs, space = SimulatedCost(problem), Space()
    start = _in_space(problem, plan)
    seen, level = {start}, [start]
    fitting = _fitting(problem, plan, start, costs, accepts)  # where the space has the plan in other words
    while not fitting and level and len(seen) <= MAX_CHECKED:
        following: list[Layout] = []
        for layout in (near for origin in level for near in neighbours(problem, space, origin)):
            if len(seen) > MAX_CHECKED:
                break
            if layout not in seen:
                seen.add(layout)
                following.append(layout)
                fitting += _fitting(problem, plan, layout, costs, accepts)
        level = following
    return min(fitting, key=costs.bound, default=None)


def _fitting(problem: Problem, plan: Plan, layout: Layout, costs: CostModel, accepts: Accepts | None) -> list[Plan]:
    """Return the completion of a layout that is legal, accepted and fits, or none.

    It overlaps tensor communication as ``plan`` does, or else does not.
    """
    for overlap in dict.fromkeys((plan.overlap_tensor, False)):
        candidate = replace(layout, overlap_tensor=overlap)
        if next(violations(problem, candidate), None) is not None:
            continue
        found = complete(problem, candidate)
        if (accepts is None or not accepts.refusals(problem, found)) and costs.fits(found):
            return [found]
    return []


def _in_space(problem: Problem, plan: Plan) -> Layout:
    """Return the layout of ``plan`` as a space has it.

    Stages by word, states shared over all data ranks and gathered again in backward, no tensor communication beside
    products.
    """
    layout = layout_of(problem, plan)
    stages = "balanced" if len(set(_counts(layout))) > 1 else "even"
    return replace(layout, stages=stages, zero_shards=0, reshard_after_forward=True, overlap_tensor=False)


def _counts(layout: Layout) -> tuple[int, ...]:
    return layout.stages if isinstance(layout.stages, tuple) else ()
