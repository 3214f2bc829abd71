"""The answer of a choice of setups: lines to print, a JSON-ready document, and where it ends."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State
from meshwise.simulator.units import format_duration, format_time
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
    bill, setup = answer.bill, answer.setup
    sizes = (f"{setup.nodes:,}", f"{setup.rates.devices:,}", f"{setup.scenario.problem.training.global_batch:,}")
    times = (
        "-" if bill is None else format_time(bill.step_time),
        "-" if answer.bound == float("inf") else format_time(answer.bound),
    )
    figures = (
        ("-",) * 3
        if bill is None
        else (format_duration(bill.seconds), format_money(bill.cost), format_energy(bill.energy))
    )
    return (*sizes, *times, *figures, str(answer.state))


def list_best_lines(choice: Choice) -> Iterator[tuple[str, str]]:
    """Yield the lines about the best setup."""
    best, question = choice.best, choice.question
    assert best is not None and best.best is not None and best.bill is not None
    bill, training = best.bill, best.setup.scenario.problem.training
    sizes = count_things(best.setup.nodes, "node"), count_things(bill.devices, "device")
    yield "best setup", f"{', '.join(sizes)}, batch {training.global_batch:,}"
    yield "best plan", best.best.plan.describe()
    yield "step time", format_time(bill.step_time)
    if question.tokens is not None:
        yield "run", f"{bill.steps:,.0f} steps, {format_duration(bill.seconds)}{_describe_goodput(bill)}"
    if bill.cost is not None:
        yield "cost", format_money(bill.cost)
    if bill.energy is not None:
        yield "energy", f"{format_energy(bill.energy)} at most, of the accelerators alone"
    yield "objective", f"{question.objective}: {format_value(question.objective, bill)}"
    yield "gap", describe_gap(choice)


def _describe_goodput(bill: Bill) -> str:
    return "" if bill.goodput == 1.0 else f", of which {bill.goodput:.1%} is training"


def describe_gap(choice: Choice) -> str:
    """Return in words what is proven of the best setup."""
    num_open = sum(answer.state is State.OPEN for answer in choice.answers)
    if choice.gap is None:
        return "none known"
    if choice.gap <= 1e-9:
        return f"proven best of {count_things(len(choice.answers), 'setup')}"
    rest = f"; open: {num_open} of {count_things(len(choice.answers), 'setup')}" if num_open else ""
    return f"{choice.gap:.1%}{rest}"


def describe_misfit(choice: Choice) -> str:
    """Return why no setup keeps the terms, and which comes nearest."""
    terms, nearest = choice.terms, choice.nearest
    if nearest is None or nearest.bill is None:
        return f"no plan fits on any of {count_things(len(choice.answers), 'setup')}"
    met = format_duration(nearest.bill.seconds)
    money = "" if nearest.bill.cost is None else f" and {format_money(nearest.bill.cost)}"
    return (
        f"no plan of {count_things(len(choice.answers), 'setup')} keeps {_describe_terms(terms)}; "
        f"nearest: {count_things(nearest.setup.nodes, 'node')}, {met}{money}"
    )


def _describe_terms(terms: RunTerms) -> str:
    words = []
    if terms.deadline < float("inf"):
        words.append(f"the deadline of {format_duration(terms.deadline)}")
    if terms.budget < float("inf"):
        words.append(f"the budget of {format_money(terms.budget)}")
    return " and ".join(words) or "the memory"


def to_document(choice: Choice) -> dict[str, Any]:
    """Return a choice as JSON-ready data; times in s, sizes in byte, costs in US dollars, energy in kWh."""
    return {
        "objective": str(choice.question.objective),
        "terms": asdict(choice.terms),
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
