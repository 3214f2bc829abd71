"""``meshwise execute --top``: search, run the best plans, and learn the machine from them."""

import json
from pathlib import Path
from typing import Any

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.launch.run import Run
from meshwise.executor.options import RunOptions
from meshwise.scenarios.closed_loop import ClosedLoop, close_loop
from meshwise.scenarios.commands.run_report import follow, to_json, write_run
from meshwise.scenarios.console import Ticker, emit, note, show, table
from meshwise.scenarios.files.results import folder, write
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.units import format_time
from meshwise.strategies.plan.plan import Plan

HEAD = ("plan", "predicted", "measured", "error", "predicted after", "error after")


def execute_top(scenario: Scenario, most: int, options: RunOptions, *, out: str | None, as_json: bool) -> None:
    """Run the best plans of a scenario, fit its machine to their step times, rank them again and print the changes."""
    target = folder(out) if out is not None else None
    ticker = Ticker()

    def told(words: str) -> None:
        ticker.done()
        note(words)

    def finished(number: int, plan: Plan, run: Run) -> None:
        predicted = scenario.simulate(plan)
        error = f"{predicted.step_time / run.step_time - 1:+.1%}"
        told(f"  {run.step_time * 1e3:.1f} ms a step, {predicted.step_time * 1e3:.1f} ms predicted ({error})")
        if target is not None:
            write_run(folder(target / f"plan-{number}"), to_json(run, predicted), predicted, run)

    loop = close_loop(scenario, most, options, folder=target, note=told, progress=follow(ticker), finished=finished)
    ticker.done()
    document = loop.to_json() | {"cluster": str(target / "cluster.yaml") if target is not None else None}
    if target is not None:
        write_cluster(loop.refit.cluster, target / "cluster.yaml", _comment(loop))
        write(target / "loop.json", json.dumps(document, indent=2) + "\n")
        if loop.best is not None:
            write(target / "plan.json", json.dumps(loop.best.to_json(), indent=2) + "\n")
    if as_json:
        emit(document)
    else:
        _print_loop(loop, document, target)
    if loop.interrupted:
        raise typer.Exit(INTERRUPTED)


def _comment(loop: ClosedLoop) -> str:
    return f"Fitted by `meshwise execute --top` to the steps of {len(loop.rows)} plans that ran on this machine."


def _print_loop(loop: ClosedLoop, document: dict[str, Any], target: Path | None) -> None:
    table(
        HEAD,
        [
            (
                row.plan.describe(),
                format_time(row.before),
                format_time(row.measured),
                f"{row.before / row.measured - 1:+.1%}",
                format_time(row.after) if row.after is not None else "-",
                f"{row.after / row.measured - 1:+.1%}" if row.after is not None else "-",
            )
            for row in loop.rows
        ],
    )
    print()
    after = document["mean_error_after"]
    figures = {**document["device"], **document["collectives"]}
    show(
        [
            ("mean error before", f"{document['mean_error_before']:.1%}"),
            ("mean error after", f"{after:.1%}, each plan from the others" if after is not None else "needs two plans"),
            ("order of plans", f"Kendall's tau {document['tau_before']:.2f} before, {document['tau_after']:.2f} after"),
            ("time now over before", ", ".join(f"{name} {factor:.2f}" for name, factor in figures.items())),
            ("ran fastest", document["fastest"]),
            *([("best on the fitted machine", document["best"])] if loop.best is not None else []),
            *([("fitted machine", f"{target / 'cluster.yaml'}; give it to --cluster")] if target is not None else []),
        ]
    )
