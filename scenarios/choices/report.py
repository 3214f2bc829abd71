"""The answer of a choice of setups: lines to print, a JSON-ready document, and where it ends."""

from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from typing import Any

from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State
from meshwise.scenarios.intervals import find_step_interval
from meshwise.scenarios.launches import describe_launches, list_launches, needs_runnable
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.simulator.units import format_duration, format_size, format_time
from meshwise.strategies.search.objective import Bill, Objective, RunTerms

HEADER = ("nodes", "devices", "batch", "step time", "bound", "run", "cost", "energy", "state")


def format_money(dollars: float | None) -> str:
    """Return US dollars as text with at least three digits that count.

    >>> format_money(1234567.8), format_money(3.14159), format_money(None)
    ('$1,234,568', '$3.14', '-')
    """
    if dollars is None:
        return "-"
    return f"${dollars:,.0f}" if dollars >= 1000 else f"${dollars:.3g}"


def format_energy(kilowatt_hours: float | None) -> str:
    """Return kilowatt-hours as text.

    >>> format_energy(12.34), format_energy(250000.0)
    ('12.3 kWh', '250 MWh')
    """
    if kilowatt_hours is None:
        return "-"
    return f"{kilowatt_hours / 1000:.3g} MWh" if kilowatt_hours >= 1000 else f"{kilowatt_hours:.3g} kWh"


def count_things(count: int, name: str) -> str:
    """Return a count with its noun.

    >>> count_things(1, "setup"), count_things(1200, "setup")
    ('1 setup', '1,200 setups')
    """
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def format_value(objective: Objective, bill: Bill) -> str:
    """Return the figure of a bill that an objective makes least, as text."""
    if objective is Objective.TIME:
        return format_duration(bill.seconds)
    if objective is Objective.DEVICES:
        return count_things(bill.devices, "device")
    return format_money(bill.cost) if objective is Objective.COST else format_energy(bill.energy)


def list_rows(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row of the table for every setup."""
    return [_list_cells(answer) for answer in choice.answers]


def _list_cells(answer: SetupAnswer) -> tuple[str, ...]:
    """Return the cells of a setup; figures of a plan that is not proven to be its best are upper bounds: ``<=``."""
    bill, setup = answer.bill, answer.setup
    sizes = (f"{setup.nodes:,}", f"{setup.rates.devices:,}", f"{setup.scenario.problem.training.global_batch:,}")
    bound = "-" if answer.bound == inf else format_time(answer.bound)
    if bill is None:
        return (*sizes, "-", bound, "-", "-", "-", str(answer.state))
    sign = "" if bill.step_time <= answer.bound * (1 + 1e-9) else "<= "
    figures = format_duration(bill.seconds), format_money(bill.cost), format_energy(bill.energy)
    cells = (figure if figure == "-" else sign + figure for figure in figures)
    return (*sizes, sign + format_time(bill.step_time), bound, *cells, str(answer.state))


def list_best_lines(choice: Choice, pricing: str) -> Iterator[tuple[str, str]]:
    """Yield the lines about the best setup; ``pricing`` says whose conventions price its plan."""
    best, question = choice.best, choice.question
    assert best is not None and best.best is not None and best.bill is not None
    bill, scenario, plan = best.bill, best.setup.scenario, best.best.plan
    sizes = count_things(best.setup.nodes, "node"), count_things(bill.devices, "device")
    yield "best setup", f"{', '.join(sizes)}, batch {scenario.problem.training.global_batch:,}"
    yield "priced as", pricing
    yield "best plan", plan.describe()
    low, high = find_step_interval(scenario.problem, bill.step_time, scenario.assumptions)
    ends = f"{format_time(low)} to {format_time(high)}"
    yield "step time", f"{format_time(bill.step_time)}; 90 % of steps like it take {ends}"
    if question.tokens is not None:
        tokens = bill.steps * best.setup.batch
        yield "run", f"{bill.steps:,.0f} steps, {tokens:.4g} tokens, {_describe_span(bill, low, high)}"
    if bill.cost is not None:
        yield "cost", format_money(bill.cost)
    if bill.energy is not None:
        yield "energy", f"{format_energy(bill.energy)} at most, of the accelerators alone"
    forecast = forecast_plan(scenario.problem, plan)
    yield "memory", f"{format_size(forecast.device)} of a device; out of memory with {forecast.out_of_memory:.1%}"
    places = list_launches(scenario, plan)
    yield "runs in", describe_launches(places)
    if needs_runnable(scenario, places):
        yield "to run it", "--for megatron, torchtitan ... chooses among plans that a trainer runs"
    yield "objective", f"{question.objective}: {format_value(question.objective, bill)}"
    yield "gap", describe_gap(choice)


def _describe_span(bill: Bill, low: float, high: float) -> str:
    """Return how long a run takes, and between what for the ends of the interval of a step."""
    ends = [format_duration(bill.seconds * end / bill.step_time) for end in (low, high)]
    return f"{format_duration(bill.seconds)} ({ends[0]} to {ends[1]}){_describe_goodput(bill)}"


def _describe_goodput(bill: Bill) -> str:
    return "" if bill.goodput == 1.0 else f", of which {bill.goodput:.1%} is training"


def describe_gap(choice: Choice) -> str:
    """Return in words what is proven of the best setup."""
    best, num_setups = choice.best, count_things(len(choice.answers), "setup")
    num_open = sum(answer.state is State.OPEN for answer in choice.answers)
    if choice.gap is None or best is None:
        return "none known"
    rest = f"; open: {num_open} of {num_setups}" if num_open else ""
    if choice.gap > 1e-9:
        failures = ", without failures in the bound" if best.bill is not None and best.bill.goodput < 1 else ""
        return f"{choice.gap:.1%}{failures}{rest}"
    if num_open or not best.is_settled:
        return f"no setup has less {choice.question.objective}; as much may take less time{rest}"
    return f"proven best of {num_setups}"


def describe_misfit(choice: Choice) -> str:
    """Return why no setup keeps the terms, and which comes nearest."""
    terms, nearest = choice.terms, choice.nearest
    num_setups = count_things(len(choice.answers), "setup")
    if all(answer.state is State.NOTHING_FITS for answer in choice.answers):
        return f"no plan fits on any of {num_setups}"
    found = "" if nearest is None or nearest.bill is None else f"; nearest{_describe_nearest(nearest, nearest.bill)}"
    if any(answer.state in (State.OPEN, State.SEARCHED) for answer in choice.answers):
        return f"the time is over, and no plan that keeps {_describe_terms(terms)} was found yet{found}"
    return f"no plan of {num_setups} keeps {_describe_terms(terms)}{found}"


def _describe_nearest(nearest: SetupAnswer, bill: Bill) -> str:
    money = "" if bill.cost is None else f" and {format_money(bill.cost)}"
    return f": {count_things(nearest.setup.nodes, 'node')}, {format_duration(bill.seconds)}{money}"


def _describe_terms(terms: RunTerms) -> str:
    words = []
    if terms.deadline < inf:
        words.append(f"the deadline of {format_duration(terms.deadline)}")
    if terms.budget < inf:
        words.append(f"the budget of {format_money(terms.budget)}")
    return " and ".join(words) or "the memory"


def to_document(choice: Choice) -> dict[str, Any]:
    """Return a choice as JSON-ready data; times in s, sizes in byte, costs in US dollars, energy in kWh."""
    return {
        "objective": str(choice.question.objective),
        "terms": asdict(choice.terms) | {"price": choice.question.price},
        "best": None if choice.best is None else _answer_to_json(choice.best),
        "nearest": None if choice.best is not None or choice.nearest is None else _answer_to_json(choice.nearest),
        "setups": [_answer_to_json(answer) for answer in choice.answers],
        "lower_bound": choice.lower_bound,
        "gap": choice.gap,
        "wall_time": choice.wall_time,
        "interrupted": choice.interrupted,
    }


def _answer_to_json(answer: SetupAnswer) -> dict[str, Any]:
    best, training = answer.best, answer.setup.scenario.problem.training
    return {
        "nodes": answer.setup.nodes,
        "devices": answer.setup.rates.devices,
        "global_batch": training.global_batch,
        "state": str(answer.state),
        "lower_bound": answer.bound,
        "bill": None if answer.bill is None else asdict(answer.bill),
        "plan": None if best is None else best.plan.to_json(),
        "description": None if best is None else best.plan.describe(),
        "step_time": None if best is None else best.evaluation.step_time,
        "peak_memory": None if best is None else best.evaluation.peak_memory,
        "search_seconds": answer.seconds,
    }
