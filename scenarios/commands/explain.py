"""``meshwise explain``: why a plan, why not another, and what if."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.explanation import explanation_lines, nothing_fits_lines
from meshwise.reports.pictures.pareto import draw_fronts
from meshwise.scenarios.commands.loading import describe_pricing, load_scenario, pricing_document, tell_usual_loads
from meshwise.scenarios.commands.options import Brave, ClusterFile, Json, ScenarioName, SearchTarget
from meshwise.scenarios.commands.page import PageFile, check_page, write_page
from meshwise.scenarios.console import FAILED, NOTHING_FITS, Ticker, emit, list_remarks, note, print_rows
from meshwise.scenarios.explanation import Explanation, Question, parse_question
from meshwise.scenarios.files.results import check_output
from meshwise.scenarios.fitting import NothingFits
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.proposals import OutOfTime

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario

SECONDS = 12.0
"""Seconds of processor time after which an explanation ends with what it has."""


def explain(
    scenario: ScenarioName,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A plan file, instead of the best plan of the search space; or TARGET:FILE of another trainer (see "
            "export)."
        ),
    ] = None,
    cluster: ClusterFile = None,
    target: SearchTarget = None,
    brave: Brave = False,
    why_not: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="Why not a plan with these fields, as 'tensor=8,pipeline=2'.")
    ] = None,
    lost: Annotated[int, typer.Option(min=0, help="Devices that are lost: plan again, with the cost of moving.")] = 0,
    price: Annotated[float, typer.Option(min=0, help="Price of a device for an hour, for the cost of tokens.")] = 1.0,
    front: Annotated[str | None, typer.Option(help="Draw the Pareto fronts (.png, .svg).")] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Processor time after which it ends with what is known.")
    ] = SECONDS,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Explain the best plan, or a given one; --why-not and --lost are answered alone. Ctrl-C prints what is known."""
    check_output(front, (".png", ".svg"))
    check_page(report)
    question = Question(parse_question(why_not) if why_not is not None else {}, lost, price)
    value = load_scenario(scenario, plan, cluster, target, brave=brave)
    tell_usual_loads(value)
    if plan is not None and value.plan is None:
        raise ValueError(f"{plan}: a plan is needed")
    ticker, end = Ticker(), time.process_time() + seconds
    document: dict[str, Any] = {"scenario": value.name} | pricing_document(value)
    interrupted, part = False, ""

    def report_part(words: str) -> None:
        nonlocal part
        part = words
        if time.process_time() >= end:
            raise OutOfTime
        ticker(words)

    try:
        stated_plan = value.plan if plan is not None else None
        with _time_limit(seconds):
            explanation = Explanation(value, question, lambda: end - time.process_time(), report_part)
            for name, section in explanation.list_sections(stated_plan):
                document[name] = section
    except KeyboardInterrupt:
        interrupted = True
    except OutOfTime:
        document["not_looked_at"] = part
    except NothingFits as nothing:
        ticker.clear()
        if as_json:
            emit(nothing.document)
        for line in nothing_fits_lines(nothing.document):
            note(line)
        raise typer.Exit(NOTHING_FITS) from None
    ticker.clear()
    _tell_explanation(value, document, as_json=as_json)
    if front is not None and "memory_front" in document:
        draw_fronts(document["memory_front"], document.get("device_front", []), Path(front), title=value.name)
    if report is not None and "plan" in document:
        explained_plan = Plan.from_json(document["plan"]["document"])
        write_page(report, value, value.simulate(explained_plan), explanation=document)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if "not_looked_at" in document:
        note(f"time ran out after {seconds:g} s, before the end of: {part}; --seconds gives more")
        if "plan" not in document:
            raise typer.Exit(FAILED)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block once the processor time is used, also in the middle of a long simulation."""
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only; the explanation checks the clock between its parts
        return

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _tell_explanation(value: "Scenario", document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit(document)
        return
    print(f"scenario     {document['scenario']}")
    if value.asked_target is not None:
        print(f"priced as    {describe_pricing(value)}")
        print(f"plans for    {value.asked_target}")
    print_rows(list_remarks(value))
    for line in explanation_lines(document):
        print(line)
