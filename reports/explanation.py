"""An explanation as lines of text, made from the document of `meshwise explain --json`, so that both say the same."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwise.simulator.units import format_count, format_duration, format_size, format_time
from meshwise.strategies.explanation.uncertainty import limit_in_words, risk_in_words

Data = Mapping[str, Any]


def explanation_lines(document: Data) -> Iterator[str]:
    """Yield the lines of an explanation, section after section; sections that the document lacks are left out."""
    for name, lines in _SECTIONS.items():
        if document.get(name):
            yield from lines(document[name])


def nothing_fits_lines(document: Data) -> Iterator[str]:
    """Yield why no plan fits, and the changes that would make one fit."""
    yield document["reason"]
    yield from changes_lines(document)


def changes_lines(document: Data) -> Iterator[str]:
    """Yield the cheapest changes that make a plan fit."""
    changes = document["changes"]
    if changes:
        yield "cheapest changes that make it fit, each simulated:"
    else:
        yield (
            "no single change of those that were tried makes it fit"
            if document.get("all_tried", True)
            else "time ran out before all changes were tried that might make it fit"
        )
    for each in changes:
        time, peak = format_time(each["step_time"]), format_size(each["peak_memory"])
        told = f"{time} a step on {each['devices']} devices, {peak}, {risk_in_words(each['out_of_memory'])}"
        yield f"  {each['change']}: {told}: {each['plan']}"


def robust_lines(found: Data) -> Iterator[str]:
    """Yield the plan that is best at a quantile, and the faster candidates that were rejected."""
    quantile, most = found["quantile"], found["most_out_of_memory"]
    yield f"robust       at the {quantile:.0%} quantile, out of memory with probability {most:.1%} at most:"
    yield from (f"  {line}" for line in _among(found["among"]))
    if found["best"] is None:
        yield "  none that was looked at is so safe"
    if not found["finished"]:
        yield "  time ran out: not all of these were looked at"
    for each in found["ranked"]:
        chosen = "*" if found["best"] and each["plan"] == found["best"]["plan"] else " "
        at = format_time(each["quantile"]) if each["quantile"] != float("inf") else "for ever"
        time, lacks = format_time(each["step_time"]), each["out_of_memory"]
        yield f" {chosen}{at:>9} ({time}), out of memory {lacks:.1%}: {each['plan']}"


def _plan(found: Data) -> Iterator[str]:
    low, high = map(format_time, found["step_time_interval"])
    used = found["peak_memory"] / found["memory_capacity"]
    yield f"plan         {found['plan']}"
    yield f"step time    {format_time(found['step_time'])}; 90 % of runs between {low} and {high}"
    peak, has = format_size(found["peak_memory"]), format_size(found["memory_capacity"])
    risk = f"{risk_in_words(found['out_of_memory'])} ({limit_in_words(found['most_out_of_memory'])})"
    yield f"peak memory  {peak} of {has} ({used:.1%}), usable {format_size(found['memory_usable'])}; {risk}"
    yield from (f"among        {line}" for line in _among(found.get("among")))


def _among(found: Data | None) -> Iterator[str]:
    """Yield which plans were compared, where that is known."""
    if found is not None:
        plans = format_count(found["plans"], "plan")
        near = f"{plans}: known ones and those one decision away; not all {found['space']:,} of the space"
        yield f"{plans}: all of the space" if found["whole"] else near


def _critical_path(found: Data) -> Iterator[str]:
    seconds = found["seconds"]
    total = sum(seconds.values())
    stages = ", ".join(map(str, found["stages"]))
    yield ""
    yield f"critical path ({format_time(total)}, on pipeline rank {found['pipeline_rank']}: stages {stages})"
    yield from (f"  {kind:<31}{format_time(each):>10}{each / total:>8.1%}" for kind, each in seconds.items())


def _device_time(found: Data) -> Iterator[str]:
    total = sum(found.values())
    yield ""
    yield f"what a device does in the {format_time(total)}, on average over all devices"
    yield from (f"  {kind:<31}{format_time(each):>10}{each / total:>8.1%}" for kind, each in found.items())


def _best(found: Data) -> Iterator[str]:
    yield ""
    yield f"the best of these plans is {-found['margin']:.2%} faster: {found['plan']}"
    yield from _more(found["more_seconds"])


def _own_plan(found: Data) -> Iterator[str]:
    yield ""
    yield f"the scenario's own plan takes {found['margin']:+.2%}: {found['plan']}"
    yield from _more(found["more_seconds"])


def _more(seconds: Data) -> Iterator[str]:
    """Yield by kind how many seconds a plan takes more or less."""
    yield from (f"  {kind:<31}{_signed(each):>10}" for kind, each in seconds.items())


def _why_not(found: Data) -> Iterator[str]:
    asked = ", ".join(f"{name}={value}" for name, value in found["asked"].items())
    yield ""
    if found["broken_rules"]:
        yield f"why not {asked}: it breaks a rule"
        yield from (f"  {each['field']}: {each['message']}" for each in found["broken_rules"])
    elif found["outside_space"]:
        yield f"why not {asked}: {found['limits']} allow no such plan"
    elif found["lacking"]:
        yield f"why not {asked}: none of {_legal(found)} fits; the one that needs least:"
        yield f"  {found['plan']['plan']}"
        yield f"  {found['lacking']['words']}"
    else:
        plan, time = found["plan"]["plan"], format_time(found["plan"]["step_time"])
        risk = risk_in_words(found["plan"]["out_of_memory"])
        if found["is_explained"]:
            yield f"why not {asked}: the plan that is explained has it, and is the fastest of {_legal(found)}"
            return
        yield f"why not {asked}: it takes {found['margin']:+.2%}, {time}, {risk}; the fastest of {_legal(found)}:"
        yield f"  {plan}"
        yield from _more(found["more_seconds"])
        return
    if found["nearest"]:
        near = found["nearest"]
        told = f"{format_time(near['step_time'])}, {risk_in_words(near['out_of_memory'])}"
        yield f"nearest plan that works ({told}): {near['plan']}"
    else:
        yield "none of these plans fits"


def _legal(found: Data) -> str:
    """Return how many plans have the requested values, in words."""
    return f"{found['legal_plans']:,} such plans" + ("" if found["all_legal_plans"] else " that were looked at")


def _shadow_prices(found: Data) -> Iterator[str]:
    yield ""
    yield "what more of each resource saves (shadow prices)"
    for each in found["prices"]:
        saves = f"{format_time(each['saves'])} ({each['fraction']:.2%})" if each["saves"] else "nothing"
        plan = f": {each['plan']}" if each["plan"] else ""
        yield f"  {each['resource']:<22}{each['amount']:>14}  +{each['more']:<6} saves {saves}{plan}"
    yield f"binding: {found['binding']}; memory is {found['memory_used']:.1%} full"
    if found["next_memory"]:
        more = found["next_memory"]
        time = format_time(more["step_time"])
        size, risk = format_size(more["peak_memory"]), risk_in_words(more["out_of_memory"])
        yield f"memory binds too: with {size} a device {time} ({risk} on what there is): {more['plan']}"
    else:
        yield "memory does not bind: none of these plans that needs more is faster"


def _runner_up(found: Data) -> Iterator[str]:
    time, lacks = format_time(found["step_time"]), found["out_of_memory"]
    yield ""
    yield f"runner-up    {found['margin']:+.2%}, {time}, differs in {found['decision']}, out of memory {lacks:.1%}:"
    yield f"  {found['plan']}"


def _decisions(found: list[Data]) -> Iterator[str]:
    yield ""
    yield "what each decision is worth: the fastest plan of those looked at that decides it otherwise"
    for each in found:
        peak, lacks = format_size(each["peak_memory"]), each["out_of_memory"]
        yield f"  {each['decision']:<18}{each['margin']:>+8.2%}  {peak:>9}  out of memory {lacks:>5.1%}  {each['plan']}"


def _recommendation(found: list[Data]) -> Iterator[str]:
    yield ""
    yield "guidelines of the field with the numbers of this problem"
    for each in found:
        verdict = "as the guideline" if each["follows"] else "NOT as the guideline"
        yield f"  {each['about']}: {each['guideline']} [{each['source']}]"
        yield f"    {verdict}: {each['numbers']}"


def _memory_front(found: list[Data]) -> Iterator[str]:
    yield ""
    yield "step time against memory (Pareto front)"
    for each in found:
        mark = "" if each["fits"] else "  does not fit"
        time, peak = format_time(each["step_time"]), format_size(each["peak_memory"])
        yield f"  {time:>9}  {peak:>9}  out of memory {each['out_of_memory']:>6.1%}  {each['plan']}{mark}"


def _sensitivity(found: list[Data]) -> Iterator[str]:
    yield ""
    yield "does this plan stay the best?"
    for each in found:
        low, high = each["region"]
        bounds = (
            f"{'at least ' if end else ''}{value:.2f}" for value, end in zip((low, high), each["reached"], strict=True)
        )
        below, above = bounds
        yield f"  {each['part']:<22}{each['speed']:>12}  stays the best from {below} to {above} times as much"
        yield from (f"    {line}" for outcome in each["outcomes"] if (line := _outcome(outcome)))


def _outcome(found: Data) -> str:
    times = f"at {found['factor']:.1f}"
    if found["stays"]:
        return ""
    if found["best"] is None:
        return f"{times} nothing fits"
    best = f"{format_time(found['best_step_time'])}: {found['best']}"
    if not found["fits"]:
        return f"{times} it does not fit; the best is then {best}"
    return f"{times} it takes {found['loses']:+.2%} over {best}"


def _device_front(found: list[Data]) -> Iterator[str]:
    yield ""
    yield "fewer devices: step time and cost of a million tokens (device-hours, or in the price given)"
    for each in found:
        if not each["fits"]:
            nothing = "nothing fits" if each["among"]["whole"] else "no known plan fits, nor one near it"
            yield f"  {each['devices']:>6} devices  {nothing}"
            continue
        time, cost = format_time(each["step_time"]), each["cost_per_million_tokens"]
        yield f"  {each['devices']:>6} devices  {time:>9}  {cost:.4g}  {each['plan']}"


def _replan(found: Data) -> Iterator[str]:
    yield ""
    yield f"{format_count(found['lost'], 'device')} lost, {found['left']} left"
    for name, title in (("best", "best plan"), ("fewest_moves", "same stages and tensor ranks")):
        each = found[name]
        if each is None:
            yield f"  {title}: none fits"
            continue
        idle = found["left"] - each["devices"]
        yield f"  {title}: {format_time(each['step_time'])} on {each['devices']} devices, {idle} idle: {each['plan']}"
        moved, most = format_size(each["received"]), format_size(each["most_received"])
        lost = format_size(each["from_checkpoint"])
        yield f"    migration: {moved} in all, {most} to one device, {format_duration(each['migration_seconds'])}"
        yield f"    {lost} of states are on no device that is left and come from a checkpoint"
    steps = found["break_even_steps"]
    if steps is not None:
        paid = f"has paid for its migration after {steps:.3g} steps" if steps else "moves less too: it pays at once"
        yield f"  the best plan {paid}"
    sizes = found["sizes"]
    proof = "fewer can be no faster than that plan" if found["proven"] else "others not looked at in time"
    each = "" if found["whole"] else ", on each at known plans and those one decision away"
    yield f"  looked at {len(sizes)} numbers of devices from {sizes[0]} to {sizes[-1]}{each}; {proof}" if sizes else ""


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_time(abs(seconds))


_SECTIONS: dict[str, Callable[[Any], Iterator[str]]] = {
    "plan": _plan,
    "critical_path": _critical_path,
    "device_time": _device_time,
    "best": _best,
    "own_plan": _own_plan,
    "why_not": _why_not,
    "shadow_prices": _shadow_prices,
    "runner_up": _runner_up,
    "decisions": _decisions,
    "sensitivity": _sensitivity,
    "memory_front": _memory_front,
    "device_front": _device_front,
    "recommendation": _recommendation,
    "replan": _replan,
}
