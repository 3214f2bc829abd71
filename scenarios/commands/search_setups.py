"""``meshwise search`` with an objective, terms of a run, or several machines: the best setup with its plan."""

import json
import re
from math import inf

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.scenarios.choices.question import MAX_SETUPS, Question
from meshwise.scenarios.choices.report import (
    HEADER,
    describe_misfit,
    list_best_lines,
    list_rows,
    to_document,
)
from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State, choose_setup
from meshwise.scenarios.commands.loading import describe_pricing
from meshwise.scenarios.commands.search_progress import JSON, print_end, tell_setup
from meshwise.scenarios.console import (
    DONE,
    FAILED,
    NOTHING_FITS,
    Ticker,
    emit,
    list_remarks,
    note,
    print_rows,
    print_table,
)
from meshwise.scenarios.files.results import write
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.units import Dimension, parse
from meshwise.strategies.search.objective import Objective

_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_AMOUNT = re.compile(r"\s*(\d+\.?\d*(?:[eE]\+?\d+)?)\s*([kKmMbBgGtT]?)\s*")
_PRICE = re.compile(r"\s*\$?\s*(\d+\.?\d*)\s*(?:(?:\$|usd|USD)?\s*/\s*h)?\s*")


def make_question(
    minimize: str | None,
    nodes: str | None,
    batch: str | None,
    tokens: str | None,
    critical_batch: str | None,
    deadline: str | None,
    budget_usd: float | None,
    price: str | None,
) -> Question | None:
    """Return the question that options ask; ``None`` where none of them is given.

    Raises
    ------
    ValueError
        Where an option has no value of its kind, or one needs another.
    """
    if all(value is None for value in (minimize, nodes, batch, tokens, critical_batch, deadline, budget_usd, price)):
        return None
    names = [str(objective) for objective in Objective]
    if minimize is not None and minimize not in names:
        raise ValueError(f"--minimize is one of {', '.join(names)}, met {minimize}")
    return Question(
        objective=Objective.TIME if minimize is None else Objective(minimize),
        nodes=parse_counts("--nodes", nodes),
        batches=parse_counts("--batch", batch),
        tokens=None if tokens is None else parse_amount("--tokens", tokens),
        critical_batch=inf if critical_batch is None else parse_amount("--critical-batch", critical_batch),
        deadline=inf if deadline is None else _parse_deadline(deadline),
        budget=inf if budget_usd is None else budget_usd,
        price=None if price is None else parse_price(price),
        compares=minimize is None,
    )


def parse_counts(name: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers of a list of numbers and ranges, such as ``1,2,4..8``; none where there is no text.

    >>> parse_counts("--nodes", "1,4..6")
    (1, 4, 5, 6)
    """
    if text is None:
        return ()
    result: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,6})\s*(?:\.\.\s*([1-9]\d{0,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= MAX_SETUPS or len(result) >= MAX_SETUPS:
            raise ValueError(
                f"{name} holds numbers or ranges, at most {MAX_SETUPS}, as in 8 or 1,2,4..8; met {text:.40}"
            )
        result.update(dict.fromkeys(range(first, last + 1)))
    return tuple(result)


def parse_amount(name: str, text: str) -> float:
    """Return a number of tokens, which may end in k, M, B or T.

    >>> parse_amount("--tokens", "1.5T"), parse_amount("--tokens", "300B")
    (1500000000000.0, 300000000000.0)
    """
    match = _AMOUNT.fullmatch(text) if len(text) < 40 else None
    if match is None:
        raise ValueError(f"{name} is a number of tokens, as in 15T, 300B or 4e6; met {text:.40}")
    return float(match[1]) * _SUFFIXES[match[2].upper()]


def parse_price(text: str) -> float:
    """Return US dollars for an hour of one device.

    >>> parse_price("2.5"), parse_price("2.5 $/h")
    (2.5, 2.5)
    """
    match = _PRICE.fullmatch(text) if len(text) < 40 else None
    if match is None:
        raise ValueError(
            f"--price is in US dollars for an hour of one device, as in 2.50 or '2.50 $/h'; met {text:.40}"
        )
    return float(match[1])


def _parse_deadline(text: str) -> float:
    try:
        return parse(re.sub(r"(?<=[\d\s])d$", "days", text.strip()), Dimension.TIME)
    except ValueError:
        raise ValueError(f"--deadline is a time with its unit, as in 30d or '12 h'; met {text:.40}") from None


def refuse_options(**options: object) -> None:
    """Raise ``ValueError`` where options are given that a choice of machines does not take."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"--{name} is for searches of the least time on one machine, met {value} beside an objective, terms of "
                "a run or numbers of nodes"
            )


def search_setups(
    scenario: Scenario,
    question: Question,
    seconds: float | None,
    out: str | None,
    *,
    as_json: bool,
    progress: str | None,
) -> None:
    """Print the best setup with its plan and the table of all setups; write the plan to ``out``."""

    def keep(answer: SetupAnswer) -> None:
        if out is not None and answer.best is not None:
            write(out, json.dumps(answer.best.plan.to_json(), indent=2) + "\n")

    ticker = Ticker()
    choice = choose_setup(scenario, question, seconds, tell_setup(progress, ticker), keep)
    ticker.clear()
    best = choice.best
    if as_json:
        emit({"scenario": scenario.name} | to_document(choice))
    else:
        print_rows([("scenario", scenario.name), *list_remarks(scenario)])
        print_table(HEADER, list_rows(choice))
        if best is not None:
            print()
            print_rows(list_best_lines(choice, describe_pricing(best.setup.scenario)))
    if out is not None and best is not None:
        training = best.setup.scenario.problem.training
        note(f"{out} is a plan for {best.setup.nodes:,} nodes and a global batch of {training.global_batch:,}")
    if progress == JSON:
        print_end({"end": "interrupted" if choice.interrupted else "finished", "gap": choice.gap})
    if code := _find_code(choice):
        raise typer.Exit(code)


def _find_code(choice: Choice) -> int:
    """Return the exit code; where there is no best setup, say why on stderr."""
    if choice.interrupted:
        return INTERRUPTED
    if choice.best is not None:
        return DONE
    if any(answer.state in (State.OPEN, State.SEARCHED) for answer in choice.answers):
        note(describe_misfit(choice))
        return FAILED
    note(describe_misfit(choice))
    return NOTHING_FITS
