"""Why nothing fits, and what would: the device or host that lacks most memory, what fills it, and the cheapest changes.

For a plan that does not fit it also finds the nearest plan that does.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from meshwise.scenarios.intervals import RISK, caches_blocks, with_margin
from meshwise.scenarios.memory_forecast import forecast_plan, list_device_peaks
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import CostModel, Trial
from meshwise.strategies.explanation.ranking import ranking
from meshwise.strategies.explanation.relief import Relief, list_reliefs
from meshwise.strategies.explanation.shortfall import Shortfall, find_shortfall
from meshwise.strategies.explanation.uncertainty import format_risk
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.acceptance import Acceptor
from meshwise.strategies.search.driver import FINISHED, SearchResult
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.space import Space, layouts, neighbours

EMPTY_SPACE = "nothing fits: the search space is empty; the limits in search.space allow no legal plan"


class NothingFits(Exception):
    """Raised where nothing fits; ``document`` explains it as JSON-ready data."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document["reason"])
        self.document = document


GRACE = 2.0
"""Seconds for what follows a search whose time is up, such as the explanation of why nothing fits."""


def start_timer(seconds: float | None, clock: Callable[[], float] = perf_counter) -> TimeLeft:
    """Return a function that returns the seconds left of ``seconds`` and `GRACE` from now on; no limit for ``None``."""
    if seconds is None:
        return unlimited_seconds
    end = clock() + seconds + GRACE
    return lambda: end - clock()


def proves_nothing_fits(result: SearchResult) -> bool:
    """Return whether a search proves that nothing fits, and did not just lack time, evaluations or luck.

    It does where the space has no plans, or where the algorithm proves that no plan of it fits.
    """
    if result.best is not None or result.end != FINISHED:
        return False
    return result.nearest is None or (result.nothing_fits and not result.nearest.evaluation.fits)


def explain_misfit(scenario: Scenario, nearest: Trial | None) -> str:
    """Return why no plan of a scenario's space fits.

    ``nearest`` is the plan that needs the least memory; ``None`` where the space is empty.
    """
    if nearest is not None:
        lacking = _describe_plan_shortfall(scenario.problem, nearest.plan)
        return f"nothing fits: the plan that needs the least on devices is {nearest.plan.describe()}: {lacking}"
    reason = EMPTY_SPACE
    if scenario.target is not None:
        from meshwise.scenarios.interchange.targets import Acceptance  # the field maps of all trainers

        reason = f"{EMPTY_SPACE} that {Acceptance(scenario.target, scenario.spec).can}"
    names = [name for name in dict(scenario.search_settings.space) if _has_plans(_without_limit(scenario, name))]
    return f"{reason}{_describe_limits(names)}"


def _without_limit(scenario: Scenario, name: str) -> Scenario:
    settings = scenario.search_settings
    limits = tuple((other, limit) for other, limit in settings.space if other != name)
    return replace(scenario, search_settings=replace(settings, space=limits))


def _has_plans(scenario: Scenario) -> bool:
    """Return whether the space of a scenario has a plan, and its target can express one."""
    space = scenario.make_space()
    return next(layouts(scenario.problem, space), None) is not None


def _describe_limits(names: list[str]) -> str:
    if not names:
        return ""
    fields = " or ".join(f"search.space.{name}" for name in names)
    return f"; without {fields} there are some"


def explain_space_shortfall(scenario: Scenario, time_left: TimeLeft = unlimited_seconds) -> dict[str, Any]:
    """Return why no layout of a scenario's space fits, and the cheapest changes that make one fit, as JSON-ready data.

    Of a large space, known plans and their neighbours are tried. Where ``time_left`` returns 0 before they are ranked,
    the document has no changes.
    """
    space = scenario.with_starts(scenario.make_space())
    try:
        space_ranking = ranking(SimulatedCost(scenario.problem), space, seconds=time_left)
        unfit_candidates = (candidate for candidate in space_ranking.candidates if not candidate.fits)
        candidates = sorted(unfit_candidates, key=lambda candidate: candidate.peak)
    except OutOfTime:
        return {"reason": "nothing fits", "lacking": None, "plan": None, "changes": [], "all_tried": False}
    return explain_shortfall(scenario.problem, [candidate.layout for candidate in candidates], space.accepts, time_left)


def explain_shortfall(
    problem: Problem, layouts: list[Layout], acceptor: Acceptor | None = None, time_left: TimeLeft = unlimited_seconds
) -> dict[str, Any]:
    """Return why none of ``layouts`` fits, and the cheapest changes that make one fit, as JSON-ready data.

    The explanation is of the first layout, the one that needs least memory. Where no time is left, the changes are
    those tried until then.
    """
    if not layouts:
        return {"reason": EMPTY_SPACE, "lacking": None, "plan": None, "changes": [], "all_tried": True}
    plan = complete(problem, layouts[0])
    lack = find_shortfall(problem, plan)
    changes = list_reliefs(problem, layouts, accepts=acceptor, seconds=time_left)
    document = build_shortfall_document(problem, plan, lack)
    shortfall = f"{document['words']}{_describe_pages(problem, plan)}"
    return {
        "reason": f"nothing fits: {plan.describe()}: {shortfall}",
        "plan": plan.describe(),
        "lacking": document,
        "changes": [_build_relief_document(relief) for relief in changes],
        "all_tried": time_left() > 0,
    }


def _describe_pages(problem: Problem, plan: Plan) -> str:
    """Return a remark if the plan fits only where torch's allocator has expandable segments; else no text."""
    if problem.memory_margin == 1.0 or not caches_blocks(problem.training, problem.cluster):
        return ""
    pages = with_margin(replace(problem, training=replace(problem.training, expandable_segments=True)))
    return "; with training.expandable_segments: true it fits" if SimulatedCost(pages).evaluate(plan).fits else ""


def _describe_plan_shortfall(problem: Problem, plan: Plan) -> str:
    return describe_shortfall(problem, plan, find_shortfall(problem, plan))


def describe_shortfall(problem: Problem, plan: Plan, lack: Shortfall) -> str:
    """Return in one line which stage or host lacks how much memory for a plan, what fills it, and a device's risk."""
    stages = ", ".join(map(str, lack.stages))
    usage_text = ", ".join(f"{name} {format_size(size)}" for name, size in lack.memory_by_kind if size)
    needed_text, missing_text = format_size(lack.needed_memory), format_size(lack.missing_memory)
    if lack.host:
        return (
            f"{lack.host} keeps {needed_text} of stage {stages}, it has {format_size(lack.usable_memory)}, "
            f"{missing_text} too little ({usage_text})"
        )
    forecast = forecast_plan(problem, plan)
    missing_text = f"{missing_text} too little"
    if lack.missing_memory <= 0:  # the tensors fit, and what the allocator reserves for them does not
        missing_text = f"but the allocator reserves {format_size(forecast.reserved)}"
    return (
        f"stage {stages} needs {needed_text}, {describe_room(lack.usable_memory, lack.reported_memory)}, "
        f"{missing_text} ({usage_text}; at {lack.time:.3g} s, {lack.activity}); {format_risk(forecast.out_of_memory)}"
    )


def describe_peak(problem: Problem, plan: Plan, peak: float) -> str:
    """Return in words the peak of a plan in bytes beside the room on a device; by kind where their memory differs."""
    devices = problem.cluster.accelerators
    if len({device.memory for device in devices}) > 1 and not SimulatedCost(problem).memory_needs_simulation(plan):
        return "; ".join(
            f"{_describe_tensors(device_peak, device)} on {device.name} "
            f"({describe_room(problem.usable_memory(device), device.memory)})"
            for device, device_peak in list_device_peaks(problem, plan).items()
        )
    device = min(devices, key=problem.usable_memory)
    return f"{_describe_tensors(peak, device)}; {describe_room(problem.usable_memory(device), device.memory)}"


def _describe_tensors(peak: float, device: Accelerator) -> str:
    """Return a peak in words: bytes of tensors, and of what the runtime takes before the first of them."""
    return f"{format_size(peak)} of tensors{' and runtime' if device.reserved else ''}"


def describe_room(usable_memory: float, reported_memory: float) -> str:
    """Return in words the memory of a device in bytes, and the usable part where it is smaller."""
    if usable_memory == reported_memory:
        return f"a device has {format_size(reported_memory)}"
    usable_text = (
        f"usable are {format_size(usable_memory)} of the {format_size(reported_memory)} that the framework reports"
    )
    return f"{usable_text} (risk {RISK:.0%})".replace("%", " %")


def build_shortfall_document(problem: Problem, plan: Plan, lack: Shortfall) -> dict[str, Any]:
    """Return the shortfall of a plan as JSON-ready data; ``host`` is empty where a device lacks memory."""
    return {
        "host": lack.host,
        "stages": list(lack.stages),
        "needs": lack.needed_memory,
        "has": lack.usable_memory,
        "reported": lack.reported_memory,
        "lacks": lack.missing_memory,
        "held": dict(lack.memory_by_kind),
        "time": lack.time,
        "during": lack.activity,
        "words": describe_shortfall(problem, plan, lack),
    }


def _build_relief_document(relief: Relief) -> dict[str, Any]:
    return {
        "change": relief.change,
        "plan": relief.plan.describe(),
        "step_time": relief.step_time,
        "peak_memory": relief.peak_memory,
        "out_of_memory": forecast_plan(relief.problem, relief.plan).out_of_memory,
        "devices": relief.devices,
        "device_seconds": relief.cost,
        "machine": relief.changes_machine,
    }


MAX_CHECKED = 400
"""Layouts that the search for the nearest plan that fits checks before it gives up."""


def explain_unfit_plan(problem: Problem, plan: Plan) -> str:
    """Return in words why a plan does not fit: which stage or host needs how much memory, and how much it has."""
    return f"the plan does not fit: {_describe_plan_shortfall(problem, plan)}"


def find_nearest_fit(problem: Problem, plan: Plan, acceptor: Acceptor | None = None) -> Plan | None:
    """Return the plan that fits with the fewest changed decisions, of several the one with the lowest time bound.

    A decision is one of the search space: a field, or a factor traded between two degrees. Plans that ``acceptor``
    refuses do not count. None where none of the first `MAX_CHECKED` layouts fits.
    """
    costs, space = SimulatedCost(problem), Space()
    start_layout = _to_space_layout(problem, plan)
    checked_layouts, level = {start_layout}, [start_layout]
    # where the space has the plan in other words
    fitting_plans = _complete_fitting(problem, plan, start_layout, costs, acceptor)
    while not fitting_plans and level and len(checked_layouts) <= MAX_CHECKED:
        next_level: list[Layout] = []
        for layout in (neighbour for origin in level for neighbour in neighbours(problem, space, origin)):
            if len(checked_layouts) > MAX_CHECKED:
                break
            if layout not in checked_layouts:
                checked_layouts.add(layout)
                next_level.append(layout)
                fitting_plans += _complete_fitting(problem, plan, layout, costs, acceptor)
        level = next_level
    return min(fitting_plans, key=costs.plan_bound, default=None)


def _complete_fitting(
    problem: Problem, plan: Plan, layout: Layout, costs: CostModel, acceptor: Acceptor | None
) -> list[Plan]:
    """Return the completion of a layout as the only item if it is legal, accepted and fits; else no item.

    The completion with the overlap of tensor communication of ``plan`` comes before the one without overlap.
    """
    for overlap in dict.fromkeys((plan.overlap_tensor, False)):
        candidate = replace(layout, overlap_tensor=overlap)
        if next(violations(problem, candidate), None) is not None:
            continue
        completion = complete(problem, candidate)
        if (acceptor is None or not acceptor.list_refusals(problem, completion)) and costs.fits(completion):
            return [completion]
    return []


_VARIED_FLAGS: dict[str, Any] = {
    name: item.default
    for name, item in DECISIONS.items()
    if isinstance(item.default, bool) and len(item.core) < len(item.usual)
}
"""The flags that a core space leaves alone and a usual one tries both ways, with their defaults."""


def _to_space_layout(problem: Problem, plan: Plan) -> Layout:
    """Return the layout of the space that is nearest to ``plan``.

    It names stages by word, shards states over all data ranks, and has the flags as in a core space that a larger one
    varies.
    """
    layout = recover_layout(problem, plan)
    stages = "balanced" if isinstance(layout.stages, tuple) and len(set(layout.stages)) > 1 else "even"
    return replace(layout, stages=stages, zero_shards=0, **_VARIED_FLAGS)
