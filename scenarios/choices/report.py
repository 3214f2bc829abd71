"""The answer of a choice of setups: lines to print, a JSON-ready document, and where it ends."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from meshwise.scenarios.choices.front import FrontPoint
from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State
from meshwise.scenarios.fitting import explain_misfit
from meshwise.scenarios.intervals import find_step_interval
from meshwise.scenarios.launches import NONE_RUNNABLE, Launch, Runnable, describe_launches, needs_runnable
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.simulator.units import format_duration, format_size, format_time
from meshwise.strategies.search.objective import Bill, Machines, Objective, RunTerms


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


def list_header(choice: Choice) -> tuple[str, ...]:
    """Return the names of the columns of `list_rows`; each way to pay for machines has its own time and money."""
    columns = [name for machines in _list_machines(choice) for name in _name_columns(choice, machines)]
    return ("nodes", "devices", "batch", "step time", *columns, "energy", "state")


def _list_machines(choice: Choice) -> list[Machines]:
    return [rates.machines for rates in choice.answers[0].setup.offers]


def _name_columns(choice: Choice, machines: Machines) -> tuple[str, str]:
    suffix = "" if len(_list_machines(choice)) == 1 else f" {machines}"
    return f"run{suffix}", f"cost{suffix}"


def list_rows(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row of the table for every setup.

    Figures of a setup are those of its fastest plan. Where that is not known, ``>=`` is what no plan of it is below;
    of setups that are still open also what the fastest plan takes that was found.
    """
    return [_list_cells(choice, answer) for answer in choice.answers]


def _list_cells(choice: Choice, answer: SetupAnswer) -> tuple[str, ...]:
    setup, found, least = answer.setup, answer.bills, choice.list_least_bills(answer)
    sizes = (f"{setup.nodes:,}", f"{setup.devices:,}", f"{setup.scenario.problem.training.global_batch:,}")
    if not least:
        return (*sizes, *["-"] * (2 * len(setup.offers) + 2), str(answer.state))
    if answer.is_proven:
        least = found
    elif answer.state in (State.WORSE, State.MISSES_TERMS):
        found = ()  # nobody looked for its best plan: what was found says little of the setup

    def describe_range(form: Callable[[Bill], str], row: int) -> str:
        low = form(least[row])
        if answer.is_proven or low == "-":
            return low
        return f">= {low}" if not found else low if form(found[row]) == low else f"{low} to {form(found[row])}"

    columns = []
    for row in range(len(setup.offers)):
        columns += [describe_range(lambda bill: format_duration(bill.seconds), row)]
        columns += [describe_range(lambda bill: format_money(bill.cost), row)]
    step_time = describe_range(lambda bill: format_time(bill.step_time), 0)
    own_row = found.index(answer.bill) if found and answer.bill in found else 0
    energy = describe_range(lambda bill: format_energy(bill.energy), own_row)
    return (*sizes, step_time, *columns, energy, _describe_state(answer))


def _describe_state(answer: SetupAnswer) -> str:
    """Return the state of a setup, and on which machines it is better where there is a choice."""
    is_known = answer.is_proven or answer.state in (State.BEST, State.OPEN)
    if answer.bill is None or len(answer.bills) == 1 or not is_known or answer.state is State.MISSES_TERMS:
        return str(answer.state)
    return f"{answer.state}, {answer.bill.machines}"


def list_best_lines(
    choice: Choice, pricing: str, places: tuple[Launch, ...], runnable: "RunnableSetup | None" = None
) -> Iterator[tuple[str, str]]:
    """Yield the lines about the best setup.

    Parameters
    ----------
    pricing
        Whose conventions price its plan.
    places
        The trainers that can run the plan.
    runnable
        The fastest plan of the setup that some trainer runs, where none runs the best.
    """
    best, question = choice.best, choice.question
    assert best is not None and best.best is not None and best.bill is not None
    bill, scenario, plan = best.bill, best.setup.scenario, best.best.plan
    sizes = count_things(best.setup.nodes, "node"), count_things(bill.devices, "device")
    machines = f", {bill.machines}" if question.spot is not None else ""
    yield "best setup", f"{', '.join(sizes)}, batch {scenario.problem.training.global_batch:,}{machines}"
    yield "priced as", pricing
    yield "best plan", plan.describe()
    low, high = find_step_interval(scenario.problem, bill.step_time, scenario.assumptions)
    ends = f"{format_time(low)} to {format_time(high)}"
    yield "step time", f"{format_time(bill.step_time)}; 90 % of steps like it take {ends}"
    if question.tokens is not None:
        amount = f"{bill.steps * best.setup.batch:.4g} {scenario.problem.training.unit}"
        yield "run", f"{bill.steps:,.0f} steps, {amount}, {_describe_span(bill, low, high)}"
    if bill.cost is not None:
        yield "cost", format_money(bill.cost)
    yield from _list_spot_lines(choice, best)
    if bill.energy is not None:
        yield "energy", f"{format_energy(bill.energy)} at most, of the accelerators alone"
    forecast = forecast_plan(scenario.problem, plan)
    yield "memory", f"{format_size(forecast.device)} of a device; out of memory with {forecast.out_of_memory:.1%}"
    yield "runs in", describe_launches(places, scenario.spec)
    if needs_runnable(scenario, places):
        yield "fastest to run", NONE_RUNNABLE if runnable is None else runnable.describe()
    yield "objective", f"{question.objective}: {format_value(question.objective, bill)}"
    yield "gap", describe_gap(choice)


def _list_spot_lines(choice: Choice, best: SetupAnswer) -> Iterator[tuple[str, str]]:
    """Yield what the other machines would cost, and what reclaims are taken to cost."""
    for other in best.bills:
        if best.bill is not None and other.machines is not best.bill.machines:
            missed = "" if choice.terms.is_met(other) else f", which misses {_describe_terms(choice.terms)}"
            goodput = _describe_goodput(other)
            yield str(other.machines), f"{format_money(other.cost)}, {format_duration(other.seconds)}{goodput}{missed}"
    if choice.question.reclaims is not None:
        yield "reclaims", choice.question.reclaims.describe_costs(best.setup.scenario)


@dataclass(frozen=True, slots=True)
class RunnableSetup:
    """The fastest plan of a setup that some trainer runs, with what the run takes by it."""

    plan: Runnable
    bills: tuple[Bill, ...]
    bill: Bill

    def describe(self) -> str:
        """Return the plan and its bill in one line."""
        money = "" if self.bill.cost is None else f" and {format_money(self.bill.cost)}"
        return f"{self.plan.describe()}; the run takes {format_duration(self.bill.seconds)}{money}"


def list_front_rows(points: Iterable[FrontPoint]) -> list[tuple[str, ...]]:
    """Return a row of the table of the front for every point on it."""
    return [
        (
            f"{point.answer.setup.nodes:,}",
            f"{point.bill.devices:,}",
            f"{point.answer.setup.scenario.problem.training.global_batch:,}",
            str(point.bill.machines),
            format_duration(point.bill.seconds),
            format_money(point.bill.cost),
            format_size(point.peak_memory),
            "proven" if point.is_proven else "not proven",
        )
        for point in points
        if point.is_on_front
    ]


FRONT_HEADER = ("nodes", "devices", "batch", "machines", "run", "cost", "memory", "place on the front")


def list_trial_rows(answer: SetupAnswer) -> list[tuple[str, ...]]:
    """Return a row for every evaluated plan of a setup that no other beats in step time and memory."""
    rows: list[tuple[str, ...]] = []
    for trial in answer.trials:
        evaluation = trial.evaluation
        figures = format_time(evaluation.step_time), format_size(evaluation.peak_memory)
        rows.append((*figures, trial.plan.describe()))
    return rows


def front_to_json(point: FrontPoint) -> dict[str, Any]:
    """Return a point of the front as JSON-ready data; times in s, memory in bytes, money in US dollars."""
    answer, bill = point.answer, point.bill
    return {
        "nodes": answer.setup.nodes,
        "devices": bill.devices,
        "global_batch": answer.setup.scenario.problem.training.global_batch,
        "machines": str(bill.machines),
        "step_time": bill.step_time,
        "seconds": bill.seconds,
        "cost": bill.cost,
        "peak_memory": point.peak_memory,
        "on_front": point.is_on_front,
        "proven": point.is_proven,
        "seconds_interval": list(point.interval),
        "cost_interval": None if point.money_interval is None else list(point.money_interval),
        "plan": answer.plan.describe(),
    }


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
        has_failures = best.bill is not None and best.setup.scenario.run is not None
        if has_failures and best.is_proven and not num_open:
            return (
                f"the fastest plan of every setup that may be better is proven; failures are simulated ({num_setups})"
            )
        failures = ", without failures in the bound" if has_failures else ""
        return f"{choice.gap:.1%}{failures}{rest}"
    if num_open or not best.is_settled:
        return f"no setup has less {choice.question.objective}; as much may take less time{rest}"
    return f"proven best of {num_setups}"


def describe_misfit(choice: Choice) -> str:
    """Return why no setup keeps the terms, and which comes nearest."""
    terms, nearest = choice.terms, choice.nearest
    num_setups = count_things(len(choice.answers), "setup")
    unfit_answers = [answer for answer in choice.answers if answer.state in (State.NOTHING_FITS, State.NO_PLAN)]
    if len(unfit_answers) == len(choice.answers):
        # of setups that lack memory the largest says the most, if there is one
        shown = max(unfit_answers, key=lambda answer: (answer.state is State.NOTHING_FITS, answer.setup.devices))
        reason = explain_misfit(shown.setup.scenario, shown.nearest)
        if shown.state is State.NO_PLAN:
            return f"no plan is allowed on any of {num_setups}: {reason.removeprefix('nothing fits: ')}"
        return f"no plan fits on any of {num_setups}; on {count_things(shown.setup.nodes, 'node')} {reason}"
    found = "" if nearest is None or nearest.bill is None else f"; nearest{_describe_nearest(nearest, nearest.bill)}"
    has_terms = min(terms.deadline, terms.budget) < inf
    if any(answer.state in (State.OPEN, State.SEARCHED) for answer in choice.answers):
        if nearest is None:
            time_text = format_duration(choice.wall_time)
            return f"time ran out after {time_text}, before a plan was found that fits; whether one does is not known"
        return f"time ran out, and no plan that keeps {_describe_terms(terms)} was found yet{found}"
    unfit_text = f" (on {len(unfit_answers)} of them no plan fits)" if unfit_answers and has_terms else ""
    return f"no plan of {num_setups}{unfit_text} keeps {_describe_terms(terms)}{found}"


def _describe_nearest(nearest: SetupAnswer, bill: Bill) -> str:
    money = "" if bill.cost is None else f" and {format_money(bill.cost)}"
    machines = f", {bill.machines}" if len(nearest.bills) > 1 else ""
    return f": {count_things(nearest.setup.nodes, 'node')}, {format_duration(bill.seconds)}{money}{machines}"


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
        "terms": asdict(choice.terms)
        | {name: getattr(choice.question, name) for name in ("price", "spot", "reclaim_every")},
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
        "devices": answer.setup.devices,
        "global_batch": training.global_batch,
        "state": str(answer.state),
        "lower_bound": answer.bound,
        "proven": answer.is_proven,
        "bill": None if answer.bill is None else asdict(answer.bill),
        "bills": [asdict(bill) for bill in answer.bills],
        "plan": None if best is None else best.plan.to_json(),
        "description": None if best is None else best.plan.describe(),
        "step_time": None if best is None else best.evaluation.step_time,
        "peak_memory": None if best is None else best.evaluation.peak_memory,
        "search_seconds": answer.seconds,
    }
