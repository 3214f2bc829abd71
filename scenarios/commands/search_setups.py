"""``meshwise search`` with an objective, terms of a run, or several machines: the best setup with its plan."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.pictures.setups import draw_setups
from meshwise.scenarios.choices.front import FrontPoint, list_front_points
from meshwise.scenarios.choices.question import PARSERS, Question, make_question
from meshwise.scenarios.choices.report import (
    FRONT_HEADER,
    RunnableSetup,
    count_things,
    describe_misfit,
    front_to_json,
    list_best_lines,
    list_front_rows,
    list_header,
    list_rows,
    list_trial_rows,
    to_document,
)
from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State, choose_setup, write_bills
from meshwise.scenarios.choices.setup_file import build_setup_files, name_setup_file
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
from meshwise.scenarios.files.amounts import format_amount
from meshwise.scenarios.files.results import write
from meshwise.scenarios.fitting import start_timer
from meshwise.scenarios.launches import (
    LEAST_RESERVE,
    RESERVE,
    Launch,
    fastest_runnable,
    list_launches,
    needs_runnable,
    reserve_seconds,
)
from meshwise.scenarios.scenario import Scenario


def read_question(values: dict[str, Any], *, compares: bool) -> Question | None:
    """Return the question that a file and options ask; a message names the option of a field."""
    try:
        return make_question(values, compares=compares)
    except ValueError as error:
        message = str(error)
        name = next(name for name in PARSERS if re.match(rf"{name}\b", message))
        raise ValueError(f"--{name.replace('_', '-')}{message.removeprefix(name)}") from None


def search_setups(
    scenario: Scenario,
    question: Question,
    seconds: float,
    out: str | None,
    *,
    as_json: bool,
    progress: str | None,
    front: bool = False,
    plot: str | None = None,
) -> None:
    """Print the best setup with its plan and the table of all setups.

    Parameters
    ----------
    out
        Where the plan is written, with the scenario of its setup beside it.
    front
        Whether the setups that no other beats are shown.
    plot
        Where the picture of all setups is drawn.
    """

    def keep(answer: SetupAnswer) -> None:
        if out is not None:
            _write_setup(out, answer)

    ticker, time_left = Ticker(), start_timer(seconds)
    search_seconds = reserve_seconds(scenario, seconds)
    choice = choose_setup(scenario, question, search_seconds, tell_setup(progress, ticker), keep)
    ticker.clear()
    report = _SetupReport(choice)
    if choice.best is not None and not choice.interrupted:
        report.add_trainers(max(time_left(), LEAST_RESERVE, RESERVE * seconds), out)
    if front:
        report.points = list_front_points(choice)
    if plot is not None and report.points:
        draw_setups(
            list(map(front_to_json, report.points)),
            plot,
            title=f"{scenario.name}: other sizes",
            facts=_describe_facts(choice),
        )
    if as_json:
        emit({"scenario": scenario.name} | to_document(choice) | report.build_document(front=front))
    else:
        report.tell(scenario, front=front)
    if out is not None and choice.best is not None:
        note(_describe_files(out, choice.best))
    if progress == JSON:
        print_end({"end": "interrupted" if choice.interrupted else "finished", "gap": choice.gap})
    if code := _find_code(choice):
        raise typer.Exit(code)


class _SetupReport:
    """A choice, and what follows from it: where the best plan runs, and the front."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.places: tuple[Launch, ...] = ()
        self.runnable: RunnableSetup | None = None
        self.runnable_file: str | None = None
        self.points: tuple[FrontPoint, ...] = ()

    def add_trainers(self, seconds: float, out: str | None) -> None:
        """Add the trainers that run the best plan; where none does, the fastest plan of the setup that one runs."""
        best = self.choice.best
        assert best is not None and best.best is not None
        scenario = best.setup.scenario
        self.places = list_launches(scenario, best.plan)
        if not needs_runnable(scenario, self.places):
            return
        question, terms = self.choice.question, self.choice.terms
        runnable = fastest_runnable(scenario, start_timer(seconds))
        if runnable is None:
            return
        bills = write_bills(question, terms, best.setup, runnable.plan, runnable.step_time)
        self.runnable = RunnableSetup(runnable, bills, terms.choose_bill(bills, question.objective))
        if out is not None:
            path = Path(out)
            self.runnable_file = str(path.with_name(f"{path.stem}-{runnable.trainer}{path.suffix}"))
            write(self.runnable_file, json.dumps(runnable.plan.to_json(), indent=2) + "\n")

    def build_document(self, *, front: bool) -> dict[str, Any]:
        """Return what follows from the choice as JSON-ready data."""
        runnable = self.runnable
        document: dict[str, Any] = {"trainers": [asdict(place) for place in self.places], "runnable": None}
        if runnable is not None:
            document["runnable"] = (
                asdict(runnable.plan)
                | {"plan": runnable.plan.plan.to_json(), "bill": asdict(runnable.bill)}
                | {"bills": [asdict(bill) for bill in runnable.bills]}
            )
        return document | ({"front": list(map(front_to_json, self.points))} if front else {})

    def tell(self, scenario: Scenario, *, front: bool) -> None:
        """Print the table, the front where it is asked for, and the lines about the best setup."""
        choice = self.choice
        print_rows([("scenario", scenario.name), *list_remarks(scenario)])
        print_table(list_header(choice), list_rows(choice))
        if front:
            print("\nno other setup has less time, devices, money and memory")
            print_table(FRONT_HEADER, list_front_rows(self.points))
        best = choice.best
        if best is None:
            return
        if front and len(best.trials) > 1:
            print(
                "\nplans of the best setup that were simulated: slower with less memory "
                "(not proven; meshwise explain has the proven front)"
            )
            for step_time, memory, plan in list_trial_rows(best):
                print(f"{step_time:>9}  {memory:>9}  {plan}")
        print()
        print_rows(list_best_lines(choice, describe_pricing(best.setup.scenario), self.places, self.runnable))
        if self.runnable_file is not None:
            note(f"the plan that is fastest to run is in {self.runnable_file}")


def _describe_facts(choice: Choice) -> str:
    """Return the line below the title of the picture: what was asked, and what the bars are."""
    tokens = "one step, " if choice.question.tokens is None else f"{format_amount(choice.question.tokens)} tokens, "
    return f"{tokens}{count_things(len(choice.answers), 'setup')}; bars: 90 % of runs; every setup by its fastest plan"


def _write_setup(out: str, answer: SetupAnswer) -> None:
    write(out, json.dumps(answer.plan.to_json(), indent=2) + "\n")
    for path, text in build_setup_files(answer.setup, name_setup_file(out)).items():
        write(path, text)


def _describe_files(out: str, best: SetupAnswer) -> str:
    """Return what was written, and the command that simulates it."""
    batch, brave = best.setup.scenario.problem.training.global_batch, best.setup.scenario.problem.memory_margin == 1.0
    scenario_file = name_setup_file(out)
    return (
        f"{out} is a plan for {count_things(best.setup.nodes, 'node')} and a global batch of {batch:,}, the scenario "
        f"of which is {scenario_file}: meshwise simulate {scenario_file} --plan {out}{' --brave' if brave else ''}"
    )


def _find_code(choice: Choice) -> int:
    """Return the exit code; where there is no best setup, say why on stderr."""
    if choice.interrupted:
        return INTERRUPTED
    if choice.best is not None:
        return DONE
    note(describe_misfit(choice))
    is_open = any(answer.state in (State.OPEN, State.SEARCHED) for answer in choice.answers)
    return FAILED if is_open else NOTHING_FITS
