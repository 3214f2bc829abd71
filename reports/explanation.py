"""An explanation as lines of text, made from the document of `meshwise explain --json`, so that both say the same."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwise.reports.tables import find_fullest, format_fullest, format_reserved
from meshwise.simulator.units import format_count, format_duration, format_size, format_time
from meshwise.strategies.explanation.uncertainty import format_limit, format_risk

Data = Mapping[str, Any]

MOST_TABLES = 8
"""Embedding tables that are named one by one."""


def explanation_lines(document: Data) -> Iterator[str]:
    """Yield the lines of an explanation, section after section; sections that the document lacks are left out."""
    for name, lines in _SECTIONS.items():
        if document.get(name):
            if name != "plan":
                yield ""
            yield from lines(document[name])


def nothing_fits_lines(document: Data) -> Iterator[str]:
    """Yield why no plan fits, and the changes that would make one fit."""
    yield document["reason"]
    yield from changes_lines(document)


def changes_lines(document: Data) -> Iterator[str]:
    """Yield the cheapest changes that make a plan fit."""
    if document["changes"]:
        yield "cheapest changes that make it fit, each simulated:"
    elif document.get("all_tried", True):
        yield "no single change of those that were tried makes it fit"
    else:
        yield "time ran out before all changes were tried that might make it fit"
    for change in document["changes"]:
        time, peak = format_time(change["step_time"]), format_size(change["peak_memory"])
        outcome = f"{time} a step on {change['devices']} devices, {peak}, {format_risk(change['out_of_memory'])}"
        yield f"  {change['change']}: {outcome}: {change['plan']}"


def robust_lines(robust: Data) -> Iterator[str]:
    """Yield the plan that is best at a quantile, and the faster candidates that were rejected."""
    quantile, max_risk = robust["quantile"], robust["most_out_of_memory"]
    yield f"robust       at the {quantile:.0%} quantile, out of memory with probability {max_risk:.1%} at most:"
    yield from (f"  {line}" for line in _compared_lines(robust["among"]))
    if robust["best"] is None:
        yield "  none that was looked at is so safe"
    if not robust["finished"]:
        yield "  time ran out: not all of these were looked at"
    for candidate in robust["ranked"]:
        mark = "*" if robust["best"] and candidate["plan"] == robust["best"]["plan"] else " "
        quantile_time = format_time(candidate["quantile"]) if candidate["quantile"] != float("inf") else "for ever"
        time, risk = format_time(candidate["step_time"]), candidate["out_of_memory"]
        yield f" {mark}{quantile_time:>9} ({time}), out of memory {risk:.1%}: {candidate['plan']}"


def _plan_lines(plan: Data) -> Iterator[str]:
    low, high = map(format_time, plan["step_time_interval"])
    yield f"plan         {plan['plan']}"
    yield f"step time    {format_time(plan['step_time'])}; 90 % of runs between {low} and {high}"
    yield f"peak memory  {plan['peak_words']}"
    yield f"reserved     {format_reserved(plan['peak_reserved'], plan['peak_device'])}"
    yield f"risk         {format_risk(plan['out_of_memory'])} ({format_limit(plan['most_out_of_memory'])})"
    yield from (f"among        {line}" for line in _compared_lines(plan.get("among")))


def _compared_lines(compared: Data | None) -> Iterator[str]:
    """Yield which plans were compared, where that is known."""
    if compared is not None:
        plans = format_count(compared["plans"], "plan")
        partial_text = f"{plans}: known ones and those one decision away; not all {compared['space']:,} of the space"
        yield f"{plans}: all of the space" if compared["whole"] else partial_text


def _critical_path_lines(critical_path: Data) -> Iterator[str]:
    total = format_time(sum(critical_path["seconds"].values()))
    stages = ", ".join(map(str, critical_path["stages"]))
    yield f"critical path ({total}, on pipeline rank {critical_path['pipeline_rank']}: stages {stages})"
    yield from _share_lines(critical_path["seconds"])


def _table_lines(document: Data) -> Iterator[str]:
    """Yield how the largest embedding tables lie, and which data ranks have most of them."""
    rows = document["tables"]
    yield "embedding tables, the largest first"
    for row in rows[:MOST_TABLES]:
        rate = "" if row["hit_rate"] is None else f", {row['hit_rate']:.1%} of look-ups found there"
        yield f"  {row['name']:<12} {format_size(row['size']):>9}  {row['placement']}{rate}"
    if hidden := rows[MOST_TABLES:]:
        yield f"  and {len(hidden)} more, {format_size(sum(row['size'] for row in hidden))} in all (--json shows all)"
    loads = {rank: load for load in document["devices"] for rank in load["ranks"]}
    fullest, busiest = document["most_memory"], document["most_work"]
    kept, read = format_size(loads[fullest]["kept"]), format_size(loads[busiest]["read"])
    yield f"  data rank {fullest} keeps most, {kept}; rank {busiest} reads and writes most, {read} a microbatch"


def _memory_lines(rows: list[Data]) -> Iterator[str]:
    """Yield which rank is fullest, and what fills its device at the peak."""
    row = find_fullest(rows)
    yield f"peak memory of the fullest rank: {format_fullest(row)}"
    sizes = {name: row[name] for name in ("parameters", "gradients", "optimizer", "activations", "buffers")}
    for name, size in sizes.items():
        yield f"  {name:<31}{format_size(size):>10}{size / row['peak']:>8.1%}"


def _device_time_lines(kind_seconds: Data) -> Iterator[str]:
    total = format_time(sum(kind_seconds.values()))
    yield f"what a device does in the {total}, on average over all devices"
    yield from _share_lines(kind_seconds)


def _share_lines(seconds: Data) -> Iterator[str]:
    """Yield by kind its seconds and its share of them all."""
    total = sum(seconds.values())
    yield from (f"  {kind:<31}{format_time(time):>10}{time / total:>8.1%}" for kind, time in seconds.items())


def _best_lines(best: Data) -> Iterator[str]:
    gain = -best["margin"]
    yield f"the best of these plans is {abs(gain):.2%} {'faster' if gain > 0 else 'slower'}: {best['plan']}"
    yield from _difference_lines(best["more_seconds"])


def _own_plan_lines(own_plan: Data) -> Iterator[str]:
    yield f"the scenario's own plan takes {own_plan['margin']:+.2%}: {own_plan['plan']}"
    yield from _difference_lines(own_plan["more_seconds"])


def _difference_lines(seconds: Data) -> Iterator[str]:
    """Yield by kind how many seconds a plan takes more or less."""
    for kind, difference in seconds.items():
        time = ("+" if difference >= 0 else "-") + format_time(abs(difference))
        yield f"  {kind:<31}{time:>10}"


def _why_not_lines(answer: Data) -> Iterator[str]:
    request = ", ".join(f"{name}={value}" for name, value in answer["asked"].items())
    if answer["broken_rules"]:
        yield f"why not {request}: it breaks a rule"
        yield from (f"  {broken_rule['field']}: {broken_rule['message']}" for broken_rule in answer["broken_rules"])
    elif answer["outside_space"]:
        yield f"why not {request}: {answer['limits']} allow no such plan"
    elif answer["lacking"]:
        yield f"why not {request}: none of {_legal_plans_text(answer)} fits; the one that needs least:"
        yield f"  {answer['plan']['plan']}"
        yield f"  {answer['lacking']['words']}"
    else:
        plan, time = answer["plan"]["plan"], format_time(answer["plan"]["step_time"])
        risk = format_risk(answer["plan"]["out_of_memory"])
        fastest = f"the fastest of {_legal_plans_text(answer)}"
        if answer["is_explained"]:
            yield f"why not {request}: the plan that is explained has it, and is {fastest}"
            return
        yield f"why not {request}: it takes {answer['margin']:+.2%}, {time}, {risk}; {fastest}:"
        yield f"  {plan}"
        yield from _difference_lines(answer["more_seconds"])
        return
    if answer["nearest"]:
        nearest_plan = answer["nearest"]
        outcome = f"{format_time(nearest_plan['step_time'])}, {format_risk(nearest_plan['out_of_memory'])}"
        yield f"nearest plan that works ({outcome}): {nearest_plan['plan']}"
    else:
        yield "none of these plans fits"


def _legal_plans_text(answer: Data) -> str:
    """Return how many plans have the requested values, in words."""
    return f"{answer['legal_plans']:,} such plans" + ("" if answer["all_legal_plans"] else " that were looked at")


def _shadow_price_lines(prices: Data) -> Iterator[str]:
    yield "what more of each resource saves (shadow prices)"
    for price in prices["prices"]:
        saving = f"{format_time(price['saves'])} ({price['fraction']:.2%})" if price["saves"] else "nothing"
        plan = f": {price['plan']}" if price["plan"] else ""
        yield f"  {price['resource']:<22}{price['amount']:>14}  +{price['more']:<6} saves {saving}{plan}"
    yield f"binding: {prices['binding']}; memory is {prices['memory_used']:.1%} of the fullest device"
    if prices["next_memory"]:
        larger_memory = prices["next_memory"]
        time = format_time(larger_memory["step_time"])
        size, risk = format_size(larger_memory["peak_memory"]), format_risk(larger_memory["out_of_memory"])
        room = f"with {size} usable of a device"
        yield f"memory binds too: {room} {time} ({risk} on what there is): {larger_memory['plan']}"
    else:
        yield "memory does not bind: none of these plans that needs more is faster"


def _runner_up_lines(runner_up: Data) -> Iterator[str]:
    time, risk = format_time(runner_up["step_time"]), runner_up["out_of_memory"]
    decision = runner_up["decision"]
    yield f"runner-up    {runner_up['margin']:+.2%}, {time}, differs in {decision}, out of memory {risk:.1%}:"
    yield f"  {runner_up['plan']}"


def _decision_lines(decisions: list[Data]) -> Iterator[str]:
    yield (
        "what each decision is worth: the fastest plan of those looked at that decides it otherwise, "
        "with its peak memory"
    )
    for decision in decisions:
        name, margin = decision["decision"], decision["margin"]
        peak, risk = format_size(decision["peak_memory"]), decision["out_of_memory"]
        yield f"  {name:<18}{margin:>+8.2%}  {peak:>9}  out of memory {risk:>5.1%}  {decision['plan']}"


def _recommendation_lines(guidelines: list[Data]) -> Iterator[str]:
    yield "guidelines of the field with the numbers of this problem"
    for guideline in guidelines:
        verdict = "as the guideline" if guideline["follows"] else "NOT as the guideline"
        yield f"  {guideline['about']}: {guideline['guideline']} [{guideline['source']}]"
        yield f"    {verdict}: {guideline['numbers']}"


def _memory_front_lines(candidates: list[Data]) -> Iterator[str]:
    yield "step time against peak memory (Pareto front)"
    for candidate in candidates:
        mark = "" if candidate["fits"] else "  does not fit"
        time, peak = format_time(candidate["step_time"]), format_size(candidate["peak_memory"])
        yield f"  {time:>9}  {peak:>9}  out of memory {candidate['out_of_memory']:>6.1%}  {candidate['plan']}{mark}"


def _sensitivity_lines(sensitivities: list[Data]) -> Iterator[str]:
    yield "does this plan stay the best?"
    for sensitivity in sensitivities:
        ends = zip(sensitivity["region"], sensitivity["reached"], strict=True)
        low, high = (f"{'at least ' if is_open else ''}{value:.2f}" for value, is_open in ends)
        head = f"  {sensitivity['part']:<22}{sensitivity['speed']:>12}"
        yield f"{head}  stays the best from {low} to {high} times as much"
        yield from (f"    {line}" for outcome in sensitivity["outcomes"] if (line := _outcome_text(outcome)))


def _outcome_text(outcome: Data) -> str:
    times = f"at {outcome['factor']:.1f}"
    if outcome["stays"]:
        return ""
    if outcome["best"] is None:
        return f"{times} nothing fits"
    best = f"{format_time(outcome['best_step_time'])}: {outcome['best']}"
    if not outcome["fits"]:
        return f"{times} it does not fit; the best is then {best}"
    return f"{times} it takes {outcome['loses']:+.2%} over {best}"


def _device_front_lines(candidates: list[Data]) -> Iterator[str]:
    unit = next((candidate["unit"] for candidate in candidates if "unit" in candidate), "tokens")
    yield f"fewer devices: step time and cost of a million {unit} (device-hours, or in the price given)"
    for candidate in candidates:
        if not candidate["fits"]:
            reason = "nothing fits" if candidate["among"]["whole"] else "no known plan fits, nor one near it"
            yield f"  {candidate['devices']:>6} devices  {reason}"
            continue
        time, cost = format_time(candidate["step_time"]), candidate["cost_per_million_tokens"]
        yield f"  {candidate['devices']:>6} devices  {time:>9}  {cost:.4g}  {candidate['plan']}"


def _replan_lines(replan: Data) -> Iterator[str]:
    yield f"{format_count(replan['lost'], 'device')} lost, {replan['left']} left"
    for name, title in (("best", "best plan"), ("fewest_moves", "same stages and tensor ranks")):
        option = replan[name]
        if option is None:
            yield f"  {title}: none fits"
            continue
        devices, idle = option["devices"], replan["left"] - option["devices"]
        yield f"  {title}: {format_time(option['step_time'])} on {devices} devices, {idle} idle: {option['plan']}"
        moved_size, max_received = format_size(option["received"]), format_size(option["most_received"])
        lost_size, duration = format_size(option["from_checkpoint"]), format_duration(option["migration_seconds"])
        yield f"    migration: {moved_size} in all, {max_received} to one device, {duration}"
        yield f"    {lost_size} of states are on no device that is left and come from a checkpoint"
    steps = replan["break_even_steps"]
    if steps is not None:
        payback = f"has paid for its migration after {steps:.3g} steps" if steps else "moves less too: it pays at once"
        yield f"  the best plan {payback}"
    sizes = replan["sizes"]
    proof = "fewer can be no faster than that plan" if replan["proven"] else "others not looked at in time"
    option = "" if replan["whole"] else ", on each at known plans and those one decision away"
    yield (
        f"  looked at {len(sizes)} numbers of devices from {sizes[0]} to {sizes[-1]}{option}; {proof}" if sizes else ""
    )


_SECTIONS: dict[str, Callable[[Any], Iterator[str]]] = {
    "plan": _plan_lines,
    "memory": _memory_lines,
    "critical_path": _critical_path_lines,
    "device_time": _device_time_lines,
    "embedding_tables": _table_lines,
    "best": _best_lines,
    "own_plan": _own_plan_lines,
    "why_not": _why_not_lines,
    "shadow_prices": _shadow_price_lines,
    "runner_up": _runner_up_lines,
    "decisions": _decision_lines,
    "sensitivity": _sensitivity_lines,
    "memory_front": _memory_front_lines,
    "device_front": _device_front_lines,
    "recommendation": _recommendation_lines,
    "replan": _replan_lines,
}
