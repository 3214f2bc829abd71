"""Why nothing fits, and what would: the device or host that lacks most memory, what fills it, and the cheapest changes.

For a plan that does not fit it also finds the nearest plan that does.
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
    """Raised where nothing fits; ``document`` explains it as JSON-ready data."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document["reason"])
        self.document = document


GRACE = 2.0
"""Seconds for what follows a search whose time is up, such as the explanation of why nothing fits."""

Left = Callable[[], float]
"""Returns the seconds that are left."""


def seconds_left(seconds: float | None, clock: Callable[[], float] = perf_counter) -> Left:
    """Return a function that returns the seconds left of ``seconds`` and `GRACE` from now on; no limit for ``None``."""
    if seconds is None:
        return unlimited
    end = clock() + seconds + GRACE
    return lambda: end - clock()


def nothing_is_known_to_fit(result: SearchResult) -> bool:
    """Return whether a search proves that nothing fits, and did not just lack time, evaluations or luck.

    It does where the space has no plans, or where the algorithm proves that no plan of it fits.
    """
    if result.best is not None or result.end != FINISHED:
        return False
    return result.nearest is None or (result.nothing_fits and not result.nearest.evaluation.fits)


def nothing_fits_in(value: Scenario, left: Left = unlimited) -> dict[str, Any]:
    """Return why no layout of a scenario's space fits, and the cheapest changes that make one fit, as JSON-ready data.

    Of a large space, known plans and their neighbours are tried. Where ``time_left`` returns 0 before they are ranked,
    the document has no changes.
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
    """Return why none of ``layouts`` fits, and the cheapest changes that make one fit, as JSON-ready data.

    The explanation is of the first layout, the one that needs least memory. Where no time is left, the changes are
    those tried until then.
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
    """Return a remark if the plan fits only where torch's allocator has expandable segments; else no text."""
    if problem.memory_margin == 1.0 or not caches_blocks(problem.training, problem.cluster):
        return ""
    pages = with_margin(replace(problem, training=replace(problem.training, expandable_segments=True)))
    return "; with training.expandable_segments: true it fits" if SimulatedCost(pages).evaluate(plan).fits else ""


def lacking_in_words(problem: Problem, found: Shortfall) -> str:
    """Return in one line which stage or host lacks how much memory, what fills it, and a device's risk."""
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
    """Return in words the memory of a device in bytes, and the usable part where it is smaller."""
    if usable == reported:
        return f"a device has {format_size(reported)}"
    has = f"usable are {format_size(usable)} of the {format_size(reported)} that the framework reports"
    return f"{has} (risk {RISK:.0%})".replace("%", " %")


def shortfall_document(problem: Problem, found: Shortfall) -> dict[str, Any]:
    """Return a shortfall as JSON-ready data; ``host`` is empty where a device lacks memory."""
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
"""Layouts that the search for the nearest plan that fits checks before it gives up."""


def reason(problem: Problem, plan: Plan) -> str:
    """Return in words why a plan does not fit: which stage or host needs how much memory, and how much it has."""
    return f"the plan does not fit: {lacking_in_words(problem, shortfall(problem, plan))}"


def nearest_that_fits(problem: Problem, plan: Plan, accepts: Accepts | None = None) -> Plan | None:
    """Return the plan that fits with the fewest changed decisions, of several the one with the lowest time bound.

    A decision is one of the search space: a field, or a factor traded between two degrees. Plans that ``acceptor``
    refuses do not count. None where none of the first `MAX_CHECKED` layouts fits.
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
    """Return the completion of a layout as the only item if it is legal, accepted and fits; else no item.

    The completion with the overlap of tensor communication of ``plan`` comes before the one without overlap.
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
    """Return the layout of the space that is nearest to ``plan``.

    It names stages by word, shards states over all data ranks, gathers them again in backward, and overlaps no tensor
    communication with products.
    """
    layout = layout_of(problem, plan)
    stages = "balanced" if len(set(_counts(layout))) > 1 else "even"
    return replace(layout, stages=stages, zero_shards=0, reshard_after_forward=True, overlap_tensor=False)


def _counts(layout: Layout) -> tuple[int, ...]:
    return layout.stages if isinstance(layout.stages, tuple) else ()
