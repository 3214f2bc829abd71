"""A step under loads that vary, as lines of text made from the document that ``--json`` prints."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwise.reports.tables import format_number, format_percent
from meshwise.simulator.units import format_count, format_size, format_time

Data = Mapping[str, Any]


def list_loads_rows(loads: Data) -> Iterator[tuple[str, str]]:
    """Yield name and text of what a plan takes under drawn loads."""
    num_draws, num_different = len(loads["step_times"]), loads["num_simulated"]
    engine = "discrete events" if loads["engine"] == "discrete_event" else "longest paths"
    yield "loads vary", f"{format_count(num_draws, 'step')} drawn, {num_different} different, simulated by {engine}"
    median, mean, high = (format_time(loads[name]) for name in ("median", "mean", "high"))
    yield "their step time", f"median {median}, mean {mean}; {format_percent(loads['quantile'])} of steps within {high}"
    for name, step, place in (("waiting", median, "the median"), ("high_waiting", high, "the quantile")):
        if loads[name]:
            parts = [f"{format_time(seconds)} for {cause}" for cause, seconds in loads[name].items()]
            yield f"waiting at {place}", f"of {step}, {' and '.join(parts)}"
    if loads["padding"] is not None:
        tokens = f"{_format_throughput(loads)} ({format_time(1e6 / loads['tokens_per_second'])} a million)"
        cut = f"; {format_percent(loads['cut'])} of samples are cut to the sequence" if loads["cut"] else ""
        yield (
            "samples",
            f"{tokens}, {format_percent(loads['padding'])} of what is computed is padding{cut}",
        )
        yield (
            "to compare",
            "tokens of samples a second, not seconds a step: packed steps have more samples than padded ones",
        )
    yield "peak memory", f"{format_size(loads['peak_memory'])}, were all microbatches as large as the largest drawn"


def loaded_choice_lines(choice: Data) -> Iterator[str]:
    """Yield the plans that were compared under drawn loads, in the order of the quantile of their step times."""
    ranked, num_screened = choice["ranked"], choice["screened"]
    quantile, plans = format_percent(choice["quantile"]), format_count(num_screened, "plan")
    draws_text = f"the best at the {quantile} quantile of {choice['draws']} drawn steps"
    yield f"loads vary   {draws_text}, of {plans} that are fast with full or typical sequences"
    if not choice["finished"]:
        yield "  time ran out: not all of these were looked at"
    for place, plan in enumerate(ranked):
        median, full = format_time(plan["loads"]["median"]), format_time(plan["step_time"])
        mark, high = "*" if place == 0 else " ", format_time(plan["loads"]["high"])
        tokens = "" if plan["loads"]["padding"] is None else f", {_format_throughput(plan['loads'])}"
        yield f" {mark}{high:>9} (median {median}{tokens}; {full} with full sequences): {plan['plan']}"


def _format_throughput(loads: Data) -> str:
    """Return the tokens of samples a second, without those of padding."""
    return f"{format_number(loads['tokens_per_second'])} tokens of samples a second"
